"""The phases of a session, as the session sees them: waiting → parallel → answer → finished.

A single worker has no parallel phase. Each phase is made with all that it needs, so nothing about a
session is optional.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from hogwild_engine.api.events import Finished, FinishReason, Paragraph, Usage, WorkerEnd
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.writer import Draft
from hogwild_engine.step.sampling import SampledToken


class Phase:
    """What a session asks of the phase that it is in. By default nothing is written.

    Args:
        context: the session.
        blocks: every block that the session holds.
    """

    def __init__(self, context: SessionContext, blocks: Sequence[Block]) -> None:
        self._context = context
        self._blocks = blocks

    @property
    def over(self) -> bool:
        """Whether the next phase must begin."""
        return False

    def following(self) -> Phase:
        """End the phase and return the next one."""
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """Every block that the session holds, each once."""
        return self._blocks

    def view(self, block: Block, draft: Draft | None) -> Sequence[Block]:
        """Return what a writer of ``block`` reads, ``block`` last.

        Args:
            block: where tokens are written.
            draft: the paragraph that they belong to; ``None`` for text that no writer owns.
        """
        return [block]

    def unpublished(self) -> Collection[Block]:
        """Return the blocks of which other writers see nothing new in the coming step."""
        return ()

    def banned(self, draft: Draft) -> Collection[int]:
        """Return the token ids that must not come next."""
        return draft.banned()

    def postprocess(self, sampled: Sequence[tuple[Draft, SampledToken]]) -> None:
        """Append the tokens that a step sampled, and act on the text that they make."""

    def usage(self) -> Usage:
        """Return what the session has cost so far."""
        return self._context.usage()


class Team(Phase):
    """What a final answer builds on: a parallel phase, or nothing (this base class).

    Attributes:
        history: finished paragraphs, in order.
        ends: why each worker stopped, by name.
        end_steps: the step in which it stopped, by name.
        cut_short: the phase ended before the workers did.
        header_starts: the texts that open a worker's header.
    """

    def __init__(self, context: SessionContext) -> None:
        super().__init__(context, [context.common])
        self.history: list[Paragraph] = []
        self.ends: dict[str, WorkerEnd] = {}
        self.end_steps: dict[str, int] = {}
        self.cut_short = False
        self.header_starts: list[str] = []

    def answer_context(self) -> list[Block]:
        """Return the blocks that the writer of the final answer reads before its own."""
        return []

    def usage(self) -> Usage:
        stored = len(self._context.common)
        return self._context.usage(stored_tokens=stored, private_tokens=stored)


class FinishedPhase(Phase):
    """The end of a session. Making one tells its reader.

    Args:
        context: the session.
        blocks: every block that the session holds.
        team: the parallel phase, closed, or a lone worker's `Team`.
        text: the final answer.
        reason: why it ended. It becomes "length" if the team was cut short, unless the answer is
            constrained: such an answer says itself whether it is whole.
        usage: what the session cost.
        answer: further fields of `Finished`.
    """

    def __init__(
        self,
        context: SessionContext,
        blocks: Sequence[Block],
        team: Team,
        text: str,
        reason: FinishReason,
        usage: Usage,
        **answer: Any,
    ) -> None:
        super().__init__(context, blocks)
        if team.cut_short and not (answer and context.request.constrains_answer):
            reason = "length"
        history, sampling = tuple(team.history), asdict(context.sampling)
        seed = sampling.pop("seed")
        ends = team.ends, team.end_steps
        self.event = Finished(
            text, reason, history, usage, seed, *ends, sampling=sampling, **answer
        )
        context.emit(self.event)

    def usage(self) -> Usage:
        return self.event.usage
