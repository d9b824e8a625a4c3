"""The state of a session as its events describe it. Knows nothing of terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hogwild_engine.api.events import (
    AnswerToken,
    DraftDropped,
    DraftToken,
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
class WorkerState:
    """The open paragraph of one worker.

    Args:
        number: of the paragraph, from 1.
        text: what stands of it.
        draft: what follows and may still be rewound.
        end: why the worker has stopped; empty if it writes.
    """

    number: int = 1
    text: str = ""
    draft: str = ""
    end: str = ""

    @property
    def shown(self) -> str:
        return self.text + self.draft

    def write(self, number: int, text: str) -> None:
        self._open(number)
        self.text += text
        self.draft = ""

    def sketch(self, number: int, text: str) -> None:
        self._open(number)
        self.draft += text

    def _open(self, number: int) -> None:
        if number != self.number:
            self.number, self.text, self.draft = number, "", ""


class SessionState:
    """The open paragraphs, the answer and the thoughts before it, and their speed.

    Args:
        workers: their names.
        clock: returns seconds.
    """

    def __init__(self, workers: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.workers = {name: WorkerState() for name in workers}
        self.steps = 0
        self.step_seconds = 0.0
        self.tokens = 0
        self.thought = ""
        self.answer = ""
        self._clock = clock
        self._begun = clock()
        self._started: float | None = None

    def apply(self, event: Event) -> None:
        match event:
            case Step(step=step, active=active):
                self._count(len(active))
                self.steps, self.step_seconds = step, self._seconds()
            case DraftToken(worker=worker, paragraph=number, text=text):
                self.workers[worker].sketch(number, text)
            case DraftDropped(worker=worker):
                self.workers[worker].draft = ""
            case Token(worker=worker, paragraph=number, text=text):
                self.workers[worker].write(number, text)
            case ParagraphFinished(paragraph=paragraph):
                self.workers[paragraph.worker].write(paragraph.number + 1, "")
            case WorkerFinished(worker=worker, reason=reason):
                self.workers[worker].end = ENDS[reason]
            case ThoughtToken(text=text):
                self._count(1)
                self.thought += text
            case AnswerToken(text=text):
                self._count(1)
                self.answer += text

    def _seconds(self) -> float:
        return max(self._clock() - (self._started or 0.0), 1e-3)

    def _count(self, num_tokens: int) -> None:
        if self._started is None:
            self._started = self._clock()
        self.tokens += num_tokens

    def speed(self) -> str:
        """Return steps and tokens so far, and how many a second, as one line."""
        if self._started is None:
            return f"reading the prompt, {self._clock() - self._begun:.0f} s"
        seconds, steps = self._seconds(), []
        if self.steps:  # the answer that follows takes no steps of the workers
            steps = [f"step {self.steps}", f"{self.steps / self.step_seconds:.1f} steps/s"]
        return " · ".join([*steps, f"{self.tokens / seconds:.1f} tokens/s", f"{seconds:.1f} s"])
