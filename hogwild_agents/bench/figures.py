"""What a benchmark's readings come to: medians by arm, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hogwild_agents.bench.measurement import TEMPERATURE, TOP_P, Measured
from hogwild_agents.bench.systems import BASELINE, BenchConfig, Reading, SystemName

Key = tuple[int, int, int, SystemName]


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of one arm in one setting. ``None`` where there is nothing to say.

    Args:
        context: tokens of a prompt, as asked for.
        prompt_tokens: tokens of a prompt, as rendered.
        sessions: requests at once.
        system: who decoded.
        dtype: of the weights; "int8" activations are int8 too.
        workers: of each request.
        rounds: how often it ran.
        step_ms: one step, in which every worker of every request decodes a token.
        tokens_per_s: all workers and requests together, after the prompts.
        over_generate: tokens_per_s over that of ``generate`` in the same round.
        over_one_worker: step_ms over that of one worker in the same round.
        prefill_tokens_per_s: prompt tokens until every request has its first token.
        cache_bytes: most that keys and values held.
        private_cache_bytes: what a cache of its own for each worker would have held.
        outside_forward: share of a step that is not the model's forward.
    """

    context: int
    prompt_tokens: int
    sessions: int
    system: str
    dtype: str
    workers: int
    rounds: int
    step_ms: float
    tokens_per_s: float
    over_generate: float | None
    over_one_worker: float | None
    prefill_tokens_per_s: float
    cache_bytes: float | None
    private_cache_bytes: float | None
    outside_forward: float | None


def figures_of(readings: Sequence[Reading]) -> list[Figures]:
    """One entry an arm and setting, in the order in which they ran first."""
    cells: dict[tuple[int, int, SystemName], list[Reading]] = {}
    for reading in readings:
        cells.setdefault((reading.context, reading.sessions, reading.arm), []).append(reading)
    index = {key_of(reading): reading.measured for reading in readings}
    return [_figures(cell, index) for cell in cells.values()]


def key_of(reading: Reading, arm: SystemName | None = None) -> Key:
    """What tells a reading from all others; of another arm in the same round where one is given."""
    return reading.context, reading.sessions, reading.repeat, arm or reading.arm


def ratio(
    cell: Iterable[Reading],
    index: dict[Key, Measured],
    other: SystemName,
    figure: Callable[[Measured], float],
) -> float | None:
    """Median of an arm's figure over that of ``other`` in the same rounds."""
    pairs = [(r.measured, index.get(key_of(r, other))) for r in cell]
    return middle(figure(mine) / figure(theirs) for mine, theirs in pairs if theirs is not None)


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; ``None`` where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _figures(cell: Sequence[Reading], index: dict[Key, Measured]) -> Figures:
    first, arm = cell[0], cell[0].arm
    runs = [reading.measured for reading in cell]
    single = arm._replace(workers=1) if arm.system != BASELINE else None
    return Figures(
        context=first.context,
        prompt_tokens=round(median(run.prompt_tokens for run in runs)),
        sessions=first.sessions,
        system=arm.system,
        dtype=arm.dtype,
        workers=arm.workers,
        rounds=len(runs),
        step_ms=median(run.step_ms for run in runs),
        tokens_per_s=median(run.tokens_per_s for run in runs),
        over_generate=ratio(cell, index, arm.baseline, lambda run: run.tokens_per_s),
        over_one_worker=single and ratio(cell, index, single, lambda run: run.step_ms),
        prefill_tokens_per_s=median(run.prefill_tokens_per_s for run in runs),
        cache_bytes=middle(run.cache_bytes for run in runs),
        private_cache_bytes=middle(run.private_cache_bytes for run in runs),
        outside_forward=middle(run.outside_forward for run in runs),
    )


def report_of(
    config: BenchConfig, machine: dict[str, Any], readings: Sequence[Reading]
) -> dict[str, Any]:
    """Everything as plain data: settings, machine, medians, and each run's readings."""
    return {
        "settings": asdict(config) | {"temperature": TEMPERATURE, "top_p": TOP_P},
        "machine": machine,
        "figures": [asdict(row) for row in figures_of(readings)],
        "readings": [reading.as_dict() for reading in readings],
    }
