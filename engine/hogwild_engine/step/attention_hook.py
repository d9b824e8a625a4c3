"""The attention function that transformers calls in place of its own.

Queries and keys arrive rotated at block-local positions. New keys and values are written to their
pages before anything is read, so that all workers of a step see each other's current token.
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
"""Registered for attention only: without a mask function of this name, no mask is built."""


@dataclass
class StepTensors:
    """What the layers of one step read.

    Args:
        cache: keys, values and attention backends of all layers.
        slots: where each query token's key and value are written, int64 ``[T]``, one per device.
        tables: one table per layer.
    """

    cache: KVCache
    slots: dict[torch.device, torch.Tensor]
    tables: list[BlockTable]


@dataclass
class RopeProbe:
    """Takes the place of `StepTensors`: records each layer's arguments in place of attention."""

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
    """Attend in one layer. query ``[1, H, T, D]``, key and value ``[1, KH, T, D]``.

    Returns:
        ``[1, T, H, D]``, and ``None`` for the weights.
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
    """Register the function with transformers under `ATTENTION_NAME`; repeating it is harmless."""
    AttentionInterface.register(ATTENTION_NAME, attention)
