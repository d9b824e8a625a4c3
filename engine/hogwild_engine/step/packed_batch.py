"""A batch as one tensor of integers: one copy brings it to a device, and its parts are views.

Parts may be longer than the batch needs. Padding reads nothing and writes nothing, so that steps of
different sizes can share one CUDA graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from hogwild_engine.cache.rope import Rotation
from hogwild_engine.step.batch import Batch
from hogwild_kernels import BlockRead, BlockTable, Run


class Sizes(NamedTuple):
    """How many rows, sampled rows, entries, pages of one entry, and pairs of (row, entry)."""

    rows: int
    sampled: int
    entries: int
    pages: int
    pairs: int

    @classmethod
    def of(cls, batch: Batch) -> Sizes:
        """What the batch needs."""
        return cls(
            rows=len(batch.tokens),
            sampled=max(1, len(batch.logit_indices)),
            entries=len(batch.reads),
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
    sampled: torch.Tensor
    pages: torch.Tensor  # [entries, pages]
    first_row: torch.Tensor
    num_rows: torch.Tensor
    first_pair: torch.Tensor
    deltas: torch.Tensor
    lo: torch.Tensor  # 0: windows have yet to narrow it
    hi: torch.Tensor
    offsets: torch.Tensor

    def table(
        self, rotation: Rotation, window: int | None, runs: tuple[Run, ...] = ()
    ) -> BlockTable:
        """What layers with this rotation and window read; ``runs`` are those of the batch."""
        lo = self.lo
        if window is not None:
            lo = (self.offsets - window + 1).clamp(min=0)
        cos, sin = rotation.table(self.deltas)
        ints = (self.pages, self.first_row, self.num_rows, self.first_pair, lo, self.hi)
        return BlockTable(*ints, cos=cos, sin=sin, runs=runs)


def pack(batch: Batch, sizes: Sizes) -> torch.Tensor:
    """The batch's numbers in a row on the CPU, int64, parts padded to ``sizes``."""
    reads = batch.reads
    counts = [len(read.hi) for read in reads]
    first_pair = list(accumulate(counts, initial=0))
    if len(reads) < sizes.entries:
        counts.append(sizes.pairs - first_pair[-1])  # the first entry too many has the spare pairs
    numbers = array("q")

    def add(part: Sequence[int], size: int, fill: int = 0) -> None:
        numbers.extend(part)
        numbers.extend(array("q", [fill]) * (size - len(part)))

    add(batch.tokens, sizes.rows)
    add(batch.positions, sizes.rows)
    add(batch.slots, sizes.rows, fill=-1)
    add(batch.logit_indices or [len(batch.tokens) - 1], sizes.sampled)
    for read in reads:
        add(read.pages, sizes.pages)
    add((), (sizes.entries - len(reads)) * sizes.pages)
    add([read.first_row for read in reads], sizes.entries)
    add(counts, sizes.entries)
    add(first_pair[: sizes.entries], sizes.entries)
    add([delta for read in reads for delta in read.deltas], sizes.pairs)
    add((), sizes.pairs)
    add([hi for read in reads for hi in read.hi], sizes.pairs)
    add([offset for read in reads for offset in read.offsets], sizes.pairs)
    return torch.frombuffer(numbers, dtype=torch.int64)


def unpack(numbers: torch.Tensor, sizes: Sizes) -> Packed:
    """Views of what `pack` put in a row."""
    rows, sampled, entries, pages, pairs = sizes
    indices = [rows, rows, rows, sampled]
    columns = [entries * pages, entries, entries, entries, pairs, pairs, pairs, pairs]
    *parts, rest = numbers.split([*indices, sum(columns)])
    packed = Packed(*parts, *rest.int().split(columns))
    return packed._replace(pages=packed.pages.view(entries, pages))


def runs_of(batch: Batch, window: int | None) -> tuple[Run, ...]:
    """What the query tokens of long chunks read in layers with this window."""
    first_pairs = list(accumulate((len(read.hi) for read in batch.reads), initial=0))
    found: list[Run] = []
    for rows in batch.long_chunks:
        for number, entry in enumerate(batch.reads):
            index = rows.start - entry.first_row
            if 0 <= index < len(entry.hi) and entry.hi[index]:
                hi = entry.hi[index + len(rows) - 1]
                pair = first_pairs[number] + index
                run = Run(rows.start, len(rows), number, pair, 0, hi, (-1, -1))
                found += _runs(run, entry, index, window)
    return tuple(found)


def _runs(run: Run, entry: BlockRead, index: int, window: int | None) -> Iterator[Run]:
    """What is left of a run over a whole block, with rows from ``index`` on, in such a window."""
    first, count, number, pair, _, hi, _ = run
    own = entry.hi[index] < hi
    if window is None:
        yield run._replace(window=(-1, 0 if own else -1))
        return
    start = entry.offsets[index] - window + 1  # of the first row's window; each moves it by one
    if own:
        yield run._replace(lo=max(0, start), window=(window - 1, 0))
        return
    # Told apart: flash-attn takes no window over more rows than keys.
    whole = min(count, max(0, 1 - start))
    if whole:
        yield run._replace(num_rows=whole)
    sliding, lo = min(count, hi - start) - whole, start + whole
    if sliding > 0:
        around = (hi - lo - sliding, -1)
        yield Run(first + whole, sliding, number, pair + whole, lo, hi, around)
