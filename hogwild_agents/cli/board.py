"""What a session's events have told so far. Knows nothing of terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hogwild_engine.api.events import (
    AnswerToken,
    Event,
    ParagraphFinished,
    Step,
    ThoughtToken,
    Token,
    WorkerEnd,
    WorkerFinished,
)

ENDS: dict[WorkerEnd, str] = {
    "end_of_turn": "done",
    "stop": "stopped",
    "repeats": "repeats",
    "length": "cut",
}


@dataclass
class Desk:
    """What one worker has open. ``end`` says why it writes no more."""

    number: int = 1
    text: str = ""
    end: str = ""

    def write(self, number: int, text: str) -> None:
        if number != self.number:
            self.number, self.text = number, ""
        self.text += text


class Board:
    """The open paragraphs, the answer with the thoughts before it, and how fast they grow.

    Args:
        workers: their names.
        clock: seconds; a test's own.
    """

    def __init__(self, workers: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.desks = {name: Desk() for name in workers}
        self.steps = 0
        self.tokens = 0
        self.thought = ""
        self.answer = ""
        self._clock = clock
        self._started: float | None = None

    def apply(self, event: Event) -> None:
        match event:
            case Step(step=step, active=active):
                self._count(len(active))
                self.steps = step
            case Token(worker=worker, paragraph=number, text=text):
                self.desks[worker].write(number, text)
            case ParagraphFinished(paragraph=paragraph):
                self.desks[paragraph.worker].write(paragraph.number + 1, "")
            case WorkerFinished(worker=worker, reason=reason):
                self.desks[worker].end = ENDS[reason]
            case ThoughtToken(text=text):
                self._count(1)
                self.thought += text
            case AnswerToken(text=text):
                self._count(1)
                self.answer += text

    def _count(self, num_tokens: int) -> None:
        if self._started is None:
            self._started = self._clock()
        self.tokens += num_tokens

    def speed(self) -> str:
        """Steps and tokens so far, and how many a second since the first of them."""
        if self._started is None:
            return "reading the prompt"
        seconds = max(self._clock() - self._started, 1e-3)
        steps = [f"step {self.steps}", f"{self.steps / seconds:.1f} steps/s"] if self.steps else []
        return " · ".join([*steps, f"{self.tokens / seconds:.1f} tokens/s", f"{seconds:.1f} s"])
