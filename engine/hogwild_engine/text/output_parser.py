"""Output parser: splits an answer, as its text grows, into thoughts, text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hogwild_engine.api.events import ToolCall
from hogwild_engine.text.call_grammar import UntaggedCalls
from hogwild_engine.text.chat_template import THINK_CLOSE, THINK_OPEN
from hogwild_engine.text.stop_strings import held_back_len
from hogwild_engine.text.tool_format import ToolFormat

_MAX_PUNCTUATION = 90
"""Characters, except those of its name, that an untagged call may have before its arguments."""


class OutputPiece(NamedTuple):
    """New output.

    Args:
        kind: what it is part of; a "call" grows by its arguments.
        text: the new text; empty only if a call begins.
        call: index of the call in the answer, from 0.
        name: the tool's name in a call's first piece.
    """

    kind: Literal["thought", "text", "call"]
    text: str
    call: int = 0
    name: str | None = None


@dataclass
class _Call:
    """A call whose arguments are being read: a scanner for the end of a JSON object."""

    name: str
    arguments: str = ""
    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    complete: bool = False

    def scan(self, text: str) -> int | None:
        """Scan ``text``; return the length up to the end of the JSON object, if it is in there."""
        for place, char in enumerate(text):
            if self.in_string:
                self.in_string = char != '"' or self.escaped
                self.escaped = char == "\\" and not self.escaped
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return place + 1
        return None


class OutputParser:
    """Parses one answer.

    The states are methods: each takes text from the buffer and returns the new pieces, or ``None``
    to wait for more text::

        begin → read thought → after thought → begin text → read text → read name ⇄ read arguments

    Without a thinking section, the answer starts at "begin text"; an answer that starts with a call
    skips "read text". Text after the first call is not part of the answer: only calls are read.

    Args:
        form: the format of calls; ``None`` if no tool may be called.
        names: tools whose calls may lack the format's tags.
        thinks: the answer may start with a thinking section.
        is_open: the prompt has opened the thinking section.

    Attributes:
        thought: all thoughts so far.
        text: all text so far.
        repeated_call: the answer has repeated a call; the repetition was dropped.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        names: Sequence[str] = (),
        *,
        thinks: bool = False,
        is_open: bool = False,
    ) -> None:
        self.thought = self.text = ""
        self.repeated_call = False
        self._calls: list[_Call] = []
        self._form = form
        self._untagged = UntaggedCalls.of(form, names) if form and names else None
        self._max_untagged_start = _MAX_PUNCTUATION + max(map(len, names), default=0)
        self._buffer = ""
        self._final = self._cut = False
        self._state: Callable[[], list[OutputPiece] | None] = self._begin_text
        if thinks:
            self._state = self._read_thought if is_open else self._begin

    @property
    def thinking(self) -> bool:
        """Whether the thinking section is open."""
        return self._state == self._read_thought

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All calls so far; the last one may be incomplete."""
        return tuple(ToolCall(c.name, c.arguments, c.complete) for c in self._calls)

    def feed(self, text: str, *, final: bool = False, cut: bool = False) -> list[OutputPiece]:
        """Parse more of the answer. Text that may become a tag is held back.

        Args:
            text: the new text.
            final: no more text follows.
            cut: a maximum length, or a stop string in constrained text, ended the answer.
        """
        self._buffer += text
        self._final = final
        self._cut = cut
        pieces: list[OutputPiece] = []
        while (more := self._state()) is not None:
            pieces += more
        return pieces

    # Thoughts

    def _begin(self) -> list[OutputPiece] | None:
        start = self._buffer.lstrip()
        if start.startswith(THINK_OPEN):
            self._buffer = start.removeprefix(THINK_OPEN)
            self._state = self._read_thought
        elif self._final or not THINK_OPEN.startswith(start):
            self._state = self._begin_text
        else:
            return None
        return []

    def _read_thought(self) -> list[OutputPiece] | None:
        thought, closed, rest = self._buffer.partition(THINK_CLOSE)
        if closed:
            self._buffer = rest
            self._state = self._after_thought
            return self._add_thought(thought.rstrip())
        shown = self._without_start_of(THINK_CLOSE).rstrip()
        self._buffer = self._buffer[len(shown) :]
        return self._add_thought(shown) or None

    def _after_thought(self) -> list[OutputPiece] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._state = self._begin_text
        return []

    # Text

    def _begin_text(self) -> list[OutputPiece] | None:
        """Decide whether the answer starts with a call or with text."""
        if not self._buffer:
            return None
        for name, start in self._untagged.starts.items() if self._untagged else ():
            if found := re.match(start, self._buffer):
                return self._begin_call(name, self._buffer[found.end() :])
        opening = self._form.opening if self._form else ""
        if opening and not self._final and self._may_be_call(opening):
            return None
        is_tagged = opening and self._buffer.startswith(opening)
        was_cut = self._cut and opening.startswith(self._buffer)
        self._state = self._read_name if is_tagged or was_cut else self._read_text
        return []

    def _may_be_call(self, opening: str) -> bool:
        """Return whether more text may make a call of the buffer."""
        if len(self._buffer) < len(opening) and opening.startswith(self._buffer):
            return True
        starts = any(mark.startswith(self._buffer[: len(mark)]) for mark in ("{", "```", "**"))
        return bool(self._untagged) and starts and len(self._buffer) < self._max_untagged_start

    def _read_text(self) -> list[OutputPiece] | None:
        tag = self._form.tag if self._form else ""
        if tag and tag in self._buffer:
            text, _, self._buffer = self._buffer.partition(tag)
            self._state = self._read_name
            return self._add_text(text.rstrip())
        text = self._buffer
        if tag and not self._final:
            text = self._without_start_of(tag).rstrip()
        self._buffer = self._buffer[len(text) :]
        return self._add_text(text) or None

    # Calls

    def _begin_call(self, name: str, rest: str) -> list[OutputPiece]:
        self._buffer = rest
        self._calls.append(_Call(name))
        self._state = self._read_arguments
        return [OutputPiece("call", "", 0, name)] if len(self._calls) == 1 else []

    def _read_name(self) -> list[OutputPiece] | None:
        assert self._form is not None
        # The tag may be read already: what is left of the opening is its end, such as {"name": ".
        opening, between = self._form.opening, self._form.between
        _, has_opening, rest = self._buffer.partition(opening[max(0, opening.rfind("{")) :])
        name, is_whole, rest = rest.partition(between)
        if has_opening and is_whole:
            return self._begin_call(_unescaped(name), rest)
        if not self._cut or not self._buffer or (self._calls and not has_opening):
            return None
        return self._begin_call(_unescaped(name.partition(between[:1])[0]), "")

    def _read_arguments(self) -> list[OutputPiece] | None:
        call = self._calls[-1]
        text = self._take_arguments(call)
        if len(self._calls) == 1:
            return [OutputPiece("call", text)] if text else None
        # A later call is shown once it is whole: models repeat calls, and a repetition is dropped.
        if call.complete and self.calls[-1] in self.calls[:-1]:
            self._calls.pop()
            self.repeated_call = True
            self._state = self._ignore
            return []
        if not (call.complete or self._final):
            return None
        if not call.complete:
            self._state = self._ignore
        return [OutputPiece("call", call.arguments, len(self._calls) - 1, call.name)]

    def _take_arguments(self, call: _Call) -> str:
        end = call.scan(self._buffer)
        text, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        text = text if call.arguments else text.lstrip()
        call.arguments += text
        if end is not None:
            call.complete = True
            self._state = self._read_name
        return text

    def _ignore(self) -> None:
        return None

    # Output

    def _add_thought(self, text: str) -> list[OutputPiece]:
        text = text if self.thought else text.lstrip()
        self.thought += text
        return [OutputPiece("thought", text)] if text else []

    def _add_text(self, text: str) -> list[OutputPiece]:
        self.text += text
        return [OutputPiece("text", text)] if text else []

    def _without_start_of(self, tag: str) -> str:
        """Return the buffer without an end that may become ``tag``; all of it if it is final."""
        held = 0 if self._final else held_back_len(self._buffer, [tag])
        return self._buffer[: len(self._buffer) - held]


def _unescaped(name: str) -> str:
    try:
        return json.loads(f'"{name}"')
    except ValueError:
        return name
