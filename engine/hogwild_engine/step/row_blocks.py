"""Batch invariance for linear layers of torch: rows go through them in blocks of tested sizes.

torch's operators choose a kernel by the number of rows, and kernels add in different orders. A
block size is usable if a row has the same bits at each place of the block and with each number of
threads; `invariant_sizes` measures which sizes agree with each other. Fewer rows than a block are
padded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import nn

_log = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MAX_PROBE_PRODUCTS = 2**31
_PROBE_ROWS = 256  # of the weight that differ: kernels do not look at values
_FEW_ROWS = 16  # cost as much time as one: the weight is read once

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]


class RowBlocks(nn.Module):
    """A linear layer whose output rows do not depend on the other rows of the input.

    Args:
        linear: maps ``[rows, in]`` to ``[rows, out]``.
        sizes: the numbers of rows that it is called with, from `invariant_sizes`.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self._sizes = sorted(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # operators feel dims and strides too
        if len(rows) in self._sizes:
            return self.linear(rows).view(*x.shape[:-1], -1)
        parts, first = [], 0
        for size in block_sizes(len(rows), self._sizes):
            block = rows[first : first + size]
            missing = size - len(block)
            if missing:
                block = torch.cat([block, block.new_zeros(missing, block.shape[1])])
            out = self.linear(block)
            parts.append(out[: size - missing] if missing else out)
            first += size
        out = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self.linear(rows)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def block_sizes(rows: int, sizes: Sequence[int]) -> Iterator[int]:
    """Split rows into blocks; the last block may be larger than what is left.

    Args:
        rows: to split.
        sizes: of blocks, in ascending order.
    """
    while rows > 0:
        enough = next((size for size in sizes if size >= rows), None)
        if enough is None or (enough > _FEW_ROWS and enough > 1.5 * rows):
            enough = max((size for size in sizes if size <= rows), default=enough)
        assert enough is not None
        yield enough
        rows -= enough


def invariant_sizes(
    make: MakeLinear, shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool
) -> tuple[int, ...]:
    """Return the numbers of rows for which a form of linear layer computes the same bits.

    Args:
        make: makes the form from a weight ``[out, in]`` and a bias.
        shape: of the weight.
        dtype: of the weight and the input.
        has_bias: whether the layer has a bias.
    """
    threads = tuple(sorted({1, 2, os.cpu_count() or 1, torch.get_num_threads()}))
    return _invariant_sizes(make, shape, dtype, has_bias, threads)


@cache
@torch.inference_mode()
def _invariant_sizes(
    make: MakeLinear,
    shape: tuple[int, int],
    dtype: torch.dtype,
    has_bias: bool,
    threads: tuple[int, ...],
) -> tuple[int, ...]:
    weight, x = _cancelling(shape, dtype)
    linear = make(weight, torch.zeros(shape[0], dtype=dtype) if has_bias else None)
    most = max(1, _MAX_PROBE_PRODUCTS // weight.numel())
    agreeing: dict[bytes, list[int]] = {}
    before = torch.get_num_threads()
    try:
        for size in (size for size in _SIZES if size <= most):
            outs = []
            for count in threads:
                torch.set_num_threads(count)
                outs.append(linear(x.expand(size, -1).contiguous()).contiguous().view(torch.uint8))
            if all(torch.equal(out, outs[0][:1].expand_as(out)) for out in outs):
                agreeing.setdefault(outs[0][0].numpy().tobytes(), []).append(size)
    finally:
        torch.set_num_threads(before)
    sizes = max(agreeing.values(), key=len, default=[])
    _log.debug("%s %s %s: blocks of %s rows", make, shape, dtype, sizes)
    if not sizes:
        _log.warning(
            "a linear layer %s in %s is not batch invariant: results may depend on the batch and "
            "on the number of threads",
            shape,
            dtype,
        )
    return tuple(sizes or (1,))


def _cancelling(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and a row whose products add up to zero: rounding errors are left.

    They show the order of the sums, which rounding to bfloat16 would hide otherwise.
    """
    columns, width = shape
    generator = torch.Generator().manual_seed(0)

    def values(*size: int) -> torch.Tensor:
        exponents = torch.randint(-5, 6, size, generator=generator).float()
        return torch.randn(size, generator=generator) * torch.exp2(exponents)

    half, rows = width // 2, min(columns, _PROBE_ROWS)
    order = torch.randperm(width, generator=generator)
    rest = torch.zeros(rows, width - 2 * half)
    weight = values(rows, half)
    weight = torch.cat([weight, -weight, rest], dim=1).to(dtype)[:, order]
    x = values(half).to(dtype)
    x = torch.cat([x, x, rest[0].to(dtype)])[order]
    return weight.repeat(-(-columns // rows), 1)[:columns].contiguous(), x
