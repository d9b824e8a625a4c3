"""The KV cache: keys and values of all layers, in pages. Knows slots and layers; not readers.

On the CPU storage is head-major, so that a run of consecutive pages is one contiguous slice per
head; on other devices it is page-major. Both are seen as ``[L, num_pages, page_size, KH, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hogwild_engine.cache.pages import PagePool
from hogwild_engine.cache.rope import Rotation
from hogwild_kernels.api import AttentionBackend, AttentionSpec
from hogwild_kernels.backends import choose_backends


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores and how it attends: KH heads of D dims, and its RoPE."""

    num_kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    rotation: Rotation
    group_size: int = 1
    softcap: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        """What the layer asks of an attention backend."""
        return AttentionSpec(self.device, self.dtype, self.head_dim, self.group_size, self.softcap)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class LayerGroup(NamedTuple):
    """Storage of layers of one shape, and the backend that moves tokens in it.

    Keys and values ``[L, num_pages, page_size, KH, D]``.
    """

    shape: LayerShape
    keys: torch.Tensor
    values: torch.Tensor
    backend: AttentionBackend


class KVCache:
    """The page pool with its tensors.

    Args:
        shapes: one entry a layer, in order.
        num_pages: pages in all.
        page_size: tokens a page holds.
        backends: attend, write and move, one a layer; by default those that "auto" chooses.
        keeps_pages: as in `PagePool`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        backends: Sequence[AttentionBackend] | None = None,
        *,
        keeps_pages: bool = False,
    ) -> None:
        specs = [shape.spec for shape in shapes]
        self.backends = list(backends or choose_backends("auto", "auto", specs))
        self.pool = PagePool(num_pages, page_size, keeps_pages=keeps_pages)
        self.shapes = tuple(shapes)
        members: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(shapes):
            members.setdefault(shape, []).append(layer)
        self.groups = [
            LayerGroup(
                shape,
                *_storage(shape, len(layers), num_pages, page_size),
                self.backends[layers[0]],
            )
            for shape, layers in members.items()
        ]
        stored = {
            layer: (group.keys[index], group.values[index])
            for group, layers in zip(self.groups, members.values(), strict=True)
            for index, layer in enumerate(layers)
        }
        self.layers = [stored[layer] for layer in range(len(shapes))]  # keys, values of each

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.bytes_per_token for shape in self.shapes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.pool.num_pages * self.pool.page_size * self.bytes_per_token

    def release(self) -> None:
        """Free the tensors; the numbers of the pool stay. Nothing can be stored afterwards."""
        self.groups, self.layers = [], []

    @torch.inference_mode()
    def move(self, source: Sequence[int], target: Sequence[int], delta: int) -> None:
        """Copy tokens from slot to slot in all layers; their local positions grow by ``delta``."""
        if not source:
            return
        for shape, keys, values, backend in self.groups:
            cos, sin = shape.rotation.table([delta] * len(source), shape.device)
            from_slots, to_slots = (
                torch.tensor(slots, dtype=torch.int64, device=shape.device)
                for slots in (source, target)
            )
            backend.move(keys, values, from_slots, to_slots, cos, sin)


def _storage(
    shape: LayerShape, num_layers: int, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dim = shape.num_kv_heads, shape.head_dim
    made = []
    for _ in range(2):
        if shape.device.type == "cpu":
            size = (num_layers, heads, num_pages, page_size, dim)
            pages = torch.empty(size, dtype=shape.dtype).permute(0, 2, 3, 1, 4)
        else:
            size = (num_layers, num_pages, page_size, heads, dim)
            pages = torch.empty(size, dtype=shape.dtype, device=shape.device)
        made.append(pages)
    return made[0], made[1]
