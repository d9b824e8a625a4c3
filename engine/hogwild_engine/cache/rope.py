"""Rotary position embeddings (RoPE, arXiv 2104.09864): one layer's rotation, its cos and sin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

MIN_CACHED_POSITIONS, MAX_CACHED_POSITIONS = 1024, 1 << 16
"""Bounds on the rows of a cached table: 32 MB at most with 128 dims a head."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer: pair ``i`` rotates by the angle ``position * inv_freq[i]``.

    Args:
        inv_freq: one inverse frequency for each rotated pair; empty if the layer does not rotate.
        head_dim: D.
        interleaved: pairs are dims ``(2i, 2i + 1)``, not ``(i, i + len(inv_freq))``.
        sign: -1 if the model rotates in the opposite direction.
    """

    inv_freq: tuple[float, ...]
    head_dim: int
    interleaved: bool = False
    sign: int = 1

    @cached_property
    def permutation(self) -> tuple[int, ...] | None:
        """The order of dims in which pair ``i`` is ``(i, i + D/2)``; ``None`` if no change."""
        pairs, half = len(self.inv_freq), self.head_dim // 2
        if self.interleaved:
            first, second = range(0, 2 * pairs, 2), range(1, 2 * pairs, 2)
        else:
            first, second = range(pairs), range(pairs, 2 * pairs)
        rest = range(2 * pairs, self.head_dim)
        split = half - pairs
        order = (*first, *rest[:split], *second, *rest[split:])
        return None if order == tuple(range(self.head_dim)) else order

    def table(
        self, deltas: Sequence[int] | torch.Tensor, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for a rotation by each delta, float32 ``[N, D/2]``.

        Their columns are the pairs ``(i, i + D/2)`` of dims in permuted order; see `permutation`.

        Args:
            deltas: positions, or differences of positions, ``[N]``.
            device: that of ``deltas`` if ``None``.
        """
        deltas = torch.as_tensor(deltas, device=device)
        if len(deltas) and deltas.device.type == "cpu":
            try:
                return self._cached.lookup(deltas)
            except IndexError:  # negative, or beyond the cached positions
                self._cached.grow(int(deltas.max()))
        return self.compute(deltas)

    @cached_property
    def _cached(self) -> _CachedTable:
        return _CachedTable(self)

    def compute(self, deltas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as `table` without a look-up."""
        angles = deltas.double()[:, None] * _frequencies(self, deltas.device)
        return angles.cos().float(), angles.sin().float()


class _CachedTable:
    """cos and sin for positions 0, 1, 2 … on the CPU: forward steps need the same few rows."""

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._table = rotation.compute(torch.arange(MIN_CACHED_POSITIONS))

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of ``positions``.

        Raises:
            IndexError: a position is negative or not in the table.
        """
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def grow(self, position: int) -> None:
        """Extend the table to hold ``position``, unless it is too large to cache."""
        size = 1 << position.bit_length()
        if len(self._table[0]) < size <= MAX_CACHED_POSITIONS:
            self._table = self._rotation.compute(torch.arange(size))


# Copying a small tensor to a device in every step would wait for the device: cache the copies.


@lru_cache
def _frequencies(rotation: Rotation, device: torch.device) -> torch.Tensor:
    padded = torch.zeros(rotation.head_dim // 2, dtype=torch.float64)
    padded[: len(rotation.inv_freq)] = torch.tensor(rotation.inv_freq, dtype=torch.float64)
    return (padded * rotation.sign).to(device)


@lru_cache
def _index(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(order, device=device)


def permute(x: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Reorder the last dim of ``x``; see `Rotation.permutation`."""
    return x if order is None else x.index_select(-1, _index(order, x.device))
