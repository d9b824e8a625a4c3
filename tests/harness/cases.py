"""Attention problems with blocks on scattered pages, and their expected outputs by the oracle."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from hogwild_kernels.backends import BACKENDS
from hogwild_kernels.table import BlockRead, BlockTable
from oracle import Seen, attend

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGE_SIZE = 16


@dataclass
class Row:
    """What one query token reads of each block: ``(delta, lo, hi)``, or ``None`` without a pair.

    ``place`` is its place in the view, of which ``lo`` follows by the case's window; without it
    each ``lo`` is as given.
    """

    own_start: int
    reads: Sequence[tuple[int, int, int] | None]
    place: int | None = None


@dataclass
class Case:
    """Blocks on scattered pages of a NaN-filled pool, and query tokens that read them.

    Unwritten slots hold NaN, so that reading one shows in the output.
    """

    lengths: Sequence[int]
    rows: Sequence[Row]
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    storage: str = "head-major"
    scattered: bool = True
    q_scale: float = 1.0
    seed: int = 0
    page_size: int = PAGE_SIZE
    window: int | None = None
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.dim**-0.5
        generator = torch.Generator().manual_seed(self.seed)
        half = self.dim // 2
        self.inv_freq = 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        counts = [-(-length // self.page_size) for length in self.lengths]
        order = list(range(sum(counts) + 3))
        if self.scattered:
            random.Random(self.seed).shuffle(order)
        self.num_pages = len(order)
        self.pages = [[order.pop(0) for _ in range(count)] for count in counts]
        self.k_pages, self.v_pages = self._empty(), self._empty()
        self.blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for length, pages in zip(self.lengths, self.pages, strict=True):
            keys = normal(length, self.num_kv_heads, self.dim)
            values = normal(length, self.num_kv_heads, self.dim)
            for token in range(length):
                page, offset = pages[token // self.page_size], token % self.page_size
                self.k_pages[page, offset], self.v_pages[page, offset] = keys[token], values[token]
            self.blocks.append((keys, values))
        self.q = normal(len(self.rows), self.num_heads, self.dim) * self.q_scale

    def _empty(self) -> torch.Tensor:
        sizes = (self.num_pages, self.page_size, self.num_kv_heads, self.dim)
        if self.storage == "head-major":
            head_major = torch.full((sizes[2], *sizes[:2], sizes[3]), math.nan, dtype=self.dtype)
            return head_major.permute(1, 2, 0, 3)
        return torch.full(sizes, math.nan, dtype=self.dtype)

    def reads(self) -> list[BlockRead]:
        """One a block, with all query tokens from its first reader to its last."""
        reads = []
        for block, pages in enumerate(self.pages):
            reading = [i for i, row in enumerate(self.rows) if row.reads[block] is not None]
            span = range(reading[0], reading[-1] + 1) if reading else range(0)
            read = BlockRead(pages, span.start, [], [], [])
            for row in (self.rows[index] for index in span):
                delta, lo, hi = row.reads[block] or (0, 0, 0)
                read.deltas.append(delta)
                read.hi.append(hi)
                # With a window of one token, lo is the offset.
                offset = lo if row.place is None else row.place - row.own_start + delta
                read.offsets.append(offset)
            reads.append(read)
        return reads

    def table(self, long_rows: Sequence[range] = ()) -> BlockTable:
        placed = any(row.place is not None for row in self.rows)
        window = self.window if placed else 1
        return table_of(self.reads(), self.inv_freq, window, long_rows)

    def run(self, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = self.q, self.k_pages, self.v_pages, self.table()
        return BACKENDS[backend].attend(*tensors, scale=self.scale, **options)

    def wanted(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for row, q in zip(self.rows, self.q, strict=True):
            view = []
            for read, (keys, values) in zip(row.reads, self.blocks, strict=True):
                delta, lo, hi = read or (0, 0, 0)
                view.append((row.own_start - delta, Seen(keys, values, lo, hi)))
            out, lse = attend(q, view, self.inv_freq, row.own_start, scale=self.scale, **options)
            outs.append(out)
            lses.append(lse)
        return torch.stack(outs), torch.stack(lses)

    def check(self, backend: str, **options: Any) -> None:
        self.check_output(*self.run(backend, **options), **options)

    def check_output(self, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        """Compare what a backend returned with the oracle."""
        assert out.dtype == self.dtype
        assert lse.dtype == torch.float32
        tolerance = TOLERANCE[self.dtype]
        wanted_out, wanted_lse = self.wanted(**options)
        torch.testing.assert_close(out.double(), wanted_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=tolerance, rtol=tolerance)


def table_of(
    reads: Sequence[BlockRead],
    inv_freq: torch.Tensor,
    window: int | None,
    long_rows: Sequence[range] = (),
) -> BlockTable:
    """Return the tensors of block reads, as the engine packs them."""

    def ints(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    width = max([1, *(len(read.pages) for read in reads)])
    counts = [len(read.hi) for read in reads]
    deltas = torch.tensor([delta for read in reads for delta in read.deltas])
    angle = deltas.double()[:, None] * inv_freq
    return BlockTable(
        ints([read.pages + [0] * (width - len(read.pages)) for read in reads]).reshape(-1, width),
        ints([read.first_row for read in reads]),
        ints(counts),
        ints(list(accumulate(counts, initial=0))[: len(counts)]),
        ints([lo for read in reads for lo in read.lo(window)]),
        ints([hi for read in reads for hi in read.hi]),
        angle.cos().float(),
        angle.sin().float(),
        reads=tuple(reads),
        window=window,
        long_rows=tuple(long_rows),
    )


def ordinary_rows(lengths: Sequence[int], num_rows: int = 3) -> list[Row]:
    """Query tokens that read all blocks, each in its own order; all write to the last block."""
    rows = []
    for row in range(num_rows):
        order = list(range(len(lengths) - 1))
        random.Random(row).shuffle(order)
        starts, place = [0] * len(lengths), 0
        for block in (*order, len(lengths) - 1):
            starts[block] = place
            place += lengths[block]
        own = starts[-1]
        ends = [*lengths[:-1], max(0, lengths[-1] - num_rows + 1 + row)]
        rows.append(Row(own, [(own - s, 0, end) for s, end in zip(starts, ends, strict=True)]))
    return rows
