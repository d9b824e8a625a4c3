"""The task of ``hogwild demo``: one that the small embedded model divides."""

from hogwild_engine.config import SamplingParams
from hogwild_engine.request import Request

TASK = "Describe the four seasons, in a short paragraph for each of them."

REQUEST = Request(
    messages=({"role": "user", "content": TASK},),
    answer="join",
    max_steps=160,
    sampling=SamplingParams(seed=1),
)
