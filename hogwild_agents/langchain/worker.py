"""`Worker` as users of the face build it: the engine's, with the face's errors."""

from __future__ import annotations

from dataclasses import dataclass

from hogwild_agents.langchain.errors import translated
from hogwild_engine.api import request


@dataclass(frozen=True, slots=True)
class Worker(request.Worker):
    """One of the minds that write at the same time.

    Args:
        name: stands in the worker's headers. Letters, digits, spaces and ``. ' - _``; at most 64.
        role: what this worker is told to do; all workers read all roles.

    Raises:
        WorkerNameError: the name is empty or would break a header.
        ConfigError: the role is empty or no text.
    """

    def __post_init__(self) -> None:
        with translated():
            request.Worker.__post_init__(self)
