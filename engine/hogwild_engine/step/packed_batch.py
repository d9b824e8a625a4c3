"""A batch as one tensor of integers: one copy brings it to a device, and its parts are views.

Parts may be longer than the batch needs. Padding reads nothing and writes nothing, so that steps of
different sizes can share one CUDA graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from hogwild_engine.cache.rope import Rotation
from hogwild_engine.step.batch import Batch
from hogwild_kernels.table import BlockTable


class Sizes(NamedTuple):
    """How many query tokens, wanted logits, block reads, pages of one block, and pairs of a query
    token with a block.
    """

    query_tokens: int
    logits: int
    reads: int
    pages: int
    pairs: int

    @classmethod
    def of(cls, batch: Batch) -> Sizes:
        """Return the sizes that the batch needs."""
        return cls(
            query_tokens=len(batch.tokens),
            logits=max(1, len(batch.logit_indices)),
            reads=len(batch.reads),
            pages=max(len(read.pages) for read in batch.reads),
            pairs=sum(len(read.hi) for read in batch.reads),
        )


class Packed(NamedTuple):
    """A batch's parts on one device; see `Batch` and `BlockRead` for what they mean. The first
    four are int64, the rest int32.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_indices: torch.Tensor
    pages: torch.Tensor  # [reads, pages]
    first_row: torch.Tensor
    num_rows: torch.Tensor
    first_pair: torch.Tensor
    deltas: torch.Tensor
    lo: torch.Tensor  # 0; sliding windows raise it
    hi: torch.Tensor
    offsets: torch.Tensor

    def table(
        self, rotation: Rotation, window: int | None, batch: Batch | None = None
    ) -> BlockTable:
        """Return what layers with this rotation and window read.

        Args:
            rotation: of these layers.
            window: their sliding window.
            batch: the batch that was packed; ``None`` if it was padded.
        """
        lo = self.lo
        if window is not None:
            lo = (self.offsets - window + 1).clamp(min=0)
        cos, sin = rotation.table(self.deltas)
        ints = (self.pages, self.first_row, self.num_rows, self.first_pair, lo, self.hi)
        reads, long_rows = (tuple(batch.reads), tuple(batch.long_chunks)) if batch else (None, ())
        return BlockTable(*ints, cos=cos, sin=sin, reads=reads, window=window, long_rows=long_rows)


def pack(batch: Batch, sizes: Sizes) -> torch.Tensor:
    """Return the batch as one int64 tensor on the CPU, its parts padded to ``sizes``."""
    reads = batch.reads
    counts = [len(read.hi) for read in reads]
    first_pair = list(accumulate(counts, initial=0))
    if len(reads) < sizes.reads:
        counts.append(sizes.pairs - first_pair[-1])  # the first padding read has the spare pairs
    numbers = array("q")

    def add(part: Sequence[int], size: int, fill: int = 0) -> None:
        numbers.extend(part)
        numbers.extend(array("q", [fill]) * (size - len(part)))

    add(batch.tokens, sizes.query_tokens)
    add(batch.positions, sizes.query_tokens)
    add(batch.slots, sizes.query_tokens, fill=-1)
    add(batch.logit_indices or [len(batch.tokens) - 1], sizes.logits)
    for read in reads:
        add(read.pages, sizes.pages)
    add((), (sizes.reads - len(reads)) * sizes.pages)
    add([read.first_row for read in reads], sizes.reads)
    add(counts, sizes.reads)
    add(first_pair[: sizes.reads], sizes.reads)
    add([delta for read in reads for delta in read.deltas], sizes.pairs)
    add((), sizes.pairs)
    add([hi for read in reads for hi in read.hi], sizes.pairs)
    add([offset for read in reads for offset in read.offsets], sizes.pairs)
    return torch.frombuffer(numbers, dtype=torch.int64)


def unpack(numbers: torch.Tensor, sizes: Sizes) -> Packed:
    """Return views of the parts that `pack` concatenated."""
    tokens, logits, reads, pages, pairs = sizes
    indices = [tokens, tokens, tokens, logits]
    columns = [reads * pages, reads, reads, reads, pairs, pairs, pairs, pairs]
    *parts, rest = numbers.split([*indices, sum(columns)])
    packed = Packed(*parts, *rest.int().split(columns))
    return packed._replace(pages=packed.pages.view(reads, pages))
