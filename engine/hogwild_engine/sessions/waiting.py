"""The phase before a session has pages."""

from __future__ import annotations

from hogwild_engine.sessions.answer import AnswerPhase
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.parallel import ParallelPhase
from hogwild_engine.sessions.phase import Phase


class WaitingPhase(Phase):
    """Waits for pages.

    Args:
        context: the session.
    """

    def __init__(self, context: SessionContext) -> None:
        super().__init__(context, [context.common])

    def following(self) -> Phase:
        """Make the prompt pending, less what the pool holds of it, and begin."""
        context = self._context
        protocol, common = context.prompt.protocol, context.common
        if protocol is None:
            return AnswerPhase.alone(context)
        context.pending.append(common, context.prompt.tokens[len(common) :], splits=True)
        return ParallelPhase(context, protocol)
