"""Every block of code in the README runs as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_readme_runs(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", COMMANDS)
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
