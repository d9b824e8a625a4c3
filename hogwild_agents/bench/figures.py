"""Medians of a benchmark's readings, by system, as plain data."""

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
    """Medians of one system in one setting; ``None`` for what is not known.

    Args:
        context: tokens of a prompt, as asked for.
        prompt_tokens: tokens of a prompt, as rendered.
        sessions: requests at once.
        system: its name.
        dtype: of the weights; "int8" activations are int8 too.
        workers: of each request.
        rounds: how often it ran.
        step_ms: one step, in which every worker of every request decodes a token.
        tokens_per_s: all workers and requests together, after the prompts.
        over_generate: tokens_per_s over that of ``generate`` in the same round.
        over_one_worker: step_ms over that of one worker in the same round.
        prefill_tokens_per_s: prompt tokens until every request has its first token.
        cache_bytes: most bytes of keys and values.
        private_cache_bytes: bytes of a private cache for each worker.
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
    """Return one entry per system and setting, in the order in which they ran first."""
    cells: dict[tuple[int, int, SystemName], list[Reading]] = {}
    for reading in readings:
        cells.setdefault((reading.context, reading.sessions, reading.system), []).append(reading)
    index = {key_of(reading): reading.measured for reading in readings}
    return [_figures(cell, index) for cell in cells.values()]


def key_of(reading: Reading, system: SystemName | None = None) -> Key:
    """Return the key of a reading, or of another system's in the same round."""
    return reading.context, reading.sessions, reading.repeat, system or reading.system


def ratio(
    cell: Iterable[Reading],
    index: dict[Key, Measured],
    other: SystemName,
    figure: Callable[[Measured], float],
) -> float | None:
    """Return the median of a system's figure over that of ``other`` in the same rounds."""
    pairs = [(r.measured, index.get(key_of(r, other))) for r in cell]
    return middle(figure(mine) / figure(theirs) for mine, theirs in pairs if theirs is not None)


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; ``None`` if there is none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _figures(cell: Sequence[Reading], index: dict[Key, Measured]) -> Figures:
    first, system = cell[0], cell[0].system
    runs = [reading.measured for reading in cell]
    single = system._replace(workers=1) if system.system != BASELINE else None
    return Figures(
        context=first.context,
        prompt_tokens=round(median(run.prompt_tokens for run in runs)),
        sessions=first.sessions,
        system=system.system,
        dtype=system.dtype,
        workers=system.workers,
        rounds=len(runs),
        step_ms=median(run.step_ms for run in runs),
        tokens_per_s=median(run.tokens_per_s for run in runs),
        over_generate=ratio(cell, index, system.baseline, lambda run: run.tokens_per_s),
        over_one_worker=single and ratio(cell, index, single, lambda run: run.step_ms),
        prefill_tokens_per_s=median(run.prefill_tokens_per_s for run in runs),
        cache_bytes=middle(run.cache_bytes for run in runs),
        private_cache_bytes=middle(run.private_cache_bytes for run in runs),
        outside_forward=middle(run.outside_forward for run in runs),
    )


def report_of(
    config: BenchConfig, machine: dict[str, Any], readings: Sequence[Reading]
) -> dict[str, Any]:
    """Return settings, machine, medians and all readings as plain data."""
    return {
        "settings": asdict(config) | {"temperature": TEMPERATURE, "top_p": TOP_P},
        "machine": machine,
        "figures": [asdict(row) for row in figures_of(readings)],
        "readings": [reading.as_dict() for reading in readings],
    }
