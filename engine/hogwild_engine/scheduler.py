"""Which sessions share the next step. The workers of one session always run together."""

from __future__ import annotations

from collections import deque

from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.sessions.session import ScheduledStep, Session

PREFILL_SHARE = 8
"""Beside sessions that decode, prompts get one in so many of a step's tokens."""


class Scheduler:
    """Sessions that wait for pages, and sessions that run.

    A session is admitted when the most pages that it can ever hold are not reserved for others, so
    that what it writes depends on no other session.

    Args:
        cache: its pool has the pages.
        max_num_batched_tokens: most prompt tokens in a step.
    """

    def __init__(self, cache: KVCache, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Session] = deque()
        self.running: list[Session] = []
        self._faults: list[tuple[Session, Exception]] = []

    @property
    def has_work(self) -> bool:
        """Whether a session runs, or waits: the first one may always start when none runs."""
        return bool(self.running or self.waiting)

    def add(self, session: Session) -> None:
        self.waiting.append(session)

    def remove(self, session: Session) -> None:
        """Forget a session and free its pages."""
        if session in self.running:
            self.running.remove(session)
        elif session in self.waiting:
            self.waiting.remove(session)
        session.release()

    def admit(self) -> list[Session]:
        """Let waiting sessions run, first come first served, as far as pages last."""
        admitted = []
        reserved = sum(session.num_pages for session in self.running)
        while self.waiting:
            reserved += self.waiting[0].num_pages
            if reserved > self._cache.pool.num_pages:
                break
            session = self.waiting.popleft()
            self.running.append(session)
            admitted.append(session)
        return admitted

    def schedule(self) -> list[ScheduledStep]:
        """Return the next step: all sessions that decode, and a bounded share of prompts beside
        them, which bounds the time between two tokens.

        A session that raises an error is left out; see `take_faults`.
        """
        decoding, prefilling = self._survey()
        limits = {session: session.num_pending for session in decoding}
        budget = self._max_num_batched_tokens // (PREFILL_SHARE if decoding else 1)
        limits |= _share(prefilling, budget)
        steps = []
        for session, limit in limits.items():
            try:
                step = session.schedule(limit)
                assert step.chunks or session not in decoding, "a session has no pending token"
            except Exception as error:
                self._faults.append((session, error))
                continue
            if step.chunks:
                steps.append(step)
        return steps

    def take_faults(self) -> list[tuple[Session, Exception]]:
        """Return the sessions that failed since the last call, and why. They must be removed."""
        faults, self._faults = self._faults, []
        return faults

    def _survey(self) -> tuple[list[Session], list[Session]]:
        """Return the sessions that decode, and those in prefill, oldest first.

        Of those that would encode the same page only the first: the others find it afterwards.
        """
        decoding: list[Session] = []
        prefilling: list[Session] = []
        keys: set[bytes] = set()
        for session in self.running:
            try:
                if not session.is_prefill:
                    decoding.append(session)
                    continue
                session.reuse_prefix()
                key = session.next_prefix_key
            except Exception as error:
                self._faults.append((session, error))
                continue
            if key is None or key not in keys:
                prefilling.append(session)
            if key is not None:
                keys.add(key)
        return decoding, prefilling


def _share(prefilling: list[Session], budget: int) -> dict[Session, int]:
    """Return how many prompt tokens of each session the next step takes.

    Half of the budget is the oldest session's, so that none starves; the rest goes to those that
    have the least left.
    """
    budget = max(budget, 1)
    limits = {session: min(session.num_pending, -(-budget // 2)) for session in prefilling[:1]}
    budget -= sum(limits.values())
    for session in sorted(prefilling, key=lambda session: session.num_pending):
        granted = limits.get(session, 0)
        more = min(session.num_pending - granted, budget)
        if more > 0:
            limits[session] = granted + more
            budget -= more
    return limits
