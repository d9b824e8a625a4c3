"""The ``hogwild`` command: what it prints, how it ends, and what it keeps quiet about."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hogwild_agents import ChatHogwild, __version__
from hogwild_agents.cli import demo, terminal
from hogwild_agents.cli.commands import main
from hogwild_engine.api.config import SamplingParams
from hogwild_engine.api.request import Request, make_workers
from hogwild_engine.engine import Engine
from tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
TASK = "Describe spring and autumn, a short paragraph for each."
SHORT = ["--max-steps", "24", "--max-tokens", "12", "--seed", "3"]
SMALL = Request(
    messages=({"role": "user", "content": TASK},),
    max_steps=24,
    max_tokens=12,
    sampling=SamplingParams(seed=3),
)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Hogwild = Callable[..., Ended]


@pytest.fixture
def hogwild(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Hogwild:
    """Runs the command in this process, which keeps its environment."""
    for name, value in terminal.QUIET.items():
        monkeypatch.setenv(name, value)

    def run(*args: str) -> Ended:
        code = main(args)
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def engine(team_llm: ChatHogwild) -> Engine:
    return team_llm.engine


@pytest.fixture(scope="module")
def tiny(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that loads at once and writes nonsense."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), engine.tokenizer, 1024)


def env() -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))
    return os.environ | {"PYTHONPATH": path}


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env()}
    command = [sys.executable, "-m", "hogwild_agents", *args]
    return subprocess.Popen(command, text=True, preexec_fn=heed_interrupts, **(pipes | options))


def heed_interrupts() -> None:
    """A run in the background, as under nohup, ignores interrupts, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[str], stdin: str | None = None) -> Ended:
    out, err = process.communicate(stdin, timeout=120)
    return Ended(process.returncode, out, err)


def last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def assert_is_one_line_of_ours(err: str) -> None:
    assert err.startswith("hogwild: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1


def test_version_is_the_distributions(hogwild: Hogwild) -> None:
    assert hogwild("--version") == (0, f"hogwild {__version__}\n", "")


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_help_shows_both_commands_and_examples(hogwild: Hogwild, args: list[str]) -> None:
    code, out, err = hogwild(*args)
    assert (code, err) == (0, "")
    assert "hogwild demo" in out
    assert "hogwild run " in out


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["run", TASK, "--workers", "0"],
        ["bench", "--help"],
        ["bench", "--context", "0"],
    ],
)
def test_what_needs_no_model_imports_no_heavy_library(args: list[str]) -> None:
    code = (
        "import sys; from hogwild_agents.cli.commands import main; main(sys.argv[1:]);"
        "print({'torch', 'transformers', 'langchain_core', 'langgraph'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code, *args], env=env(), capture_output=True)
    assert last_line(run.stdout.decode()) == "set()", run.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["walk"], "walk"),
        (["run"], "prompt"),
        (["run", " "], "PROMPT"),
        (["run", TASK, "--speed", "9"], "--speed"),
        (["run", TASK, "--layout", "round"], "--layout"),
        (["run", TASK, "--answer", "sing"], "--answer"),
        (["run", TASK, "--protocol", "chess"], "protocol"),
        (["run", TASK, "--workers", "0"], "workers"),
        (["run", TASK, "--workers", "-2"], "workers"),
        (["run", TASK, "--workers", ""], "workers"),
        (["run", TASK, "--workers", "Ann,ann"], "workers"),
        (["run", TASK, "--workers", "Ann,B*b"], "workers"),
        (["run", TASK, "--role", "Zoe=sings"], "--role"),
        (["run", TASK, "--role", "Alice"], "--role"),
        (["run", TASK, "--max-steps", "0"], "max_steps"),
        (["run", TASK, "--max-steps", "many"], "--max-steps"),
        (["run", TASK, "--max-tokens", "-1"], "max_tokens"),
        (["run", TASK, "--temperature", "-1"], "temperature"),
        (["run", TASK, "--top-p", "2"], "top_p"),
        (["run", TASK, "--seed", "-1"], "seed"),
        (["run", TASK, "--model", ""], "model"),
        (["run", TASK, "--threads", "0"], "num_threads"),
        (["demo", "--threads", "-1"], "num_threads"),
    ],
)
def test_bad_usage_ends_with_2_and_one_line(hogwild: Hogwild, args: list[str], named: str) -> None:
    code, out, err = hogwild(*args)
    assert (code, out) == (2, "")
    assert_is_one_line_of_ours(err)
    assert named in err


