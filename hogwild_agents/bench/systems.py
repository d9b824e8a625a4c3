"""``hogwild bench``: which arms run, in which order, on which prompts. Knows no model library.

All arms of one setting run in turn, and the turn is repeated: what disturbs the machine disturbs
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hogwild_agents.bench.engine_system import EngineSystem, lead_steps
from hogwild_agents.bench.measurement import Measured
from hogwild_agents.bench.prompts import Prompts
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import require
from hogwild_engine.api.request import MAX_WORKERS

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
BASELINE = "generate"
OURS = "hogwild"

DEFAULTS = EngineConfig()
WARM_UP_STEPS = 4
LEAST_CONTEXT = 64
HEADER_TOKENS = 64
"""More than a worker's header takes, and what a session keeps free for another one."""


class Arm(Protocol):
    """One of the systems that are compared."""

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured: ...


class SystemName(NamedTuple):
    """Which system, how it computes, and how many workers or sequences write at once."""

    system: str
    dtype: str
    workers: int

    @property
    def baseline(self) -> SystemName:
        """The ``generate`` that this arm is compared with."""
        return SystemName(BASELINE, PRECISIONS.get(self.dtype, {}).get("dtype", self.dtype), 1)


class Reading(NamedTuple):
    """What one arm measured in one round of one setting."""

    context: int
    sessions: int
    repeat: int
    arm: SystemName
    measured: Measured

    def as_dict(self) -> dict[str, Any]:
        """The reading as plain data, one level deep."""
        setting = {"context": self.context, "sessions": self.sessions, "repeat": self.repeat}
        return setting | self.arm._asdict() | asdict(self.measured)


class Loaded(NamedTuple):
    """All arms in the order of their turns, an engine that knows the model's tokens, and what the
    figures depend on beside the settings.
    """

    arms: dict[SystemName, Arm]
    engine: Engine
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is measured.

    Args:
        model: a hub id, a folder, a ``.gguf`` file, or the embedded model.
        dtypes: of `PRECISIONS`; "int8" is compared with ``generate`` in bfloat16.
        contexts: tokens of the prompts; fewer where the model's context holds no more beside what
            is decoded.
        sessions: requests at once.
        workers: of each request.
        steps: decoding steps that are measured.
        repeats: rounds of each setting.
        threads: of the CPU; ``None``: torch's default.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    dtypes: tuple[str, ...] = ("bfloat16",)
    contexts: tuple[int, ...] = (512,)
    sessions: tuple[int, ...] = (1,)
    workers: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 32
    repeats: int = 3
    threads: int | None = None

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            require(dtype in PRECISIONS, "dtype", f"some of {', '.join(PRECISIONS)}", dtype)
        for count in self.workers:
            require(1 <= count <= MAX_WORKERS, "workers", f"1 to {MAX_WORKERS}", count)
        for name, given, least in (
            ("context", self.contexts, LEAST_CONTEXT),
            ("sessions", self.sessions, 1),
            ("steps", (self.steps,), 2),
            ("repeats", (self.repeats,), 1),
        ):
            require(min(given) >= least, name, f"at least {least}", min(given))
        least_threads = self.threads is None or self.threads >= 1
        require(least_threads, "threads", "at least 1", self.threads)
        EngineConfig(self.model)

    def engine_config(self, dtype: str) -> EngineConfig:
        """The engine that serves ``dtype``, with pages for the largest setting."""
        pages = max(self._pages(context, count) for context, count in self.settings)
        return EngineConfig(
            self.model, num_pages=pages, num_threads=self.threads, **PRECISIONS[dtype]
        )

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Each context with each number of sessions."""
        return [(context, count) for context in self.contexts for count in self.sessions]

    def written(self, sessions: int) -> int:
        """Tokens that a session's workers may add to its prompt, at most."""
        steps = self.steps + 1 + lead_steps(sessions)
        return max(self.workers) * (steps + HEADER_TOKENS)

    def _pages(self, context: int, sessions: int) -> int:
        # Twice what is written, and some pages a worker, is what a session sets aside; prompts that
        # wait for the second turn in the prefix cache are at most half of the pool.
        tokens = 2 * context + 3 * self.written(sessions)
        return sessions * (tokens // DEFAULTS.page_size + 4 * max(self.workers) + 16)


@contextmanager
def loaded(config: BenchConfig) -> Iterator[Loaded]:
    """Load all models; close what is open at the end."""
    from hogwild_agents.bench.generate_system import GenerateSystem, machine
    from hogwild_engine.engine import Engine

    names = [SystemName(OURS, dtype, count) for dtype in config.dtypes for count in config.workers]
    with ExitStack() as stack:
        arms: dict[SystemName, Arm] = {}
        for name in dict.fromkeys(name.baseline for name in names):
            arms[name] = GenerateSystem(config.engine_config(name.dtype))
        engines = {
            dtype: stack.enter_context(Engine(config.engine_config(dtype)))
            for dtype in config.dtypes
        }
        arms |= {name: EngineSystem(engines[name.dtype], name.workers) for name in names}
        yield Loaded(arms, engines[config.dtypes[0]], machine())


def rounds(
    config: BenchConfig, arms: Mapping[SystemName, Arm], engine: Engine
) -> Iterator[Reading]:
    """Run all arms of each setting in turn, ``config.repeats`` times; each is warmed up first.

    Raises:
        ConfigError: the model's context has no room for a setting.
    """
    prompts = Prompts(engine)
    for arm in arms.values():
        arm.measure(prompts.tasks(LEAST_CONTEXT, 1, 0), WARM_UP_STEPS, 0)
    number = 1
    for context, sessions in config.settings:
        room = engine.context_len - config.written(sessions)
        todo = f"the model's context holds {engine.context_len}: fewer steps or workers"
        require(room >= LEAST_CONTEXT, "context", f"room for {LEAST_CONTEXT} tokens", room, todo)
        for repeat in range(config.repeats):
            for name, arm in arms.items():
                tasks = prompts.tasks(min(context, room), sessions, number)
                measured = arm.measure(tasks, config.steps, number)
                yield Reading(context, sessions, repeat, name, measured)
                number += sessions
