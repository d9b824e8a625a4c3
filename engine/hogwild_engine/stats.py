"""What an engine has done so far, and its numbers at one moment. Knows no sessions."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

from hogwild_engine.api.events import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine at one moment: what it has done since it was made, and what it holds.

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
        num_pages: pages in the pool.
        free_pages: pages that no session holds; they may be cached prefixes.
        page_size: tokens a page holds.
        cache_bytes: bytes of the pool when all its pages have been used once. Memory of the process
            grows until then and stays.
        sessions: sessions that run.
        waiting: sessions that wait for pages.
    """

    steps: int
    encoded_tokens: int
    forward_s: float
    busy_s: float
    prompt_tokens: int
    cached_tokens: int
    worker_tokens: int
    answer_tokens: int
    forced_tokens: int
    num_pages: int
    free_pages: int
    page_size: int
    cache_bytes: int
    sessions: int
    waiting: int

    @property
    def cache_mb(self) -> float:
        """``cache_bytes`` in MB (1e6 bytes)."""
        return self.cache_bytes / 1e6


_TOTALS = [field.name for field in fields(EngineStats)][:9]
"""What a `Recorder` counts: of steps, then of sessions."""


class Recorder:
    """Adds up what an engine does. Its two tuples are replaced as a whole, so other threads may
    call `totals` at any time.
    """

    def __init__(self) -> None:
        self._of_steps = (0, 0, 0.0, 0.0)
        self._of_sessions = (0, 0, 0, 0, 0)
        self._since = time.perf_counter()

    def totals(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that count since the engine was made."""
        return dict(zip(_TOTALS, (*self._of_steps, *self._of_sessions), strict=True))

    def wake(self) -> None:
        """Leave out the time until now: the engine was idle."""
        self._since = time.perf_counter()

    def add_step(self, num_tokens: int, forward_s: float) -> None:
        """Add a step that ends now. It began at the end of the last one, or at `wake`."""
        now = time.perf_counter()
        steps, encoded, forward, busy = self._of_steps
        busy += now - self._since
        self._of_steps = (steps + 1, encoded + num_tokens, forward + forward_s, busy)
        self._since = now

    def add_session(self, usage: Usage) -> None:
        """Add a finished session."""
        prompt, cached, worker, answer, forced = self._of_sessions
        self._of_sessions = (
            prompt + usage.prompt_tokens,
            cached + usage.cached_tokens,
            worker + sum(usage.worker_tokens.values()),
            answer + usage.answer_tokens,
            forced + usage.forced_tokens,
        )
