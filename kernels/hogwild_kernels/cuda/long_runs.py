"""Long prompt chunks by a prefill backend, all other query tokens by an attention backend.

A prefill backend attends over one contiguous sequence at a time. So each long chunk is served block
by block: rotate its queries, gather the block's pages, attend, and merge the results by their
log-sum-exp. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from hogwild_kernels.api import AttentionBackend, AttentionSpec, States
from hogwild_kernels.cuda.varlen import PrefillBackend
from hogwild_kernels.reference import merge_states, rotate
from hogwild_kernels.table import BlockRead, BlockTable


class LongPromptBackend(AttentionBackend):
    """An attention backend, and a prefill backend for its long prompt chunks.

    Args:
        attention: serves all other query tokens, writes and moves; "triton" or "reference".
        prefill: serves `BlockTable.long_rows`.
    """

    def __init__(self, attention: AttentionBackend, prefill: PrefillBackend) -> None:
        self.attention, self.prefill = attention, prefill
        self.name = f"{attention.name}, {prefill.name} for long prompts"
        self._write, self._move = attention._write, attention._move

    def supports(self, spec: AttentionSpec) -> str | None:
        return self.attention.supports(spec) or self.prefill.supports(spec)

    def _attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        table: BlockTable,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> States:
        if not table.long_rows:
            return self.attention._attend(
                q, k_pages, v_pages, table, scale=scale, softcap=softcap, sinks=sinks
            )
        others = _without_long_rows(table, q.shape[0])
        # Long rows see nothing but the sinks here, so that those are counted once in the merge.
        if others.num_active:
            out, lse = self.attention._attend(
                q, k_pages, v_pages, others, scale=scale, softcap=softcap, sinks=sinks
            )
        else:
            out, lse = _sinks_alone(q, sinks)
        merged = out.float()
        for run in runs(table):
            rows = slice(run.first_row, run.first_row + run.num_rows)
            k, v = (_gather(pages, table, run) for pages in (k_pages, v_pages))
            angles = (x[run.first_pair : run.first_pair + 1] for x in (table.cos, table.sin))
            query = rotate(q[rows], *angles).to(k.dtype)
            part = self.prefill.attend(query, k, v, scale=scale, softcap=softcap, window=run.window)
            _merge_in(merged[rows], lse[rows], *part)
        return merged.to(q.dtype), lse


class Run(NamedTuple):
    """Consecutive query tokens that read one block alike: one call of a prefill backend.

    All queries are rotated by the same angle, and each sees at least one token. Query token ``i``
    of the run lies on the diagonal at token ``hi - num_rows + i``.

    Args:
        first_row: the first query token.
        num_rows: how many they are.
        read: index of the `BlockRead`.
        first_pair: the pair of the first query token.
        lo: first token that any of them sees.
        hi: one past the last token that any of them sees.
        window: how many tokens before and after its diagonal a query token sees; -1 for all from
            ``lo`` on, and for all up to ``hi``. With more query tokens than keys it is never (n,
            -1): flash-attn takes no such window.
    """

    first_row: int
    num_rows: int
    read: int
    first_pair: int
    lo: int
    hi: int
    window: tuple[int, int]


def runs(table: BlockTable) -> tuple[Run, ...]:
    """Return what the long rows read, kept on the table."""
    if "runs" not in table.derived:
        reads = table.reads or ()
        first_pairs = list(accumulate((len(read.hi) for read in reads), initial=0))
        found: list[Run] = []
        for rows in table.long_rows:
            for number, read in enumerate(reads):
                index = rows.start - read.first_row
                if 0 <= index < len(read.hi) and read.hi[index]:
                    hi, pair = read.hi[index + len(rows) - 1], first_pairs[number] + index
                    run = Run(rows.start, len(rows), number, pair, 0, hi, (-1, -1))
                    found += _in_window(run, read, index, table.window)
        table.derived["runs"] = tuple(found)
    return table.derived["runs"]


def _in_window(run: Run, read: BlockRead, index: int, window: int | None) -> Iterator[Run]:
    """Yield what a sliding window leaves of a run over a whole block, from query ``index`` on."""
    own = read.hi[index] < run.hi  # in its own block each query token sees one token more
    if window is None:
        yield run._replace(window=(-1, 0 if own else -1))
        return
    start = read.offsets[index] - window + 1  # of the first query's window, one later for each next
    if own:
        yield run._replace(lo=max(0, start), window=(window - 1, 0))
        return
    # First the query tokens whose window still holds the whole block, then those it slides over.
    whole = min(run.num_rows, max(0, 1 - start))
    if whole:
        yield run._replace(num_rows=whole)
    sliding, lo = min(run.num_rows, run.hi - start) - whole, start + whole
    if sliding > 0:
        first, pair = run.first_row + whole, run.first_pair + whole
        yield Run(first, sliding, run.read, pair, lo, run.hi, (run.hi - lo - sliding, -1))


def _without_long_rows(table: BlockTable, num_rows: int) -> BlockTable:
    """Return the table in which long rows see nothing, kept on ``table``."""
    if "without long rows" not in table.derived:
        hi = table.hi.clone()
        for run in runs(table):
            hi[run.first_pair : run.first_pair + run.num_rows] = 0
        active = num_rows - sum(map(len, table.long_rows))
        others = replace(table, hi=hi, reads=None, long_rows=(), num_active=active, derived={})
        table.derived["without long rows"] = others
    return table.derived["without long rows"]


def _sinks_alone(q: torch.Tensor, sinks: torch.Tensor | None) -> States:
    """Return the states of query tokens that see nothing but the sinks."""
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    return torch.zeros_like(q), lse if sinks is None else lse.copy_(sinks)


def _gather(pages: torch.Tensor, table: BlockTable, run: Run) -> torch.Tensor:
    """Return the tokens ``lo`` to ``hi`` of the run's block, ``[S, KH, D]``.

    A copy: the paged access of flash-attn wants pages of 256 tokens, and ours are smaller.
    """
    page_size = pages.shape[1]
    first = run.lo // page_size
    numbers = table.pages[run.read, first : -(-run.hi // page_size)]
    tokens = pages.index_select(0, numbers).flatten(0, 1)
    return tokens[run.lo - first * page_size : run.hi - first * page_size]


def _merge_in(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge another state into ``outs`` and ``lses``, in place."""
    merged = merge_states(torch.stack((outs, out.float())), torch.stack((lses, lse)))
    outs.copy_(merged[0])
    lses.copy_(merged[1])
