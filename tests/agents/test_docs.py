"""Every program on the pages in docs/ runs as it stands there, one page in one namespace."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from hogwild_engine import EngineConfig, Protocol, Request
from hogwild_engine.api.events import Event, FinishReason, WorkerEnd

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")


def rows(section: str) -> set[str]:
    """Return what the first columns of a section's tables name."""
    text = REFERENCE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ("Events", {kind.type for kind in Event.__subclasses__()}),
        ("Why a worker stopped", set(get_args(WorkerEnd))),
        ("Why an answer ended", set(get_args(FinishReason))),
        ("Settings of a request", {field.name for field in fields(Request)}),
        ("Settings of an engine", {field.name for field in fields(EngineConfig)}),
        ("A protocol of your own", {field.name for field in fields(Protocol)}),
    ],
)
def test_the_reference_names_everything_and_nothing_else(section: str, wanted: set[str]) -> None:
    assert rows(section) == wanted


def test_the_defaults_of_the_reference_are_the_defaults() -> None:
    for kind, section in ((Request, "request"), (EngineConfig, "engine")):
        text = REFERENCE.partition(f"## Settings of {'a' if kind is Request else 'an'} {section}")[
            2
        ]
        for field in fields(kind):
            if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
                row = re.search(rf"^\| `{field.name}` \| (.*?) \|", text, re.MULTILINE)
                assert row is not None
                assert row.group(1).strip("`") == str(field.default)


def test_the_program_of_the_reference_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [code for language, code in BLOCK.findall(REFERENCE) if language == "python"]
    exec(compile(program, "reference.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_programs_of_the_chat_models_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = BLOCK.findall((DOCS / "chat_model.md").read_text(encoding="utf-8"))
    programs = [code for language, code in blocks if language == "python"]
    assert len(programs) >= 8
    assert {language for language, _ in blocks} <= {"python", "text"}
    names: dict[str, object] = {"__name__": "docs"}
    for program in programs:
        exec(compile(program, "chat_model.md", "exec"), names)
        assert capsys.readouterr().out.strip(), program
