"""Measure what each layer stores and how it rotates (RoPE), instead of trusting a model's name.

The model runs once on copies of one token with attention switched off. All hidden states are then
equal, so the keys at two positions differ only by their rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hogwild_engine.api.errors import ModelRefusedError
from hogwild_engine.cache.kv_cache import LayerShape
from hogwild_engine.cache.rope import Rotation, permute
from hogwild_engine.step import attention_hook

PROBE_POSITIONS = (0, 1, 2, 3, 5, 9, 17, 40)

ROTATION_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative error of a layer's keys against the rotation that is chosen for them."""


def layer_shapes(model: Any, device: torch.device) -> tuple[list[LayerShape], list[int | None]]:
    """Return what each layer stores, and its sliding window.

    Raises:
        ModelRefusedError: a layer does not call transformers' attention interface, or rotates in an
            unknown way.
    """
    probe = attention_hook.RopeProbe()
    config = model.config.get_text_config()
    positions = torch.tensor([PROBE_POSITIONS], device=device)
    ids = torch.full_like(positions, min(100, config.vocab_size - 1))
    model.set_attn_implementation(attention_hook.ATTENTION_NAME)
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, use_cache=False, hogwild=probe)
    if len(probe.keys) != config.num_hidden_layers:
        detail = (
            f"{len(probe.keys)} of {config.num_hidden_layers} layers called the attention "
            "interface; wanted all: use a model whose every layer is attention"
        )
        raise ModelRefusedError("attention interface", detail)
    rotations = match_rotations(probe.keys, model)
    shapes = [
        LayerShape(key.shape[1], key.shape[2], key.device, key.dtype, rotation, group, softcap)
        for key, rotation, group, softcap in zip(
            probe.keys, rotations, probe.group_sizes, probe.softcaps, strict=True
        )
    ]
    return shapes, probe.windows


def match_rotations(keys: Sequence[torch.Tensor], model: torch.nn.Module) -> list[Rotation]:
    """Return each layer's rotation: the candidate that maps the key at position 0 to the others.

    Args:
        keys: each layer's keys of one token at `PROBE_POSITIONS`, ``[T, KH, D]``.
        model: its ``inv_freq`` buffers are the candidates' frequencies.

    Raises:
        ModelRefusedError: no candidate matches a layer's keys.
    """
    rotations = []
    by_dim = {dim: _candidates(model, dim) for dim in {key.shape[-1] for key in keys}}
    for layer, key in enumerate(keys):
        options = by_dim[key.shape[-1]]
        errors = [_relative_error(key.float(), option) for option in options]
        error, best = min(zip(errors, range(len(options)), strict=True))
        bound = ROTATION_BOUND[key.dtype]
        if not error <= bound:  # also true of NaN
            detail = (
                f"keys of layer {layer} follow none of {len(options)} rotations (best relative "
                f"error {error:.2g}, wanted under {bound:.2g}); use a rotary model"
            )
            raise ModelRefusedError("rotation", detail)
        rotations.append(options[best])
    return rotations


def _candidates(model: torch.nn.Module, head_dim: int) -> list[Rotation]:
    """Return no rotation, and each ``inv_freq`` buffer in both pair layouts and directions."""
    found = [Rotation((), head_dim)]
    for name, buffer in model.named_buffers():
        suffix = name.rsplit(".", 1)[-1]
        if not suffix.endswith("inv_freq") or "original" in suffix:
            continue
        if buffer.dim() == 1 and 2 * buffer.numel() <= head_dim:
            inv_freq = tuple(buffer.double().tolist())
            for interleaved in (False, True):
                found += [Rotation(inv_freq, head_dim, interleaved, sign) for sign in (1, -1)]
    return list(dict.fromkeys(found))


def _relative_error(key: torch.Tensor, rotation: Rotation) -> float:
    key = permute(key.cpu(), rotation.permutation)
    first, second = key[:1].chunk(2, dim=-1)
    cos, sin = (part[:, None] for part in rotation.table(PROBE_POSITIONS))
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return float((rotated - key).norm() / key.norm())
