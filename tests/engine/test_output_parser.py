"""The output parser, however its input is divided."""

from __future__ import annotations

import json

import pytest

from hogwild_engine.text.output_parser import OutputParser
from hogwild_engine.text.tool_format import OURS

CALLS = [("add", {"a": 1}), ("weigh", {"things": ["b", "}"]})]


def calls_by_index(parser: OutputParser, chunks: list[str]) -> dict[int, tuple[str | None, str]]:
    """The name and the arguments of each call, joined from the pieces."""
    calls: dict[int, tuple[str | None, str]] = {}
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    for piece in (*pieces, *parser.feed("", final=True)):
        if piece.kind == "call":
            name, arguments = calls.get(piece.call, (None, ""))
            calls[piece.call] = (name or piece.name, arguments + piece.text)
    return calls


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_each_piece_names_its_call(size: int) -> None:
    text = "\n".join(OURS.write(name, arguments) for name, arguments in CALLS)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    parser = OutputParser(OURS)
    calls = calls_by_index(parser, chunks)
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == CALLS
    assert list(calls) == [0, 1]
    assert [call.name for call in parser.calls] == ["add", "weigh"]
