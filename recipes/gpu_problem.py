"""Attention problems of any size for `gpu_check.py`: workers that share a long common block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hogwild_kernels import BlockTable, KVScales, Run, block_attention
from hogwild_kernels.reference import quantize

PAGE_SIZE = 32
OPEN_LEN = 57
"""Tokens in each worker's open block."""


class Heads(NamedTuple):
    """How many there are and how long they are. Qwen3-8B has 32, 8 and 128."""

    num_heads: int
    num_kv_heads: int
    dim: int


@dataclass
class Problem:
    """Rows of several workers over a common block and one open block each, in each of some layers.

    Args:
        workers: how many write.
        context: tokens in the common block.
        heads: of the layers.
        rows: new tokens of each worker in the pass.
        layers: layers with storage of their own.
        dtype: of queries and cache.
        device: where all tensors live.
        window: how far a row sees back in each block; ``None`` sees all of it.
        fp8: store keys and values in float8_e4m3fn.
    """

    workers: int
    context: int
    heads: Heads
    rows: int = 1
    layers: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    window: int | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        self.lengths = [self.context] + [OPEN_LEN + self.rows] * self.workers
        counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        order = torch.randperm(sum(counts), dtype=torch.int32)
        self.table = self._table(counts, order)
        shape = (self.layers, sum(counts), PAGE_SIZE, self.heads.num_kv_heads, self.heads.dim)
        self.keys, self.values = (self._normal(*shape) for _ in "kv")
        self.scales: list[KVScales | None] = [None] * self.layers
        if self.fp8:
            self.keys, k_scales = quantize(self.keys)
            self.values, v_scales = quantize(self.values)
            self.scales = [KVScales(*pair) for pair in zip(k_scales, v_scales, strict=True)]
        self.q = self._normal(self.workers * self.rows, self.heads.num_heads, self.heads.dim)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and scales that one layer must read, each once."""
        itemsize = self.keys.dtype.itemsize
        per_head = 2 * self.heads.dim * itemsize + (8 if self.fp8 else 0)
        return sum(self.lengths) * self.heads.num_kv_heads * per_head

    def attend(
        self,
        layer: int,
        impl: str,
        *,
        prefill: str = "same",
        **options: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """The layer's output, ``[T, H, D]``. All workers' rows are long runs for ``prefill``."""
        arguments = (self.q, self.keys[layer], self.values[layer], self.table)
        scale, scales = self.heads.dim**-0.5, self.scales[layer]
        options |= {"scale": scale, "scales": scales, "impl": impl, "prefill": prefill}  # pyright: ignore[reportAssignmentType]
        out, _ = block_attention(*arguments, **options)  # pyright: ignore[reportArgumentType]
        return out

    def _table(self, counts: list[int], order: torch.Tensor) -> BlockTable:
        """All rows read all blocks: their own one up to themselves, the others whole."""
        num_rows, num_blocks = self.workers * self.rows, len(counts)
        pages = torch.zeros((num_blocks, max(counts)), dtype=torch.int32)
        for block, part in enumerate(order.split(counts)):
            pages[block, : len(part)] = part
        row = torch.arange(num_rows)
        hi = torch.tensor(self.lengths)[:, None].repeat(1, num_rows)  # [B, T]
        hi[row // self.rows + 1, row] = OPEN_LEN + 1 + row % self.rows
        lo = torch.zeros_like(hi) if self.window is None else (hi - self.window).clamp(min=0)
        half = self.heads.dim // 2
        delta = torch.randint(-500, self.context + 500, (num_blocks, self.workers))
        delta = delta.repeat_interleave(self.rows, dim=1).flatten()  # one a worker and block
        delta[hi.flatten() == 0] = 0
        angle = delta[:, None].double() * 10_000.0 ** (-torch.arange(half).double() / half)
        cos, sin = (turn.float().to(self.device) for turn in (angle.cos(), angle.sin()))

        def ints(column: torch.Tensor) -> torch.Tensor:
            return column.int().to(self.device)

        return BlockTable(
            pages=ints(pages),
            first_row=ints(torch.zeros(num_blocks)),
            num_rows=ints(torch.full((num_blocks,), num_rows)),
            first_pair=ints(torch.arange(num_blocks) * num_rows),
            lo=ints(lo.flatten()),
            hi=ints(hi.flatten()),
            cos=cos,
            sin=sin,
            runs=tuple(self._runs(num_rows, num_blocks)) if self.window is None else (),
        )

    def _runs(self, num_rows: int, num_blocks: int) -> Iterator[Run]:
        for worker in range(self.workers):
            first = worker * self.rows
            for block in range(num_blocks):
                own = block == worker + 1
                hi = OPEN_LEN + self.rows if own else self.lengths[block]
                window = (-1, 0 if own else -1)
                yield Run(first, self.rows, block, block * num_rows + first, 0, hi, window)
