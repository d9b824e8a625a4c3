"""What an engine has done so far, and its numbers at one moment. Knows no sessions."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from hogwild_engine.api.events import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What an engine has done since it was made.

    Args:
        steps: forward steps.
        encoded_tokens: tokens that went through the model.
        forward_s: seconds inside the model's forward; on a CUDA device, until it is launched.
        busy_s: seconds of all steps, idle time left out.
        prompt_tokens: prompt tokens of finished sessions.
        cached_tokens: of these, how many came from the prefix cache.
        worker_tokens: tokens sampled by workers of finished sessions.
        answer_tokens: tokens sampled for answers of finished sessions.
        forced_tokens: tokens that protocols wrote in finished sessions.
    """

    steps: int = 0
    encoded_tokens: int = 0
    forward_s: float = 0.0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    worker_tokens: int = 0
    answer_tokens: int = 0
    forced_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(Totals):
    """An engine at one moment: its totals, and what it holds.

    Args:
        num_pages: pages in the pool.
        free_pages: pages that no session holds; they may be cached prefixes.
        page_size: tokens a page holds.
        cache_bytes: bytes of the pool, used or not.
        sessions: sessions that run.
        waiting: sessions that wait for pages.
    """

    num_pages: int
    free_pages: int
    page_size: int
    cache_bytes: int
    sessions: int
    waiting: int


class Recorder:
    """Adds up totals. ``totals`` is replaced whole, so other threads may read it at any time."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._since = time.perf_counter()

    def wake(self) -> None:
        """Leave out the time until now: the engine was idle."""
        self._since = time.perf_counter()

    def add_step(self, num_tokens: int, forward_s: float) -> None:
        """Add a step that ends now. It began at the end of the last one, or at `wake`."""
        now, totals = time.perf_counter(), self.totals
        self.totals = replace(
            totals,
            steps=totals.steps + 1,
            encoded_tokens=totals.encoded_tokens + num_tokens,
            forward_s=totals.forward_s + forward_s,
            busy_s=totals.busy_s + now - self._since,
        )
        self._since = now

    def add_session(self, usage: Usage) -> None:
        """Add a finished session."""
        totals = self.totals
        self.totals = replace(
            totals,
            prompt_tokens=totals.prompt_tokens + usage.prompt_tokens,
            cached_tokens=totals.cached_tokens + usage.cached_tokens,
            worker_tokens=totals.worker_tokens + sum(usage.worker_tokens.values()),
            answer_tokens=totals.answer_tokens + usage.answer_tokens,
            forced_tokens=totals.forced_tokens + usage.forced_tokens,
        )
