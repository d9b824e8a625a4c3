"""How many steps an engine has made, and how long they took. Knows no sessions."""

from __future__ import annotations

import time
from typing import NamedTuple


class Work(NamedTuple):
    """What an engine has done so far.

    Args:
        steps: forward steps.
        encoded_tokens: tokens that went through the model.
        forward_s: seconds inside the model's forward; on a CUDA device, until it is launched.
        busy_s: seconds from step to step, idle time left out.
    """

    steps: int = 0
    encoded_tokens: int = 0
    forward_s: float = 0.0
    busy_s: float = 0.0


class StepTimer:
    """Adds up steps. ``work`` is replaced whole, so that other threads may read it at any time."""

    def __init__(self) -> None:
        self.work = Work()
        self._since = time.perf_counter()

    def wake(self) -> None:
        """Leave out the time until now: the engine was idle."""
        self._since = time.perf_counter()

    def add_step(self, tokens: int, forward_s: float) -> None:
        """Add a step that ends now. It began at the end of the last one, or at `wake`."""
        now = time.perf_counter()
        steps, encoded, forward, busy = self.work
        self.work = Work(steps + 1, encoded + tokens, forward + forward_s, busy + now - self._since)
        self._since = now
