"""Which query token reads which cached block, and how far its query is rotated for it.

`BlockRead` holds plain integers, `BlockTable` the same as tensors on the device that attends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_MAX_INT32 = 2**31 - 1


class BlockRead(NamedTuple):
    """One appearance of a block in the views of consecutive query tokens, as plain integers.

    Keys are cached with RoPE at positions local to their block: a block's first token has position
    0 wherever the block appears in a view. A query is rotated at its position in the block it
    belongs to, and by *delta* more when it reads another block::

        delta = start of the query's own block in the view - start of the block it reads

    For example, Alice's view is a common block of 100 tokens, Bob's open paragraph of 7 tokens,
    a separator of 2 tokens, and Alice's own block::

        block        start in Alice's view   delta
        common                           0   109 - 0   = 109
        Bob                            100   109 - 100 =   9
        separator                      107   109 - 107 =   2
        Alice                          109   109 - 109 =   0

    In her view, Alice's token 3 is at 109 + 3 = 112, Bob's token 5 at 100 + 5 = 105: 7 apart. Her
    query is rotated by 3 + delta 9 = 12, Bob's key by 5: again 7 apart. RoPE scores depend only on
    the distance, so one cached copy of Bob's key serves every view.

    ``deltas``, ``hi`` and ``offsets`` are parallel: item ``i`` belongs to query token
    ``first_row + i``.

    Args:
        pages: page numbers of the block, in order.
        first_row: the first query token of the lists.
        deltas: extra rotation of each query, in positions.
        hi: one past the last visible token; 0 if the query token does not read the block.
        offsets: distance in the view from the block's first token to the query token, for sliding
            windows. Alice's token 3 has offset 112 in the common block and 12 in Bob's.
    """

    pages: list[int]
    first_row: int
    deltas: list[int]
    hi: list[int]
    offsets: list[int]

    def lo(self, window: int | None) -> list[int]:
        """Return the first token of the block inside each query token's sliding window."""
        if window is None:
            return [0] * len(self.hi)
        return [max(0, offset - window + 1) for offset in self.offsets]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """What every query token of a batch reads in the layers of one kind, as tensors.

    Row ``b`` of the first four tensors is one `BlockRead`. Query token ``first_row[b] + i`` and
    that block form the *pair* ``first_pair[b] + i``; it sees the block's tokens ``lo <= j < hi``,
    none if ``hi <= lo``. A block that appears twice in a view has two block reads.

    The query of a pair is rotated by ``cos``/``sin`` before it meets the block's keys: dims ``(d, d
    + D/2)`` form rotation pair ``d``. Dims that the model does not rotate have ``cos`` 1 and
    ``sin`` 0.

    B block reads, N pairs of (query token, block).

    Args:
        pages: page numbers of each block, in order, padded with 0. int32 ``[B, max_pages]``.
        first_row: the first query token that reads the block. int32 ``[B]``.
        num_rows: how many query tokens from there on have a pair. int32 ``[B]``.
        first_pair: the pair of ``first_row``. int32 ``[B]``.
        lo: first visible token of each pair. int32 ``[N]``.
        hi: one past the last visible token of each pair. int32 ``[N]``.
        cos: cosines of the extra rotation, float32 ``[N, D/2]``.
        sin: sines of the extra rotation, float32 ``[N, D/2]``.
        reads: the integers that the tensors were made from. ``None`` for tables that are padded to
            a fixed size, for CUDA graphs: only Triton and the reference, which read the tensors,
            run on those.
        window: the sliding window of these layers in tokens; ``None`` if they see everything.
        long_rows: query tokens of long prompt chunks, which a prefill backend may serve.
        num_active: how many query tokens see anything, if fewer than all.
    """

    pages: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    first_pair: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    reads: tuple[BlockRead, ...] | None = None
    window: int | None = None
    long_rows: tuple[range, ...] = ()
    num_active: int | None = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What backends computed from the table, kept so that layers share it."""

    def __post_init__(self) -> None:
        if self.long_rows and self.reads is None:
            raise ValueError("reads: wanted the block reads of long_rows, got None; pass both")

    @property
    def num_pairs(self) -> int:
        return self.lo.shape[0]

    def checked_reads(self, num_rows: int, num_pages: int, page_size: int) -> tuple[BlockRead, ...]:
        """Return ``reads`` after checking that they stay inside the tensors.

        Args:
            num_rows: query tokens of the batch.
            num_pages: pages of the cache.
            page_size: tokens a page holds.

        Raises:
            IndexError: a query token, a visible token or a page lies outside, or ``reads`` is
                ``None``.
        """
        if self.reads is None:
            raise IndexError(
                "table.reads: wanted the block reads as integers, got None; "
                "use the backend 'triton' or 'reference' for padded tables"
            )
        for number, read in enumerate(self.reads):
            if not _is_inside(read, num_rows, num_pages, page_size):
                raise IndexError(
                    f"table.reads[{number}]: wanted {num_rows} query tokens, {num_pages} pages and "
                    f"{page_size} tokens a page at most, got indices outside of them"
                )
        sizes = len(self.reads), sum(len(read.hi) for read in self.reads)
        wanted = len(self.pages), len(self.cos)
        if sizes != wanted:
            raise IndexError(f"table.reads: wanted {wanted} block reads and pairs, got {sizes}")
        return self.reads

    def row_of_pair(self) -> torch.Tensor:
        """Return the query token of each pair, int64 ``[N]``."""
        offset = (self.first_row - self.first_pair).long()
        return self._of_pair(offset) + torch.arange(self.num_pairs, device=self.lo.device)

    def read_of_pair(self) -> torch.Tensor:
        """Return the block read of each pair, int64 ``[N]``."""
        return self._of_pair(torch.arange(self.pages.shape[0], device=self.lo.device))

    def _of_pair(self, of_read: torch.Tensor) -> torch.Tensor:
        # With output_size, torch need not wait for the device to add up the repeats.
        repeats = self.num_rows.long()
        return torch.repeat_interleave(of_read, repeats, output_size=self.num_pairs)


def _is_inside(read: BlockRead, num_rows: int, num_pages: int, page_size: int) -> bool:
    pages, first, deltas, hi, offsets = read
    return (
        len(deltas) == len(hi) == len(offsets)
        and 0 <= first <= num_rows - len(hi)
        and 0 <= min(pages, default=0) <= max(pages, default=0) < num_pages
        and 0 <= min(hi, default=0) <= max(hi, default=0) <= len(pages) * page_size
        and max(offsets, default=0) <= _MAX_INT32
    )
