"""The work list of one batch: every (row tile, block read) with its token tiles, on the device.

Shapes of the list depend only on shapes of the table, so building it never waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hogwild_kernels.cuda.triton_config import Config
from hogwild_kernels.table import BlockTable


class Work(NamedTuple):
    """Token tiles in the order in which programs process them: by row tile, then by block read.

    A *segment* is one (row tile, block read). R row tiles, B block reads.

    Args:
        segments: ``row_tile * B + read``, segments without a visible token last. int32 ``[R * B]``.
        starts: token tiles before each segment, then the total. int32 ``[R * B + 1]``.
        tile_starts: token tiles before each row tile, then the total. int32 ``[R + 1]``.
        share: token tiles per program. int32 ``[1]``.
    """

    segments: torch.Tensor
    starts: torch.Tensor
    tile_starts: torch.Tensor
    share: torch.Tensor


def work_list(
    table: BlockTable, num_rows: int, tile_rows: int, config: Config, num_programs: int
) -> Work:
    """Return the work list for tiles of ``tile_rows`` query tokens, kept on the table."""
    key = ("triton", tile_rows, config.block_n, config.min_tiles, num_programs)
    if key not in table.derived:
        segments, starts, tile_starts = _segments(table, num_rows, tile_rows, config.block_n)
        share = (starts[-1:] + num_programs - 1) // num_programs
        share = share.clamp(min=config.min_tiles)
        table.derived[key] = Work(segments, starts, tile_starts, share)
    return table.derived[key]


def _segments(
    table: BlockTable, num_rows: int, tile_rows: int, block_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tiles, num_reads = -(-num_rows // tile_rows), table.pages.shape[0]
    size = num_tiles * num_reads
    row = table.row_of_pair().clamp(max=num_rows - 1)  # padding pairs point past the last
    segment = row // tile_rows * num_reads + table.read_of_pair()
    visible = table.lo < table.hi
    max_int32 = torch.iinfo(torch.int32).max
    low = torch.full((size,), max_int32, dtype=torch.int32, device=table.lo.device)
    low.scatter_reduce_(0, segment, table.lo.masked_fill(~visible, max_int32), "amin")
    high = torch.zeros_like(low)
    high.scatter_reduce_(0, segment, table.hi.masked_fill(~visible, 0), "amax")
    counts = torch.where(high > 0, (high + block_n - 1) // block_n - low // block_n, 0)
    order = torch.argsort((counts == 0).int(), stable=True)
    by_tile = counts.view(num_tiles, num_reads).sum(dim=1)
    return order.int(), _running_sum(counts[order]), _running_sum(by_tile)


def _running_sum(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
