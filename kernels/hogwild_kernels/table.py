"""The table that says which query rows read which cached keys, and at which extra rotation; the
scales of a cache in fp8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class KVScales(NamedTuple):
    """Factors that turn stored fp8 numbers into keys and values, one a (token, head).

    Args:
        keys: float32 ``[num_pages, page_size, KH]``, of all layers ``[L, num_pages, page_size,
            KH]``.
        values: the same, with the same strides.
    """

    keys: torch.Tensor
    values: torch.Tensor


class BlockRead(NamedTuple):
    """One appearance of a block in the views of consecutive query tokens, as plain integers.

    ``deltas``, ``hi`` and ``offsets`` are parallel: item ``i`` belongs to query token
    ``first_row + i``.

    Args:
        pages: page numbers of the block, in order.
        first_row: the first query token of the lists.
        deltas: how far the reader's own block starts behind this one in the reader's view: the
            extra rotation of its query.
        hi: one past the last visible token; 0 if the query token does not read the block.
        offsets: distance in the view from the block's first token to the query token, for sliding
            windows.
    """

    pages: list[int]
    first_row: int
    deltas: list[int]
    hi: list[int]
    offsets: list[int]


class Run(NamedTuple):
    """Consecutive rows that read one block alike: what attention over long sequences takes at once.

    All rows are turned by the same angle, and each sees at least one token. Row ``i`` of the run
    stands at token ``hi - num_rows + i``, its diagonal.

    Args:
        first_row: the first row.
        num_rows: how many they are.
        entry: the entry of the table that they read.
        first_pair: the pair of the first row.
        lo: first token that any of them sees.
        hi: one past the last token that any of them sees.
        window: how many tokens before and after its diagonal a row sees; -1 for all from ``lo`` on,
            and for all up to ``hi``. Not (some, all) where there are more rows than tokens.
    """

    first_row: int
    num_rows: int
    entry: int
    first_pair: int
    lo: int
    hi: int
    window: tuple[int, int]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """What every row of one pass reads, as tensors.

    Entry ``b`` is one appearance of a block in the views of a run of consecutive rows. Row
    ``first_row[b] + i`` owns *pair* ``first_pair[b] + i`` and sees the block's tokens ``lo <= j <
    hi`` of that pair; ``hi <= lo`` means that the row does not see the block. A block that stands
    twice in a view has two entries.

    The query of a pair is rotated by ``cos``/``sin`` before it meets the block's keys: dims ``(d, d
    + D/2)`` form rotation pair ``d``. Dims that the model does not rotate have ``cos`` 1 and
    ``sin`` 0.

    Args:
        pages: page numbers of each entry's block, in order, padded with 0. int32 ``[B,
            max_pages]``.
        first_row: first row that reads the entry. int32 ``[B]``.
        num_rows: how many rows from there on have a pair. int32 ``[B]``.
        first_pair: the pair of ``first_row``. int32 ``[B]``.
        lo: first visible token of each pair. int32 ``[N]``.
        hi: one past the last visible token of each pair. int32 ``[N]``.
        cos: cosines of the extra rotation, float32 ``[N, D/2]``.
        sin: sines of the extra rotation, float32 ``[N, D/2]``.
        runs: long runs of rows, where the host knows of any: all that the columns say of these
            rows, said once more in plain numbers.
        num_active: how many rows see anything, where the host knows that others do not.
    """

    pages: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    first_pair: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    runs: tuple[Run, ...] = ()
    num_active: int | None = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What an implementation computed from the table, kept so that it is computed once a pass, not
    once a layer.
    """

    @property
    def num_pairs(self) -> int:
        return self.lo.shape[0]

    def row_of_pair(self) -> torch.Tensor:
        """The query row of each pair, int64 ``[N]``."""
        offset = (self.first_row - self.first_pair).long()
        return self._of_pair(offset) + torch.arange(self.num_pairs, device=self.lo.device)

    def entry_of_pair(self) -> torch.Tensor:
        """The entry of each pair, int64 ``[N]``."""
        return self._of_pair(torch.arange(self.pages.shape[0], device=self.lo.device))

    def _of_pair(self, of_entry: torch.Tensor) -> torch.Tensor:
        # With the size given, torch need not wait for the device to add up the repeats.
        repeats = self.num_rows.long()
        return torch.repeat_interleave(of_entry, repeats, output_size=self.num_pairs)
