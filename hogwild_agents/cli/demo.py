"""The task of ``hogwild demo``: one that the small embedded model can divide.

Nothing is scripted. The seed is one of few with which this model divides the task so well: with
most seeds its first worker writes everything before the second one finds a part.
"""

from __future__ import annotations

from hogwild_engine.api.config import EngineConfig, SamplingParams
from hogwild_engine.api.request import Request

FUNCTIONS = ("is_even", "is_odd", "is_positive", "is_negative", "is_zero", "is_one")
TASK = "Write six Python functions, each in its own code block: {}.".format(
    ", ".join(f"{name}(n)" for name in FUNCTIONS)
)

# In float32 the same seed gives the same text on every machine.
CONFIG = EngineConfig(dtype="float32")
REQUEST = Request(
    messages=({"role": "user", "content": TASK},),
    protocol="code",
    answer="join",
    max_steps=120,
    sampling=SamplingParams(temperature=0.2, seed=3),
)
