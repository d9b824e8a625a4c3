"""The one attention function that transformers calls in place of its own.

It gets queries and keys already rotated at block-local positions. It writes the new keys and values
to their pages first and reads afterwards, so that all writers of a pass see each other's current
token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from hogwild_engine.api.errors import ModelRefusedError
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.cache.rope import permute
from hogwild_kernels.table import BlockTable

ATTENTION_NAME = "hogwild"
"""Registered for attention only: a name absent from the mask registry makes transformers build no
mask.
"""


@dataclass
class StepTensors:
    """What the layers of one pass read.

    Args:
        cache: where keys and values live.
        slots: where each row's key and value go, int64 ``[T]``, one tensor a device.
        tables: one table a layer.
    """

    cache: KVCache
    slots: dict[torch.device, torch.Tensor]
    tables: list[BlockTable]


@dataclass
class RopeProbe:
    """In place of `StepTensors`: switches attention off and keeps each layer's keys and what else
    it was given.
    """

    keys: list[torch.Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)
    softcaps: list[float | None] = field(default_factory=list)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    hogwild: StepTensors | RopeProbe | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. query ``[1, H, T, D]``, key and value ``[1, KH, T, D]``; returns
    ``[1, T, H, D]``.
    """
    if hogwild is None:
        detail = "a layer keeps the engine's arguments from its attention; use another model"
        raise ModelRefusedError("attention interface", detail)
    if isinstance(hogwild, RopeProbe):
        if value.shape != key.shape:
            detail = (
                f"values have shape {tuple(value.shape)}, keys {tuple(key.shape)}; wanted equal"
            )
            raise ModelRefusedError("attention interface", detail)
        hogwild.keys.append(key[0].transpose(0, 1))
        hogwild.windows.append(sliding_window)
        hogwild.group_sizes.append(query.shape[1] // key.shape[1])
        hogwild.softcaps.append(softcap)
        return torch.zeros_like(query.transpose(1, 2)), None
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    order = hogwild.cache.shapes[layer].rotation.permutation
    k_pages, v_pages = hogwild.cache.layers[layer]
    backend = hogwild.cache.backends[layer]
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    backend.write(permute(k, order), v, k_pages, v_pages, hogwild.slots[k.device])
    out, _lse = backend.attend(
        permute(q, order),
        k_pages,
        v_pages,
        hogwild.tables[layer],
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def register() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, attention)
