"""Rows of long prompts beside rows that decode, and their check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import Case, Row
from hogwild_kernels import BlockTable, Run, block_attention

CPU = torch.device("cpu")

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU has")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def feed(
    lengths: Sequence[int], view: Sequence[int], start: int, count: int, window: int | None = None
) -> list[Row]:
    """Rows ``start`` to ``start + count`` of the last block of a view, all others seen whole."""
    starts, place = {}, 0
    for block in view:
        starts[block] = place
        place += lengths[block]
    rows = []
    for position in range(start, start + count):
        place = starts[view[-1]] + position
        reads: list[tuple[int, int, int] | None] = [None] * len(lengths)
        for block, begin in starts.items():
            hi = position + 1 if block == view[-1] else lengths[block]
            lo = 0 if window is None else max(0, place - begin - window + 1)
            reads[block] = (starts[view[-1]] - begin, lo, hi)
        rows.append(Row(starts[view[-1]], reads))
    return rows


def with_runs(case: Case, *feeds: range) -> BlockTable:
    """The case's table, with the rows of feeds told as runs too, read off the rows one by one."""
    table = case.table()
    runs = []
    for rows in feeds:
        for entry in range(len(case.lengths)):
            reads = [read for row in rows if (read := case.rows[row].reads[entry])]
            seen = [(lo, hi) for _, lo, hi in reads if lo < hi]
            if not seen:
                continue
            assert [(lo, hi) for _, lo, hi in reads[: len(seen)]] == seen
            pair = int(table.first_pair[entry]) + rows.start - int(table.first_row[entry])
            grows = seen[-1][1] > seen[0][1]
            whole = sum(lo == 0 for lo, _ in seen)
            for part in (range(len(seen)),) if grows else (range(whole), range(whole, len(seen))):
                if part:
                    (lo, _), (last, hi) = seen[part[0]], seen[part[-1]]
                    window = (hi - 1 - last if last else -1, 0 if grows else -1)
                    first = rows.start + part[0], len(part), entry, pair + part[0]
                    runs.append(Run(*first, lo, hi, window))
    return replace(table, runs=tuple(runs))


def check(case: Case, *feeds: range, impl: str = "triton", **options: Any) -> None:
    out, lse = block_attention(
        case.q,
        case.k_pages,
        case.v_pages,
        with_runs(case, *feeds),
        scale=case.scale,
        impl=impl,
        prefill="flash",
        **options,
    )
    case.check_output(out, lse, **options)


def beside_decode(lengths: Sequence[int] = (37, 21, 50), **options: Any) -> tuple[Case, range]:
    """A row of another session, 30 rows of a prompt behind two blocks, one more row."""
    rows = [
        *feed(lengths, [1], 20, 1),
        *feed(lengths, [1, 0, 2], 12, 30),
        *feed(lengths, [0, 1], 9, 1),
    ]
    return Case(lengths, rows, **options), range(1, 31)
