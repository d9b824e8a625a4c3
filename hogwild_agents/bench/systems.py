"""``hogwild bench``: which systems run, in which order, on which prompts.

All systems of one setting run in turn, in several rounds, so that noise hits all of them alike.
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
MIN_CONTEXT = 64
HEADER_TOKENS = 64
"""More than a worker's header takes, and what a session keeps free for the next one."""


class System(Protocol):
    """One of the systems that are compared."""

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured: ...


class SystemName(NamedTuple):
    """A system, its dtype, and how many workers or sequences write at once."""

    system: str
    dtype: str
    workers: int

    @property
    def baseline(self) -> SystemName:
        """The ``generate`` that it is compared with."""
        return SystemName(BASELINE, PRECISIONS.get(self.dtype, {}).get("dtype", self.dtype), 1)


class Reading(NamedTuple):
    """One measurement: a system in one round of one setting."""

    context: int
    sessions: int
    repeat: int
    system: SystemName
    measured: Measured

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one level deep."""
        setting = {"context": self.context, "sessions": self.sessions, "repeat": self.repeat}
        return setting | self.system._asdict() | asdict(self.measured)


class Loaded(NamedTuple):
    """All systems in order, an engine that counts tokens, and facts about the machine."""

    systems: dict[SystemName, System]
    engine: Engine
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure.

    Args:
        model: a hub id, a folder, a ``.gguf`` file, or the embedded model.
        dtypes: of `PRECISIONS`; "int8" is compared with ``generate`` in bfloat16.
        contexts: tokens of the prompts; fewer if the model's context cannot hold them beside what
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
            ("context", self.contexts, MIN_CONTEXT),
            ("sessions", self.sessions, 1),
            ("steps", (self.steps,), 2),
            ("repeats", (self.repeats,), 1),
        ):
            require(min(given) >= least, name, f"at least {least}", min(given))
        least_threads = self.threads is None or self.threads >= 1
        require(least_threads, "threads", "at least 1", self.threads)
        EngineConfig(self.model)

    def engine_config(self, dtype: str) -> EngineConfig:
        """Return the engine's settings for ``dtype``, with pages for the largest setting."""
        pages = max(self._pages(context, count) for context, count in self.settings)
        return EngineConfig(
            self.model, num_pages=pages, num_threads=self.threads, **PRECISIONS[dtype]
        )

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Each context with each number of sessions."""
        return [(context, count) for context in self.contexts for count in self.sessions]

    def written(self, sessions: int) -> int:
        """Return the most tokens that a session's workers add to its prompt."""
        steps = self.steps + 1 + lead_steps(sessions)
        return max(self.workers) * (steps + HEADER_TOKENS)

    def _pages(self, context: int, sessions: int) -> int:
        # A session reserves twice what is written and some pages per worker; prompts that wait in
        # the prefix cache for the second run are at most half of the pool.
        tokens = 2 * context + 3 * self.written(sessions)
        return sessions * (tokens // DEFAULTS.page_size + 4 * max(self.workers) + 16)


@contextmanager
def loaded(config: BenchConfig) -> Iterator[Loaded]:
    """Load all models, and close them at the end."""
    from hogwild_agents.bench.generate_system import GenerateSystem, machine
    from hogwild_engine.engine import Engine

    names = [SystemName(OURS, dtype, count) for dtype in config.dtypes for count in config.workers]
    with ExitStack() as stack:
        systems: dict[SystemName, System] = {}
        for name in dict.fromkeys(name.baseline for name in names):
            systems[name] = GenerateSystem(config.engine_config(name.dtype))
        engines = {
            dtype: stack.enter_context(Engine(config.engine_config(dtype)))
            for dtype in config.dtypes
        }
        systems |= {name: EngineSystem(engines[name.dtype], name.workers) for name in names}
        yield Loaded(systems, engines[config.dtypes[0]], machine())


def rounds(
    config: BenchConfig, systems: Mapping[SystemName, System], engine: Engine
) -> Iterator[Reading]:
    """Run all systems of each setting in turn, ``config.repeats`` times; each is warmed up first.

    Raises:
        ConfigError: the model's context has no room for a setting.
    """
    prompts = Prompts(engine)
    for system in systems.values():
        system.measure(prompts.tasks(MIN_CONTEXT, 1, 0), WARM_UP_STEPS, 0)
    number = 1
    for context, sessions in config.settings:
        room = engine.context_len - config.written(sessions)
        todo = f"the model's context holds {engine.context_len}: fewer steps or workers"
        require(room >= MIN_CONTEXT, "context", f"room for {MIN_CONTEXT} tokens", room, todo)
        for repeat in range(config.repeats):
            for name, system in systems.items():
                tasks = prompts.tasks(min(context, room), sessions, number)
                measured = system.measure(tasks, config.steps, number)
                yield Reading(context, sessions, repeat, name, measured)
                number += sessions
