"""A session: one request from its prompt to its answer. Knows tokens and blocks, not tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hogwild_engine.api.errors import SessionCancelledError
from hogwild_engine.api.events import Event, Finished, Usage
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.phase import FinishedPhase, Phase
from hogwild_engine.sessions.waiting import WaitingPhase
from hogwild_engine.sessions.writer import Draft
from hogwild_engine.step.batch import Chunk
from hogwild_engine.step.sampling import SampledToken, SamplingRow


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message to a session: end now."""


class ScheduledStep(NamedTuple):
    """A session's part of one step. ``rows`` are in the order of the chunks that sample."""

    session: Session
    chunks: list[Chunk]
    rows: list[SamplingRow]


class Session:
    """Moves a request through its phases: waiting → parallel → answer → finished.

    Args:
        context: the request, checked, and its part of the cache. It takes no pages until `begin`.

    Attributes:
        request: what to do.
        phase: the current phase.
    """

    def __init__(self, context: SessionContext) -> None:
        self.request = context.request
        self._context = context
        self.phase: Phase = WaitingPhase(context)
        self._inbox: deque[Cancel] = deque()
        self._sampling_drafts: list[Draft] = []

    @property
    def num_pages(self) -> int:
        """Most pages that it will hold."""
        return self._context.budget.num_pages

    @property
    def finished(self) -> Finished | None:
        """The last event, once there."""
        return self.phase.event if isinstance(self.phase, FinishedPhase) else None

    # Between two steps

    def send(self, message: Cancel) -> None:
        """Put a message into the inbox; the engine's thread reads it between two steps.

        May be called from any thread.
        """
        self._inbox.append(message)

    def read_inbox(self) -> None:
        """Act on the messages that came since the last step.

        Raises:
            SessionCancelledError: one of them is `Cancel`.
        """
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Cancel):
                raise SessionCancelledError("the session was cancelled")

    def begin(self) -> None:
        """Take the first pages and get ready for the first step."""
        self._context.start()
        self._enter(self.phase.following())

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        while self.phase.over:
            self.phase = self.phase.following()

    # What the scheduler asks

    @property
    def is_prefill(self) -> bool:
        return self._context.pending.is_prefill

    @property
    def num_pending(self) -> int:
        """Tokens that the next step could encode."""
        return self._context.pending.num_tokens

    @property
    def next_prefix_key(self) -> bytes | None:
        """Key of the page of its prompt that the next step would encode."""
        return self._context.prefix.next_key(self._context.encoded_len)

    def reuse_prefix(self) -> None:
        """Skip what comes next of the prompt if pages of the pool hold it already."""
        self._context.reuse_prefix()

    # One step

    def schedule(self, limit: int) -> ScheduledStep:
        """Take this session's part of the next step, at most ``limit`` tokens where it can be
        split, and publish the blocks that others may read.
        """
        phase = self.phase
        chunks, self._sampling_drafts = self._context.pending.schedule(limit, phase.view)
        unpublished = {id(block) for block in phase.unpublished()}
        for block in phase.blocks:
            if id(block) not in unpublished:
                block.publish()
        return ScheduledStep(self, chunks, [self._row(draft) for draft in self._sampling_drafts])

    def _row(self, draft: Draft) -> SamplingRow:
        sampling, writer = self._context.sampling, draft.writer
        banned = self.phase.banned(draft)
        return SamplingRow(
            sampling,
            writer.number,
            writer.num_sampled,
            writer.seen if sampling.repetition_penalty != 1 else (),
            {*banned, *self._context.chat.eos_ids} if self.request.ignore_eos else banned,
            draft.constraint,
        )

    def postprocess(self, sampled: Sequence[SampledToken]) -> list[Event]:
        """Append what the step sampled, one token a row of `schedule`; return what happened."""
        self._context.register_prefix()
        self.phase.postprocess(list(zip(self._sampling_drafts, sampled, strict=True)))
        self._enter(self.phase)
        return self.drain_events()

    def drain_events(self) -> list[Event]:
        """Return the events that were not read yet."""
        events = list(self._context.events)
        self._context.events.clear()
        return events

    def usage(self) -> Usage:
        """Return what it has cost so far."""
        return self.phase.usage()

    def forget_prefix(self) -> None:
        """Let no other session find the pages of the prompt: they may hold what is no number."""
        self._context.forget_prefix()

    def release(self) -> None:
        """Free all pages. Safe to call again."""
        for block in self.phase.blocks:
            block.release()
