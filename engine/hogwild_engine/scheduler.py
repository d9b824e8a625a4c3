"""Which sessions share the next pass. Sessions are picked, never workers: those of one session run
together.
"""

from __future__ import annotations

from collections import deque

from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.sessions.session import ScheduledStep, Session

SHARE = 8
"""Beside sessions that decode, prompts get one in so many of a pass's tokens."""


class Scheduler:
    """Sessions that wait for pages, and sessions that run.

    A session is admitted when the most pages that it can ever hold are not set aside for others, so
    that what it writes depends on no other session.
    """

    def __init__(self, cache: KVCache, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_pass_tokens = max_num_batched_tokens
        self.waiting: deque[Session] = deque()
        self.running: list[Session] = []

    @property
    def has_work(self) -> bool:
        """Whether a session runs, or waits: the first one may always start when none runs."""
        return bool(self.running or self.waiting)

    def add(self, session: Session) -> None:
        self.waiting.append(session)

    def remove(self, session: Session) -> None:
        """Forget a session and take its pages back."""
        session.release()
        if session in self.running:
            self.running.remove(session)
        elif session in self.waiting:
            self.waiting.remove(session)

    def admit(self) -> list[Session]:
        """Let waiting sessions run, first come first served, as far as pages last."""
        admitted = []
        set_aside = sum(session.num_pages for session in self.running)
        while self.waiting:
            set_aside += self.waiting[0].num_pages
            if set_aside > self._cache.pool.num_pages:
                break
            session = self.waiting.popleft()
            self.running.append(session)
            admitted.append(session)
        return admitted

    def pick(self) -> list[tuple[Session, ScheduledStep]]:
        """The next pass: all sessions that decode, and beside them a bounded share of prompts, so
        that the time between two tokens stays bounded too.
        """
        decoding = [session for session in self.running if not session.is_prefill]
        limits = {session: session.num_owed for session in decoding}
        limits |= self._share(self._max_pass_tokens // (SHARE if decoding else 1) or 1)
        turns = [(session, session.take(limit)) for session, limit in limits.items()]
        return [(session, turn) for session, turn in turns if turn.feeds]

    def _share(self, room: int) -> dict[Session, int]:
        """Prompt tokens of each session in the next pass: half of the room for the oldest session,
        whose turn therefore comes, the rest for those that have the least to do.
        """
        prompts = self._prompts()
        limits = {session: min(session.num_owed, -(-room // 2)) for session in prompts[:1]}
        room -= sum(limits.values())
        for session in sorted(prompts, key=lambda session: session.num_owed):
            given = limits.get(session, 0)
            more = min(session.num_owed - given, room)
            if more > 0:
                limits[session] = given + more
                room -= more
        return limits

    def _prompts(self) -> list[Session]:
        """Sessions in prefill, oldest first. Of those that would encode the same page only the
        first: the others find it afterwards.
        """
        prompts: list[Session] = []
        begun: set[bytes] = set()
        for session in self.running:
            if session.is_prefill:
                session.reuse_prefix()
                key = session.next_key
                if key is None or key not in begun:
                    prompts.append(session)
                if key is not None:
                    begun.add(key)
        return prompts
