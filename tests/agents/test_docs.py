"""Every program on the pages in docs/ runs as it stands there, one page in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
