"""Linear layers with weights that oneDNN has prepacked: on the CPU a few rows then cost little more
than one.

The operators are private to torch. Each layer is checked when it is packed and stays plain where it
cannot be, so that a torch without them loses speed, not correctness.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

_log = logging.getLogger(__name__)

PACKED_ROWS = 4
"""Rows that the packed order is chosen for; others run as well."""

_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a packed copy of the weight.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def pack(model: nn.Module) -> int:
    """Pack the linear layers of ``model`` in place; the plain weights are freed.

    Layers that share their weight with another module keep it (tied embeddings), and a packed copy
    stands beside it.

    Returns:
        How many layers were packed.
    """
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (layer := _packed(child)) is not None:
                setattr(parent, name, layer)
                packed += 1
    return packed


@torch.inference_mode()
def _packed(linear: nn.Linear) -> PackedLinear | None:
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype not in _BOUND:
        return None
    try:
        layer = PackedLinear(weight, linear.bias)
        probe = torch.ones((1, weight.shape[1]), dtype=weight.dtype)
        probe[0, ::3] = -0.5
        wanted, got = linear(probe).float(), layer(probe).float()
    except (AttributeError, RuntimeError) as error:
        _log.warning("a linear layer %s stays plain: %s", tuple(weight.shape), error)
        return None
    if (got - wanted).norm() > _BOUND[weight.dtype] * wanted.norm():
        _log.warning("a linear layer %s stays plain: packed it is inexact", tuple(weight.shape))
        return None
    return layer
