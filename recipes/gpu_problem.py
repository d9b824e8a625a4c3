"""Attention problems of any size for `gpu_check.py`: workers that share a long common block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hogwild_kernels.api import AttentionBackend
from hogwild_kernels.table import BlockRead, BlockTable

PAGE_SIZE = 32
OPEN_LEN = 57
"""Tokens in each worker's open block."""


class Heads(NamedTuple):
    """Query heads, key/value heads and head dim. Qwen3-8B has 32, 8 and 128."""

    num_heads: int
    num_kv_heads: int
    dim: int


@dataclass
class Problem:
    """Query tokens of several workers over a common block and one open block each.

    Args:
        workers: how many write.
        context: tokens in the common block.
        heads: of the layers.
        rows: new tokens of each worker in the batch.
        layers: layers with storage of their own.
        dtype: of queries and cache.
        device: where all tensors live.
        window: tokens that a query token sees back in each block; ``None`` sees all of it.
    """

    workers: int
    context: int
    heads: Heads
    rows: int = 1
    layers: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    window: int | None = None

    def __post_init__(self) -> None:
        self.lengths = [self.context] + [OPEN_LEN + self.rows] * self.workers
        counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        order = torch.randperm(sum(counts), dtype=torch.int32)
        self.table = self._table(counts, order)
        shape = (self.layers, sum(counts), PAGE_SIZE, self.heads.num_kv_heads, self.heads.dim)
        self.keys, self.values = (self._normal(*shape) for _ in "kv")
        self.q = self._normal(self.workers * self.rows, self.heads.num_heads, self.heads.dim)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that one layer must read, each once."""
        per_head = 2 * self.heads.dim * self.keys.dtype.itemsize
        return sum(self.lengths) * self.heads.num_kv_heads * per_head

    def attend(
        self,
        layer: int,
        backend: AttentionBackend,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, ``[T, H, D]``. Each worker's tokens are a long chunk."""
        tensors = self.q, self.keys[layer], self.values[layer], self.table
        scale = self.heads.dim**-0.5
        return backend.attend(*tensors, scale=scale, softcap=softcap, sinks=sinks)[0]

    def _table(self, counts: list[int], order: torch.Tensor) -> BlockTable:
        """Return a table in which all query tokens read all blocks, their own up to themselves."""
        num_rows, num_blocks = self.workers * self.rows, len(counts)
        reads = []
        for block, part in enumerate(order.split(counts)):
            hi = [self.lengths[block]] * num_rows
            if block:
                first = (block - 1) * self.rows
                hi[first : first + self.rows] = range(OPEN_LEN + 1, OPEN_LEN + 1 + self.rows)
            deltas = torch.randint(-500, self.context + 500, (self.workers,))
            deltas = deltas.repeat_interleave(self.rows).tolist()
            # Distances as if each query token stood at the end of the block.
            offsets = [end - 1 for end in hi]
            reads.append(BlockRead(part.tolist(), 0, deltas, hi, offsets))
        pages = torch.nn.utils.rnn.pad_sequence([*order.split(counts)], batch_first=True)
        delta = torch.tensor([delta for read in reads for delta in read.deltas])
        half = self.heads.dim // 2
        angle = delta[:, None].double() * 10_000.0 ** (-torch.arange(half).double() / half)

        def ints(column: list[int]) -> torch.Tensor:
            return torch.tensor(column, dtype=torch.int32, device=self.device)

        chunks = tuple(range(i * self.rows, (i + 1) * self.rows) for i in range(self.workers))
        return BlockTable(
            pages=pages.to(self.device),
            first_row=ints([0] * num_blocks),
            num_rows=ints([num_rows] * num_blocks),
            first_pair=ints([block * num_rows for block in range(num_blocks)]),
            lo=ints([lo for read in reads for lo in read.lo(self.window)]),
            hi=ints([hi for read in reads for hi in read.hi]),
            cos=angle.cos().float().to(self.device),
            sin=angle.sin().float().to(self.device),
            reads=tuple(reads),
            window=self.window,
            long_rows=chunks,
        )
