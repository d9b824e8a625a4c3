"""Long runs of rows by attention over contiguous sequences, all other rows as ever, merged by lse.

One call a (run of rows, block): its queries are turned, and its block's pages gathered, beforehand.
Knows neither who attends nor how the other rows are served. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hogwild_kernels.cuda.varlen import Attend
from hogwild_kernels.reference import merge_states, rotate
from hogwild_kernels.table import BlockTable, Run

States = tuple[torch.Tensor, torch.Tensor]
Rest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockTable], States]


def block_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    attend: Attend,
    rest: Rest,
) -> States:
    """See `hogwild_kernels.block_attention`.

    Args:
        attend: serves the table's runs.
        rest: serves all other rows, with the same scale, softcap and sinks.
    """
    others = _without_runs(table, q.shape[0])
    # Rows of runs see nothing here but the sinks, which so come in once, whatever is merged in.
    if others.num_active:
        out, lse = rest(q, k_pages, v_pages, others)
    else:
        out, lse = _unread(q, sinks)
    merged = out.float()
    for run in table.runs:
        rows = slice(run.first_row, run.first_row + run.num_rows)
        k, v = (_gather(pages, table, run) for pages in (k_pages, v_pages))
        turned = _turn(q[rows], table, run.first_pair).to(k.dtype)
        part = attend(turned, k, v, scale=scale, softcap=softcap, window=run.window)
        _merge_in(merged[rows], lse[rows], *part)
    return merged.to(q.dtype), lse


def _without_runs(table: BlockTable, num_rows: int) -> BlockTable:
    """What rows outside of runs read; the others see nothing."""
    if "without runs" not in table.derived:
        hi = table.hi.clone()
        for run in table.runs:
            hi[run.first_pair : run.first_pair + run.num_rows] = 0
        of_runs = (range(run.first_row, run.first_row + run.num_rows) for run in table.runs)
        active = num_rows - len(set().union(*of_runs))
        others = replace(table, hi=hi, runs=(), num_active=active, derived={})
        table.derived["without runs"] = others
    return table.derived["without runs"]


def _unread(q: torch.Tensor, sinks: torch.Tensor | None) -> States:
    """The states of rows that see nothing but the sinks."""
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    return torch.zeros_like(q), lse if sinks is None else lse.copy_(sinks)


def _turn(q: torch.Tensor, table: BlockTable, pair: int) -> torch.Tensor:
    """Queries turned as the query of this pair is, float32 ``[T, H, D]``."""
    return rotate(q, table.cos[pair : pair + 1], table.sin[pair : pair + 1])


def _gather(pages: torch.Tensor, table: BlockTable, run: Run) -> torch.Tensor:
    """The tokens ``lo`` to ``hi`` of the run's block, ``[S, KH, D]``.

    A copy, where paged access would want pages of 256 tokens; ours are small.
    """
    page_size = pages.shape[1]
    first = run.lo // page_size
    numbers = table.pages[run.entry, first : -(-run.hi // page_size)]
    tokens = pages.index_select(0, numbers).flatten(0, 1)
    return tokens[run.lo - first * page_size : run.hi - first * page_size]


def _merge_in(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge another state into ``outs`` and ``lses``, in place."""
    merged = merge_states(torch.stack((outs, out.float())), torch.stack((lses, lse)))
    outs.copy_(merged[0])
    lses.copy_(merged[1])
