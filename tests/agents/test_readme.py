"""Every block of code in the README runs as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from hogwild_agents.cli.commands import USAGE

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
PROGRAMS = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, code in BLOCKS
    if language == "sh"
    for line in code.splitlines()
    if line.strip()
]


def test_the_readme_shows_programs_and_commands_and_nothing_that_no_test_runs() -> None:
    assert len(PROGRAMS) >= 2
    assert COMMANDS
    assert {language for language, _ in BLOCKS} <= {"python", "sh", "text"}


def defined(text: str) -> set[str]:
    """Run the blocks of code in an answer; return the names of the functions that they define."""
    names: dict[str, object] = {}
    for code in re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    return {name for name, value in names.items() if callable(value)}


def run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), names)
    return names


def writers(reply: AIMessage) -> set[str]:
    """Return who finished a paragraph."""
    return {p["worker"] for p in reply.response_metadata["paragraphs"] if p["complete"]}


def test_the_program_of_the_readme_shows_teams_that_divide_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run(PROGRAMS[0])
    assert capsys.readouterr().out.strip()
    assert writers(names["reply"]) == {"Alice", "Bob"}
    assert defined(names["reply"].text) == {"is_even", "is_odd"}
    assert writers(names["answer"]) == {"Alice", "Bob"}
    assert defined(names["answer"].text) >= {"is_positive", "is_negative"}


def test_the_graph_of_the_readme_shows_both_workers_and_their_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run(PROGRAMS[1])
    shown = capsys.readouterr().out
    assert {line.split(" ")[0] for line in shown.splitlines()} >= {"Alice", "Bob", "answer"}
    state = names["graph"].get_state(names["thread"]).values
    assert defined(state["messages"][-1].text) == {"is_even", "is_odd"}


def test_the_commands_of_the_readme_show_what_they_are_there_for() -> None:
    """Answers in a pipe, and events of two workers."""
    answer, events = (output(command) for command in COMMANDS if "hogwild run" in command)
    assert defined(answer) == {"is_even", "is_odd"}
    lines = [json.loads(line) for line in events.splitlines()]
    assert {p["worker"] for p in lines[-1]["paragraphs"] if p["complete"]} == {"Ann", "Ben"}
    assert defined(lines[-1]["text"]) == {"to_upper", "to_lower"}


def test_the_examples_of_help_show_what_they_are_there_for() -> None:
    joined, piped = (
        line for line in USAGE.splitlines() if "hogwild run" in line and "code" in line
    )
    assert defined(output(joined.strip())) == {"is_even", "is_odd"}
    task = re.search(r'echo "(.*?)"', piped)
    assert task is not None
    events = output(piped.partition("| ")[2], task.group(1)).splitlines()
    assert defined(json.loads(events[-1])["text"]) >= {"is_zero", "is_one"}


def output(command: str, stdin: str | None = None) -> str:
    _, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", "hogwild_agents", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        input=stdin,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if "hogwild run" not in c])
def test_a_command_of_the_readme_runs(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        run = ["make", "--dry-run", *arguments]
    elif program == "pip":
        options = ["--dry-run", "--no-deps", "--no-build-isolation"]
        run = [sys.executable, "-m", "pip", *arguments[:1], *options, *arguments[1:]]
    else:
        assert program == "hogwild"
        run = [sys.executable, "-m", "hogwild_agents", *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
