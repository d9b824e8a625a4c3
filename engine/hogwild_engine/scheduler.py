"""Which sessions share the next pass. Sessions are picked, never workers: those of one session run
together.
"""

from __future__ import annotations

from collections import deque

from hogwild_engine.cache import KVCache
from hogwild_engine.session import Session, Turn


class Scheduler:
    """Sessions that wait for pages, and sessions that run.

    A session is admitted when the most pages that it can ever hold are not set aside for others, so
    that what it writes depends on no other session.
    """

    def __init__(self, cache: KVCache, max_pass_tokens: int) -> None:
        self._cache = cache
        self._max_pass_tokens = max_pass_tokens
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

    def pick(self) -> list[tuple[Session, Turn]]:
        """The next pass: all sessions that decode, and as much prefill as still fits, oldest
        session first.
        """
        decoding = [session for session in self.running if not session.is_prefill]
        turns = [(session, session.take(session.num_owed)) for session in decoding]
        room = self._max_pass_tokens - sum(f.count for _, turn in turns for f in turn.feeds)
        room = max(room, self._max_pass_tokens // 4, 1)
        for session in self._prompts():
            if room > 0:
                turn = session.take(room)
                room -= sum(feed.count for feed in turn.feeds)
                turns.append((session, turn))
        return [(session, turn) for session, turn in turns if turn.feeds]

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