def test_empty_standard_input_is_bad_usage(
    hogwild: Hogwild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert hogwild("run", "-").code == 2


@pytest.mark.parametrize("model", ["/no/such/model.gguf", "./nothing", "a/b/c"])
def test_a_missing_model_ends_with_1_and_one_line(hogwild: Hogwild, model: str) -> None:
    code, out, err = hogwild("run", TASK, "--model", model)
    assert (code, out) == (1, "")
    assert_is_one_line_of_ours(err)
    assert model in err


def test_debug_shows_where_it_failed(hogwild: Hogwild) -> None:
    code, _, err = hogwild("run", TASK, "--model", "/no/such/model.gguf", "--debug")
    assert code == 1
    assert err.startswith("Traceback")
    assert last_line(err).startswith("hogwild: model: ")


def test_a_prompt_longer_than_the_context_is_bad_usage(hogwild: Hogwild, tiny: str) -> None:
    code, out, err = hogwild("run", "tea " * 2000, "--model", tiny)
    assert (code, out) == (2, "")
    assert_is_one_line_of_ours(err)


def test_json_is_one_event_a_line_and_the_answer_last(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.show(engine, SMALL, as_json=True)
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert {event["type"] for event in events} >= {"step", "token", "paragraph"}
    answer = events[-1]
    assert answer["type"] == "answer"
    assert answer["text"] == "".join(e["text"] for e in events if e["type"] == "answer_token")
    assert answer["usage"]["worker_tokens"].keys() == {"Alice", "Bob"}
    assert [event["type"] for event in events].count("answer") == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pipe_gets_the_answer_alone(
    engine: Engine, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    request = replace(SMALL, workers=make_workers(workers))
    answer = engine.submit(request).result().text
    terminal.show(engine, request)
    out, err = capsys.readouterr()
    assert (out.strip(), err) == (answer.strip(), "")


def test_workers_and_figures_go_to_standard_error(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.show(engine, SMALL, shown="workers")
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert err.startswith(("Alice [1]", "Bob [1]"))
    assert "stored" in last_line(err)
    assert "stored" not in out


def test_a_session_that_is_left_early_is_cancelled(
    engine: Engine,
    all_pages_free: Callable[[Engine], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        terminal.show(engine, replace(SMALL, max_steps=4000), as_json=True)
    assert all_pages_free(engine)


def test_the_demo_divides_its_task_between_two_workers(engine: Engine) -> None:
    # Where this fails after a change of how tokens are drawn, look for another seed.
    wrote = {"Alice": set[str](), "Bob": set[str]()}
    for paragraph in engine.submit(demo.REQUEST).result().paragraphs:
        wrote[paragraph.worker] |= set(re.findall(r"def (\w+)", paragraph.text))
    assert wrote["Alice"] | wrote["Bob"] == set(demo.FUNCTIONS)
    assert wrote["Alice"] - wrote["Bob"]
    assert wrote["Bob"] - wrote["Alice"]


def test_the_same_seed_prints_the_same_lines(hogwild: Hogwild, tiny: str) -> None:
    first, second = (
        hogwild("run", TASK, "--model", tiny, "--json", *SHORT).out.splitlines()[:-1]
        for _ in range(2)
    )
    assert first == second


def test_names_and_roles_reach_the_team(hogwild: Hogwild, tiny: str) -> None:
    options = ["--workers", "Ann,Ben", "--role", "Ben=writes about autumn", "--json", *SHORT]
    code, out, err = hogwild("run", TASK, "--model", tiny, *options)
    assert (code, err) == (0, "")
    assert json.loads(last_line(out))["usage"]["worker_tokens"].keys() == {"Ann", "Ben"}


def test_a_piped_run_prints_nothing_but_its_lines(tiny: str) -> None:
    process = start("run", "-", "--model", tiny, *SHORT, stdin=subprocess.PIPE)
    code, out, err = finish(process, TASK)
    assert (code, err) == (0, "")
    assert out.strip()
    assert "\x1b" not in out


def test_a_reader_that_goes_away_ends_it_quietly(tiny: str) -> None:
    process = start("run", TASK, "--model", tiny, "--json")
    assert process.stdout
    assert process.stderr
    with process.stderr:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_interrupt_ends_with_130_and_no_traceback(tiny: str) -> None:
    process = start("run", TASK, "--model", tiny, "--json")
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "")


def test_a_terminal_is_restored_after_an_interrupt(tiny: str) -> None:
    control, end = pty.openpty()
    process = start("run", TASK, "--model", tiny, stdout=end, env=env() | {"TERM": "xterm"})
    os.close(end)
    shown = b""
    while b"reading the prompt" not in shown:
        shown += os.read(control, 4096)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # Linux: the other end is closed
        while more := os.read(control, 4096):
            shown += more
    os.close(control)
    assert finish(process)[::2] == (130, "")
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    assert shown.rfind(show) > shown.rfind(hide) >= 0
