"""The phases of a session, as the session sees them: waiting → parallel → answer → finished.

A single worker has no parallel phase. Each phase has what it needs when it is made, so nothing
about a session has to be asked twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from hogwild_engine.api.events import Finished, FinishReason, Paragraph, Usage, WorkerEnd
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.writer import Draft
from hogwild_engine.step.sampling import SampledToken


class Phase(Protocol):
    """What a session asks of the phase that it is in."""

    @property
    def over(self) -> bool:
        """Whether the next phase must begin."""
        ...

    def following(self) -> Phase:
        """End the phase and return the next one."""
        ...

    @property
    def blocks(self) -> Sequence[Block]:
        """Every block that the session holds, each once."""
        ...

    def view(self, block: Block, draft: Draft | None) -> Sequence[Block]:
        """Return what a writer of ``block`` reads, ``block`` last.

        Args:
            block: where tokens are written.
            draft: the paragraph that they belong to; ``None`` for text that no writer owns.
        """
        ...

    def unpublished(self) -> Collection[Block]:
        """Return the blocks of which other writers see nothing new in the coming step."""
        ...

    def banned(self, draft: Draft) -> Collection[int]:
        """Return the token ids that must not come next."""
        ...

    def postprocess(self, sampled: Sequence[tuple[Draft, SampledToken]]) -> None:
        """Append the tokens that a step sampled, and act on the text that they make."""
        ...

    def usage(self) -> Usage:
        """Return what the session has cost so far."""
        ...


class IdlePhase:
    """A phase in which nothing is written.

    Args:
        blocks: every block that the session holds.
    """

    over = False

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks

    def view(self, block: Block, draft: Draft | None) -> Sequence[Block]:
        return [block]

    def unpublished(self) -> Collection[Block]:
        return ()

    def banned(self, draft: Draft) -> Collection[int]:
        return ()

    def postprocess(self, sampled: Sequence[tuple[Draft, SampledToken]]) -> None:
        assert not sampled, "nothing is written in this phase"


class FinishedPhase(IdlePhase):
    """The end. ``event`` is what the session's reader got last."""

    def __init__(self, blocks: Sequence[Block], event: Finished) -> None:
        super().__init__(blocks)
        self.event = event

    def following(self) -> Phase:
        return self

    def usage(self) -> Usage:
        return self.event.usage


class Team(Protocol):
    """What an answer stands on: the parallel phase, closed, or `NoTeam`."""

    @property
    def history(self) -> Sequence[Paragraph]: ...
    @property
    def ends(self) -> Mapping[str, WorkerEnd]: ...
    @property
    def cut_short(self) -> bool: ...
    @property
    def header_starts(self) -> Sequence[str]: ...
    @property
    def blocks(self) -> Sequence[Block]: ...
    def view(self, block: Block, draft: Draft | None) -> Sequence[Block]: ...
    def answer_context(self) -> Sequence[Block]: ...
    def usage(self) -> Usage: ...


class NoTeam:
    """In place of a parallel phase where a single worker answers alone."""

    history: Sequence[Paragraph] = ()
    ends: Mapping[str, WorkerEnd] = MappingProxyType({})
    header_starts: Sequence[str] = ()
    cut_short = False

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self.blocks = [context.common]

    def view(self, block: Block, draft: Draft | None) -> Sequence[Block]:
        return [block]

    def answer_context(self) -> Sequence[Block]:
        return []

    def usage(self) -> Usage:
        stored = len(self._context.common)
        return self._context.usage(stored_tokens=stored, private_tokens=stored)


def finish(
    context: SessionContext,
    team: Team,
    blocks: Sequence[Block],
    text: str,
    reason: FinishReason,
    usage: Usage,
    **answer: Any,
) -> FinishedPhase:
    """Tell the session's reader that it is over, and return the last phase.

    Args:
        context: the session.
        team: the parallel phase, closed, or `NoTeam`.
        blocks: every block that the session holds.
        text: the final answer.
        reason: why it ended. It becomes "length" if the team was cut short, unless the answer is
            constrained: such an answer says itself whether it is whole.
        usage: what the session cost.
        answer: further fields of `Finished`.
    """
    if team.cut_short and not (answer and context.request.constrains_answer):
        reason = "length"
    seed = context.sampling.seed
    history, ends = tuple(team.history), dict(team.ends)
    event = Finished(text, reason, history, usage, seed, ends, **answer)
    context.emit(event)
    return FinishedPhase(blocks, event)
