"""A benchmark's figures as tables, one per setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from hogwild_agents.bench.figures import Figures
from hogwild_agents.bench.systems import BASELINE

UNKNOWN = "–"
COLUMNS = (
    "ms a\nstep",
    "tokens\n/s",
    "over\ngenerate",
    "over one\nworker",
    "prefill\n/s",
    "cache\nMB",
    "of\nprivate",
    "outside\nforward",
)


def tables_of(figures: Sequence[Figures]) -> list[Table]:
    """Return a table per setting, with a row per system."""
    settings = groupby(figures, lambda row: (row.context, row.sessions))
    return [_table(list(rows), sessions) for (_, sessions), rows in settings]


def _table(rows: Sequence[Figures], sessions: int) -> Table:
    prompts = "a prompt" if sessions == 1 else f"{sessions} sessions at once, each with a prompt"
    rounds = f"medians of {max(row.rounds for row in rows)} rounds"
    title = f"{prompts} of {rows[0].prompt_tokens} tokens, {rounds}".capitalize()
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column(no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Figures) -> list[str]:
    share = None
    if row.cache_bytes is not None and row.private_cache_bytes:
        share = row.cache_bytes / row.private_cache_bytes
    return [
        _label(row),
        f"{row.step_ms:.1f}",
        f"{row.tokens_per_s:.1f}",
        _shown(row.over_generate, "{:.2f}×"),
        _shown(row.over_one_worker, "{:.2f}"),
        f"{row.prefill_tokens_per_s:.0f}",
        _shown(row.cache_bytes and row.cache_bytes / 1e6, "{:.1f}"),
        _shown(share, "{:.0%}"),
        _shown(row.outside_forward, "{:.1%}"),
    ]


def _label(row: Figures) -> str:
    if row.system == BASELINE:
        return f"{BASELINE}, {row.dtype}"
    return f"{row.workers} {'worker' if row.workers == 1 else 'workers'}, {row.dtype}"


def _shown(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
