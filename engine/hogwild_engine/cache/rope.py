"""How a model rotates queries and keys: measured on the model, not looked up by its name.

The model is run once on copies of one token with attention switched off. Hidden states are then
equal at all positions, so keys differ by their rotation alone, and each layer's rotation is the
candidate that maps the key at position 0 to the keys at the others. Rotary embeddings: arXiv
2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from hogwild_engine.api.errors import ModelRefusedError

MIN_CACHED_POSITIONS, MAX_CACHED_POSITIONS = 1024, 1 << 16
"""Sizes of a table that is kept of a rotation; 32 MB at most where heads have 128 dims."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer, by angle ``position * inv_freq[i]`` in pair ``i``.

    Args:
        inv_freq: one inverse frequency a rotated pair; empty where the layer does not rotate.
        head_dim: D.
        interleaved: pairs are dims ``(2i, 2i + 1)``, not ``(i, i + len(inv_freq))``.
        sign: -1 where the model turns the other way.
    """

    inv_freq: tuple[float, ...]
    head_dim: int
    interleaved: bool = False
    sign: int = 1

    @cached_property
    def permutation(self) -> tuple[int, ...] | None:
        """Order of dims in which pair ``i`` is ``(i, i + D/2)``; ``None`` where they stand so
        already.
        """
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
        """cos and sin of a turn by each delta, float32 ``[N, D/2]``, for dims in permuted order."""
        turns = torch.as_tensor(deltas, device=device)
        if len(turns) and turns.device.type == "cpu":
            try:
                return self._kept.at(turns)
            except IndexError:  # turned back, or further than any before
                self._kept.reach(turns)
        return self.computed(turns)

    @cached_property
    def _kept(self) -> _KeptTurns:
        return _KeptTurns(self)

    def computed(self, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `table` gives, nothing looked up."""
        known = (self.inv_freq, self.head_dim, self.sign, turns.device)
        angle = turns.double()[:, None] * _frequencies(*known)
        return angle.cos().float(), angle.sin().float()


class _KeptTurns:
    """cos and sin of the turns by 0, 1, 2 … on the CPU, where passes would compute few of them
    many times.
    """

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._table = rotation.computed(torch.arange(MIN_CACHED_POSITIONS))

    def at(self, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the table.

        Raises:
            IndexError: it does not reach that far.
        """
        cos, sin = self._table
        return cos.index_select(0, turns), sin.index_select(0, turns)

    def reach(self, turns: torch.Tensor) -> None:
        """Grow to hold these turns, unless they are too many."""
        wanted = 1 << int(turns.max()).bit_length()
        if len(self._table[0]) < wanted <= MAX_CACHED_POSITIONS:
            self._table = self._rotation.computed(torch.arange(wanted))


@lru_cache
def _frequencies(
    inv_freq: tuple[float, ...], head_dim: int, sign: int, device: torch.device
) -> torch.Tensor:
    # Kept, as below: what is brought to the device anew each pass would wait for the device.
    padded = torch.zeros(head_dim // 2, dtype=torch.float64)
    padded[: len(inv_freq)] = torch.tensor(inv_freq, dtype=torch.float64)
    return (padded * sign).to(device)


def permute(x: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Reorder the last dim of ``x``."""
    return x if order is None else x.index_select(-1, _index(order, x.device))


@lru_cache
def _index(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept, because bringing it to the device would wait for the device.
    return torch.tensor(order, device=device)


def candidates(model: torch.nn.Module, head_dim: int) -> list[Rotation]:
    """Every rotation that the model's own frequency tables allow, and none at all."""
    found: list[Rotation] = [Rotation((), head_dim)]
    for name, buffer in model.named_buffers():
        plain = name.rsplit(".", 1)[-1]
        if not plain.endswith("inv_freq") or "original" in plain:
            continue
        if buffer.dim() != 1 or 2 * buffer.numel() > head_dim:
            continue
        inv_freq = tuple(buffer.double().tolist())
        for interleaved in (False, True):
            for sign in (1, -1):
                rotation = Rotation(inv_freq, head_dim, interleaved, sign)
                if rotation not in found:
                    found.append(rotation)
    return found


def measure(
    keys: Sequence[torch.Tensor], positions: Sequence[int], model: torch.nn.Module, bound: float
) -> list[Rotation]:
    """The rotation of each layer.

    Args:
        keys: each layer's keys of one token at ``positions``, the first of which is 0. ``[T, KH,
            D]``.
        positions: where they stood.
        model: holds the frequency tables.
        bound: largest relative error of a match.

    Raises:
        ModelRefusedError: a layer's keys follow no known rotation.
    """
    rotations = []
    known: dict[int, list[Rotation]] = {}
    for layer, key in enumerate(keys):
        options = known.setdefault(key.shape[-1], candidates(model, key.shape[-1]))
        errors = [_misfit(key.float(), positions, option) for option in options]
        best = min(range(len(options)), key=errors.__getitem__)
        if errors[best] > bound:
            detail = (
                f"keys of layer {layer} follow none of {len(options)} rotations (best relative "
                f"error {errors[best]:.2g}, wanted under {bound:.2g}); use a rotary model"
            )
            raise ModelRefusedError("rotation", detail)
        rotations.append(options[best])
    return rotations


def _misfit(key: torch.Tensor, positions: Sequence[int], rotation: Rotation) -> float:
    key = permute(key.cpu(), rotation.permutation)
    first, second = key[:1].chunk(2, dim=-1)
    cos, sin = (angle[:, None] for angle in rotation.table(positions))
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return float((turned - key).norm() / key.norm())
