"""What an engine tells its users about a model: how it samples, and what it is too small for."""

from __future__ import annotations

from hogwild_engine.api.config import SamplingParams
from hogwild_engine.api.protocol import Protocol

_MIN_PROSE_PARAMETERS = 10**9
"""Models with fewer answer a team's rules instead of the task, in most runs of prose."""


def describe_sampling(default: SamplingParams, source: str) -> str:
    """Return one line: how calls sample that say nothing of it, and who states that."""
    settings = "greedy"
    if default.temperature:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        settings = ", ".join(f"{name} {getattr(default, name):g}" for name in names)
    return f"sampling unless a call sets it: {settings} ({source})"


def size_advice(model: str, num_parameters: int, protocol: Protocol) -> str | None:
    """Return a sentence if a model is too small for a team with this protocol, else ``None``."""
    if num_parameters >= _MIN_PROSE_PARAMETERS or protocol.paragraph_end == "fence":
        return None
    return (
        f"{model} has {num_parameters / 1e6:.0f} million parameters, too few for a team that "
        "writes prose: use a model with a billion or more, workers=1, or protocol='code' for lists "
        "of functions"
    )
