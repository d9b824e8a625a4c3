"""A plan as one tensor of integers: one copy brings it to a device, and its parts are views.

Parts may be longer than the plan needs. What pads them reads nothing and writes nothing, so passes
of different plans can share one size, which a CUDA graph wants.
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
    """How many rows, sampled rows, entries, pages of one entry, and pairs of (row, entry)."""

    rows: int
    sampled: int
    entries: int
    pages: int
    pairs: int

    @classmethod
    def of(cls, plan: Batch) -> Sizes:
        """What the plan needs."""
        return cls(
            rows=len(plan.tokens),
            sampled=max(1, len(plan.sampled)),
            entries=len(plan.entries),
            pages=max(len(entry.pages) for entry in plan.entries),
            pairs=sum(len(entry.hi) for entry in plan.entries),
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
        self, rotation: Rotation, window: int | None, plan: Batch | None = None
    ) -> BlockTable:
        """What layers with this rotation and window read.

        Args:
            rotation: of these layers.
            window: their sliding window.
            plan: the batch that was packed; ``None`` if it was padded.
        """
        lo = self.lo
        if window is not None:
            lo = (self.offsets - window + 1).clamp(min=0)
        cos, sin = rotation.table(self.deltas)
        ints = (self.pages, self.first_row, self.num_rows, self.first_pair, lo, self.hi)
        reads, long_rows = (tuple(plan.entries), tuple(plan.long)) if plan else (None, ())
        return BlockTable(*ints, cos=cos, sin=sin, reads=reads, window=window, long_rows=long_rows)


def pack(plan: Batch, sizes: Sizes) -> torch.Tensor:
    """The plan's numbers in a row on the CPU, int64, parts padded to ``sizes``."""
    entries = plan.entries
    counts = [len(entry.hi) for entry in entries]
    first_pair = list(accumulate(counts, initial=0))
    if len(entries) < sizes.entries:
        counts.append(sizes.pairs - first_pair[-1])  # the first entry too many has the spare pairs
    numbers = array("q")

    def add(part: Sequence[int], size: int, fill: int = 0) -> None:
        numbers.extend(part)
        numbers.extend(array("q", [fill]) * (size - len(part)))

    add(plan.tokens, sizes.rows)
    add(plan.positions, sizes.rows)
    add(plan.slots, sizes.rows, fill=-1)
    add(plan.sampled or [len(plan.tokens) - 1], sizes.sampled)
    for entry in entries:
        add(entry.pages, sizes.pages)
    add((), (sizes.entries - len(entries)) * sizes.pages)
    add([entry.first_row for entry in entries], sizes.entries)
    add(counts, sizes.entries)
    add(first_pair[: sizes.entries], sizes.entries)
    add([delta for entry in entries for delta in entry.deltas], sizes.pairs)
    add((), sizes.pairs)
    add([hi for entry in entries for hi in entry.hi], sizes.pairs)
    add([offset for entry in entries for offset in entry.offsets], sizes.pairs)
    return torch.frombuffer(numbers, dtype=torch.int64)


def unpack(numbers: torch.Tensor, sizes: Sizes) -> Packed:
    """Views of what `pack` put in a row."""
    rows, sampled, entries, pages, pairs = sizes
    indices = [rows, rows, rows, sampled]
    columns = [entries * pages, entries, entries, entries, pairs, pairs, pairs, pairs]
    *parts, rest = numbers.split([*indices, sum(columns)])
    packed = Packed(*parts, *rest.int().split(columns))
    return packed._replace(pages=packed.pages.view(entries, pages))
