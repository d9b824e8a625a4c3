"""Attention problems with blocks on scattered pages, and their answers by the oracle."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hogwild_kernels import BlockTable, block_attention
from oracle import Seen, attend

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGE_SIZE = 16


@dataclass
class Row:
    """What one row reads of each block: ``(delta, lo, hi)``, ``None`` where it has no pair."""

    own_start: int
    reads: Sequence[tuple[int, int, int] | None]


@dataclass
class Case:
    """Blocks on scattered pages of a NaN-filled pool, and rows that read them.

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

    def table(self) -> BlockTable:
        """One entry a block, with all rows from its first reader to its last."""
        width = max([1, *map(len, self.pages)])
        columns: dict[str, list[Any]] = {name: [] for name in ("pages", "first", "num", "pair")}
        deltas: list[int] = []
        lo: list[int] = []
        hi: list[int] = []
        for entry, pages in enumerate(self.pages):
            reading = [i for i, row in enumerate(self.rows) if row.reads[entry] is not None]
            span = range(reading[0], reading[-1] + 1) if reading else range(0)
            columns["pages"].append(pages + [0] * (width - len(pages)))
            columns["first"].append(span.start)
            columns["num"].append(len(span))
            columns["pair"].append(len(deltas))
            for row in span:
                delta, low, high = self.rows[row].reads[entry] or (0, 0, 0)
                deltas.append(delta)
                lo.append(low)
                hi.append(high)
        angle = torch.tensor(deltas, dtype=torch.float64)[:, None] * self.inv_freq

        def ints(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return BlockTable(
            ints(columns["pages"]).reshape(-1, width),
            ints(columns["first"]),
            ints(columns["num"]),
            ints(columns["pair"]),
            ints(lo),
            ints(hi),
            angle.cos().float(),
            angle.sin().float(),
        )

    def run(self, impl: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return block_attention(
            self.q, self.k_pages, self.v_pages, self.table(), scale=self.scale, impl=impl, **options
        )

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

    def check(self, impl: str, **options: Any) -> None:
        self.check_output(*self.run(impl, **options), **options)

    def check_output(self, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        """Hold what an implementation gave to the oracle."""
        assert out.dtype == self.dtype
        assert lse.dtype == torch.float32
        tolerance = TOLERANCE[self.dtype]
        wanted_out, wanted_lse = self.wanted(**options)
        torch.testing.assert_close(out.double(), wanted_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=tolerance, rtol=tolerance)


def ordinary_rows(lengths: Sequence[int], num_rows: int = 3) -> list[Row]:
    """Rows that read all blocks, each in an order of its own; all write to the last one."""
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
