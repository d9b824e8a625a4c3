"""An answer's text as it grows, told apart: thoughts, text, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hogwild_engine.api.events import ToolCall
from hogwild_engine.text import paragraphs
from hogwild_engine.text.call_grammar import LooseForm, tag_of
from hogwild_engine.text.chat_template import THINK_CLOSE, THINK_OPEN
from hogwild_engine.text.tool_format import ToolFormat

_SPACES = 90
"""White space and punctuation that may stand in a loose call before its arguments."""


class Piece(NamedTuple):
    """What an answer grew by.

    Args:
        kind: "thought", "text", or "call": the arguments of the last call in `OutputParser.calls`.
        text: never empty but at the start of a call.
        begins: the first piece of a call.
    """

    kind: str
    text: str
    begins: bool = False


@dataclass
class _OpenCall:
    name: str
    arguments: str = ""
    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    complete: bool = False
    shown: bool = False

    @property
    def says(self) -> tuple[str, str]:
        return self.name, self.arguments

    def end_within(self, text: str) -> int | None:
        """Take in ``text`` up to the end of the JSON object; returns where it ends."""
        for place, char in enumerate(text):
            if self.quoted:
                self.quoted = char != '"' or self.escaped
                self.escaped = char == "\\" and not self.escaped
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return place + 1
        return None


class OutputParser:
    """Reads one answer.

    Args:
        form: how calls are written; ``None`` where no tool may be called.
        names: of tools whose calls may lack the form's tags.
        thinks: the answer may begin with thoughts.
        is_open: its thoughts are open from the start.

    Attributes:
        thought: all thoughts so far.
        text: all text so far.
        repeats: the answer has repeated a call, which was dropped.
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
        self.repeats = False
        self._calls: list[_OpenCall] = []
        self._form = form
        self._buffer = ""
        self._final = self._cut = False
        self._state: Callable[[], list[Piece] | None] = self._begin_text
        if thinks:
            self._state = self._think if is_open else self._begin
        self._tag = tag_of(form) if form else ""
        self._mark = form.opening[max(0, form.opening.rfind("{")) :] if form else ""
        self._names = [json.dumps(name)[1:-1] for name in names]
        self._loose = LooseForm.of(form, self._names) if form and names else None
        self._patience = _SPACES + max(map(len, names), default=0)

    @property
    def thinking(self) -> bool:
        """Whether thoughts are open."""
        return self._state == self._think

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All calls so far; the last one may be cut."""
        return tuple(ToolCall(c.name, c.arguments, c.complete) for c in self._calls)

    def feed(self, text: str, *, final: bool = False, cut: bool = False) -> list[Piece]:
        """Take in more of the answer; what may turn out to be structure is held back.

        Args:
            text: the new text.
            final: no more comes.
            cut: … because a budget is spent.
        """
        self._buffer += text
        self._final = final
        self._cut = cut
        told: list[Piece] = []
        while (pieces := self._state()) is not None:
            told += pieces
        return told

    # States: each takes from the buffer, or returns ``None`` to wait for more.

    def _begin(self) -> list[Piece] | None:
        opening = self._buffer.lstrip()
        if opening.startswith(THINK_OPEN):
            self._buffer = opening.removeprefix(THINK_OPEN)
            self._state = self._think
        elif self._final or not THINK_OPEN.startswith(opening):
            self._state = self._begin_text
        else:
            return None
        return []

    def _think(self) -> list[Piece] | None:
        thought, closed, rest = self._buffer.partition(THINK_CLOSE)
        if closed:
            self._buffer = rest
            self._state = self._after_thought
            return self._grow_thought(thought.rstrip())
        kept = len(thought) if self._final else len(thought) - self._held(THINK_CLOSE)
        shown = thought[:kept].rstrip()
        self._buffer = self._buffer[len(shown) :]
        return self._grow_thought(shown) or None

    def _after_thought(self) -> list[Piece] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._state = self._begin_text
        return []

    def _begin_text(self) -> list[Piece] | None:
        if not self._buffer:
            return None
        opening = self._form.opening if self._form else ""
        for name, start in zip(
            self._names, self._loose.starts if self._loose else (), strict=False
        ):
            if loose := re.match(start, self._buffer):
                return self._begin_call(name, self._buffer[loose.end() :])
        if opening and not self._final and self._may_be_call(opening):
            return None
        tagged = opening and self._buffer.startswith(opening)
        begins = self._cut and opening.startswith(self._buffer)
        self._state = self._read_name if tagged or begins else self._read_text
        return []

    def _may_be_call(self, opening: str) -> bool:
        """Whether what came so far may grow into a call."""
        if len(self._buffer) < len(opening) and opening.startswith(self._buffer):
            return True
        starts = (("{", 1), ("```", 3), ("**", 2))
        starts_loose = any(mark.startswith(self._buffer[:length]) for mark, length in starts)
        return bool(self._loose) and starts_loose and len(self._buffer) < self._patience

    def _begin_call(self, name: str, rest: str) -> list[Piece]:
        self._buffer = rest
        self._calls.append(_OpenCall(_unescaped(name)))
        self._state = self._read_arguments
        return [Piece("call", "", begins=True)] if len(self._calls) == 1 else []

    def _read_text(self) -> list[Piece] | None:
        text, tagged, rest = self._buffer, "", ""
        if self._tag:
            text, tagged, rest = self._buffer.partition(self._tag)
        if tagged:
            self._buffer = rest
            self._state = self._read_name
            return self._grow_text(text.rstrip())
        if self._tag and not self._final:
            text = text[: len(text) - self._held(self._tag)].rstrip()
        self._buffer = self._buffer[len(text) :]
        return self._grow_text(text) or None

    def _read_name(self) -> list[Piece] | None:
        assert self._form is not None
        _, begun, rest = self._buffer.partition(self._mark)
        name, ended, rest = rest.partition(self._form.between)
        if begun and ended:
            return self._begin_call(name, rest)
        if not self._cut or not self._buffer or (self._calls and not begun):
            return None
        return self._begin_call(name.partition(self._form.between[:1])[0], "")

    def _read_arguments(self) -> list[Piece] | None:
        call = self._calls[-1]
        text = self._take_arguments(call)
        if len(self._calls) == 1:
            return [Piece("call", text)] if text else None
        # Later calls show when they are whole: models repeat calls, and a repeat is dropped.
        if call.complete and call.says in [other.says for other in self._calls[:-1]]:
            self._calls.pop()
            self.repeats = True
            self._state = self._skip
            return []
        if call.shown or not (call.complete or self._final):
            return None
        call.shown = True
        return [Piece("call", call.arguments, begins=True)]

    def _take_arguments(self, call: _OpenCall) -> str:
        end = call.end_within(self._buffer)
        text, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        text = text if call.arguments else text.lstrip()
        call.arguments += text
        if end is not None:
            call.complete = True
            self._state = self._read_name
        return text

    def _skip(self) -> None:
        return None

    def _grow_thought(self, text: str) -> list[Piece]:
        text = text if self.thought else text.lstrip()
        self.thought += text
        return [Piece("thought", text)] if text else []

    def _grow_text(self, text: str) -> list[Piece]:
        self.text += text
        return [Piece("text", text)] if text else []

    def _held(self, tag: str) -> int:
        return paragraphs.held_back(self._buffer, [tag])


def _unescaped(name: str) -> str:
    try:
        return json.loads(f'"{name}"')
    except ValueError:
        return name
