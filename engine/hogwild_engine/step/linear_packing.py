"""The linear layers of a model in the fastest form that gives their numbers.

Each layer is checked when it is made and stays plain where no form will do: a machine without a
compiler, or a torch without oneDNN's private operators, loses speed, not correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from hogwild_engine.step.linear_layers import (
    NativeInt8Linear,
    NativeLinear,
    PackedInt8Linear,
    PackedLinear,
)

_log = logging.getLogger(__name__)

Quantization = Literal["none", "int8"]

_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_INT8_BOUND = 5e-2
_PROBED_ROWS = 7  # one, and as many as go another way


def is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer over numbers as they stand.

    Libraries that quantise keep `nn.Linear` and put another kind of tensor, a hook or a forward of
    their own in it.
    """
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and "forward" not in vars(module)
        and not module._forward_pre_hooks
        and not module._forward_hooks
    )


Reaches = dict[nn.Module, torch.Tensor]
"""How far each column of a linear layer's input goes from zero, ``[in]``, by layer."""


@contextmanager
def measured(model: nn.Module) -> Iterator[Reaches]:
    """Measure the reach of what the linear layers of ``model`` are given inside the block."""
    reaches: Reaches = {}

    def look(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        reach = given[0].detach().abs().flatten(0, -2).amax(dim=0)
        reaches[module] = torch.maximum(reaches[module], reach) if module in reaches else reach

    layers = [module for module in model.modules() if is_plain(module)]
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        yield reaches
    finally:
        for handle in handles:
            handle.remove()


def pack(model: nn.Module, quantization: Quantization, reaches: Reaches) -> int:
    """Put the plain linear layers of ``model`` into their fastest form, in place.

    Weights that the form does not keep are freed. Where another module shares the weight (tied
    embeddings), a copy that the form wants stands beside it.

    Args:
        model: any module.
        quantization: see `matrix`.
        reaches: from `measured`; layers that are not in it count as reaching equally far.

    Returns:
        How many layers were packed.
    """
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not is_plain(child):
                continue
            made = matrix(child.weight, child.bias, quantization, reaches.get(child))
            if not isinstance(made, nn.Linear):
                setattr(parent, name, made)
                packed += 1
    return packed


@torch.inference_mode()
def matrix(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: Quantization,
    reach: torch.Tensor | None = None,
) -> nn.Module:
    """``x @ weight.T + bias`` in the fastest form that gives the plain one's numbers here.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
        quantization: "int8" makes whole numbers of 8 bits where it can.
        reach: see `hogwild_engine.step.linear_layers.Whole.of`.
    """
    out_features, in_features = weight.shape
    plain = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    if weight.device.type != "cpu" or weight.dtype not in _BOUND:
        return plain
    wanted: list[tuple[Any, float]]
    wanted = [(make, _BOUND[weight.dtype]) for make in (NativeLinear, PackedLinear)]
    if quantization == "int8":
        of_bytes = (NativeInt8Linear, PackedInt8Linear)
        wanted = [(partial(make, reach=reach), _INT8_BOUND) for make in of_bytes] + wanted
    probe = torch.sin(torch.arange(_PROBED_ROWS * in_features)).view(-1, in_features)
    probe = (probe if reach is None else probe * reach).to(weight.dtype)
    exact = plain(probe).float()
    for make, bound in wanted:
        try:
            layer = make(plain.weight, plain.bias)
            given = torch.cat([layer(probe[:1]), layer(probe[1:])])
        except (AttributeError, RuntimeError, NotImplementedError) as reason:
            _say_once(f"matrices are not packed: {reason}")
            continue
        except ValueError as reason:
            _log.debug("a matrix is not multiplied in C: %s", reason)
            continue
        error = float((given.float() - exact).norm() / exact.norm())
        if error <= bound:
            return layer
        name, shape = type(layer).__name__, tuple(weight.shape)
        _say_once(f"some matrices are no {name}: it is too inexact for them")
        _log.debug("a matrix %s is no %s: error %.2g, bound %.2g", shape, name, error, bound)
    return plain


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
