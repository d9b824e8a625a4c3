"""The final answer: one writer, everything in view. Also the whole of a session with a single
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hogwild_engine import events, paragraphs
from hogwild_engine.block import Block
from hogwild_engine.chat import THINK_CLOSE, ChatFormat
from hogwild_engine.draft import Draft
from hogwild_engine.events import Event, FinishReason
from hogwild_engine.protocol import Protocol
from hogwild_engine.sampling import Drawn
from hogwild_engine.writer import Writer

MAX_REWINDS = 8


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
        base: length of the writer's block before the first drawn token.
        guards: a team's headers, as they start; ``None`` for one worker alone. Where one begins,
            the answer is rewound and another token drawn, `MAX_REWINDS` times at most: structure
            is not the answer's to write. A team's answer has no white space at its ends.
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
        base: int,
        guards: Sequence[str] | None,
        max_tokens: int,
        emit: Callable[[Event], None],
    ) -> None:
        self.writer = writer
        self.finish_reason: FinishReason | None = None
        self._chat = chat
        self._stop = stop
        self._guards = guards or ()
        self._max_tokens = max_tokens
        self._emit = emit
        self._draft = writer.draft = Draft(
            chat.decode,
            chat.hidden,
            forced,
            base=base,
            start=0,
            watched=[*stop, *self._guards],
            strips=guards is not None,
        )
        self._show(self._draft.show())

    @property
    def text(self) -> str:
        return self._draft.shown

    @property
    def block(self) -> Block:
        return self.writer.block

    def banned(self) -> Collection[int]:
        """Ids that must not come next."""
        return self._draft.banned()

    def advance(self, drawn: Drawn) -> int | None:
        """Take in a drawn token; returns the token to encode next, ``None`` at the end."""
        self.writer.num_drawn += 1
        if drawn.token in self._chat.ends:
            self._end("stop", None)
            return None
        self.writer.seen.add(drawn.token)
        fresh = self._draft.add(drawn)
        stop, guard = self._found(self._stop, fresh), self._found(self._guards, fresh)
        if stop is not None:
            self._end("stop", stop)
        elif self.writer.num_drawn >= self._max_tokens:
            self._end("length", guard)
        elif guard is not None and self._draft.attempts < MAX_REWINDS:
            return self._rewind(guard)
        else:
            self._show(self._draft.show())
        return drawn.token if self.finish_reason is None else None

    def _rewind(self, length: int) -> int:
        """Go back to where the text had ``length`` characters; returns the last token there."""
        keep = self._draft.tokens_within(length)
        self._draft.rewind(keep)
        last = self._draft.base + keep - 1
        token = self.block.tokens[last]
        self.block.truncate(last)
        return token

    def _found(self, strings: Sequence[str], fresh: int) -> int | None:
        longest = max(map(len, strings), default=0)
        since = max(len(self._draft.forced), fresh - longest)
        return paragraphs.first_of(self._draft.text, strings, since)

    def _end(self, reason: FinishReason, length: int | None) -> None:
        self._show(self._draft.finish(length))
        self.finish_reason = reason
        self.writer.done = True

    def _show(self, text: str) -> None:
        if text:
            self._emit(events.AnswerToken(text, self.writer.num_drawn))
