"""The final answer: one writer, everything in view. Also the whole of a session with a single
worker.
"""

from __future__ import annotations

from collections.abc import Callable

from hogwild_engine import events, paragraphs
from hogwild_engine.block import Block
from hogwild_engine.chat import THINK_CLOSE, ChatFormat
from hogwild_engine.draft import Draft
from hogwild_engine.events import Event, FinishReason
from hogwild_engine.protocol import Protocol
from hogwild_engine.sampling import Drawn
from hogwild_engine.writer import Writer


def finisher_text(protocol: Protocol, chat: ChatFormat) -> str:
    """What is put before the final answer."""
    if protocol.finisher != "close":
        return protocol.finisher
    if chat.thinking:
        return f"{THINK_CLOSE}\n\n"
    return chat.closing(protocol.finisher_question)


class AnswerPhase:
    """Writes the final answer.

    Args:
        writer: number and block of who writes.
        chat: turns ids into text.
        stop: strings that end the answer.
        forced: the start of its text, which a protocol's own finisher put there.
        max_tokens: bound on the drawn tokens.
        emit: takes events.

    Attributes:
        finish_reason: why it ended; ``None`` while it goes on.
    """

    def __init__(
        self,
        writer: Writer,
        chat: ChatFormat,
        stop: tuple[str, ...],
        forced: str,
        max_tokens: int,
        emit: Callable[[Event], None],
    ) -> None:
        self.writer = writer
        self.finish_reason: FinishReason | None = None
        self._chat = chat
        self._stop = stop
        self._max_tokens = max_tokens
        self._emit = emit
        self._draft = writer.draft = Draft(
            chat.decode, chat.hidden, forced, base=0, start=0, watched=stop, strips=False
        )
        self._show(self._draft.show())

    @property
    def text(self) -> str:
        return self._draft.shown

    @property
    def block(self) -> Block:
        return self.writer.block

    def advance(self, drawn: Drawn) -> bool:
        """Take in a drawn token; returns whether the answer goes on behind it."""
        self.writer.num_drawn += 1
        if drawn.token in self._chat.ends:
            self._end("stop", None)
            return False
        self.writer.seen.add(drawn.token)
        fresh = self._draft.add(drawn)
        longest = max(map(len, self._stop), default=0)
        stop = paragraphs.first_of(self._draft.text, self._stop, max(0, fresh - longest))
        if stop is not None:
            self._end("stop", stop)
        elif self.writer.num_drawn >= self._max_tokens:
            self._end("length", None)
        else:
            self._show(self._draft.show())
        return self.finish_reason is None

    def _end(self, reason: FinishReason, length: int | None) -> None:
        self._show(self._draft.finish(length))
        self.finish_reason = reason
        self.writer.done = True

    def _show(self, text: str) -> None:
        if text:
            self._emit(events.AnswerToken(text, self.writer.num_drawn))
