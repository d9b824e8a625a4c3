"""Choose tile sizes of a launch from shapes. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and launch options of the split kernel.

    Args:
        block_m: rows of a tile, (query token, query head of the group) packed; a power of two of
            at least 16.
        block_n: keys of a tile; a power of two of at least 16.
        num_warps: warps per program.
        num_stages: pipeline depth of the loads.
        programs_per_sm: programs to be resident on one multiprocessor.
        min_tiles: fewest token tiles that are worth a program and its partial output.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int


def heads_per_tile(group: int, block_m: int) -> int:
    """Return how many query heads of a group share a row tile; larger groups are split."""
    return min(group, block_m)


def choose(num_rows: int, group: int, dim: int, itemsize: int) -> Config:
    """Return a configuration whose kernel spills no registers.

    `tests/harness/kernel_budget.json` holds the registers and shared memory of each.

    Args:
        num_rows: T.
        group: query heads per key/value head.
        dim: D.
        itemsize: bytes of the dtype that products are computed in.
    """
    padded = 1 << (dim - 1).bit_length()
    width = padded * itemsize
    largest = 128 if width <= 256 else 64 if width <= 512 else 32
    packed = num_rows * group
    block_m = next(size for size in (16, 32, 64, 128) if size >= min(packed, largest))
    block_n = max(16, min(64, 16_384 // width) // (2 if itemsize > 2 else 1))
    if block_m == 128 and dim < padded:
        block_n = 32
    return Config(
        block_m,
        block_n,
        num_warps=4 if block_m <= 32 and padded <= 128 else 8,
        # Loads of keys depend on loads of page numbers: five stages are two buffers, four are one.
        num_stages=4 if width > 256 and block_m == 64 else 5,
        programs_per_sm=2 if block_m <= 32 else 1,
        min_tiles=max(256, 8 * block_m) // block_n,
    )
