"""Replace the linear layers of a model by the fastest form that computes the same numbers.

Each layer is tested when it is made. A machine without a C compiler, or a torch without oneDNN's
private operators, keeps `nn.Linear` and loses speed, not correctness.
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
ActivationAbsmax = dict[nn.Module, torch.Tensor]
"""Largest absolute input of each input channel of a linear layer, ``[in]``, by layer."""

_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_INT8_BOUND = 5e-2
_TEST_ROWS = 7  # 1 + 6: test the 1-row and the multi-row path


def is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Return whether a module is nothing but an `nn.Linear` over a float weight.

    Libraries that quantize keep `nn.Linear` and change its tensor type, hooks or ``forward``.
    """
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and "forward" not in vars(module)
        and not module._forward_pre_hooks
        and not module._forward_hooks
    )


@contextmanager
def recorded_absmax(model: nn.Module) -> Iterator[ActivationAbsmax]:
    """Record the absmax of the inputs of all linear layers of ``model`` inside the block."""
    absmax: ActivationAbsmax = {}

    def record(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        new = args[0].detach().abs().flatten(0, -2).amax(dim=0)
        absmax[module] = torch.maximum(absmax.get(module, new), new)

    layers = [module for module in model.modules() if is_plain(module)]
    handles = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        yield absmax
    finally:
        for handle in handles:
            handle.remove()


def pack(model: nn.Module, quantization: Quantization, absmax: ActivationAbsmax) -> None:
    """Replace the plain linear layers of ``model`` by their fastest form, in place.

    A weight that the form copies is freed, unless another module shares it (tied embeddings).

    Args:
        model: any module.
        quantization: see `pack_linear`.
        absmax: from `recorded_absmax`; layers without an entry are quantized without smoothing.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child):
                made = pack_linear(child.weight, child.bias, quantization, absmax.get(child))
                if not isinstance(made, nn.Linear):
                    setattr(parent, name, made)


@torch.inference_mode()
def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: Quantization,
    absmax: torch.Tensor | None = None,
) -> nn.Module:
    """Return ``x @ weight.T + bias`` as the fastest module that computes the same numbers here.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
        quantization: "int8" tries the int8 forms first.
        absmax: see `hogwild_engine.step.linear_layers.Int8Weight.quantize`.
    """
    out_features, in_features = weight.shape
    plain = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    if weight.device.type != "cpu" or weight.dtype not in _BOUND:
        return plain
    forms: list[tuple[Any, float]]
    forms = [(make, _BOUND[weight.dtype]) for make in (NativeLinear, PackedLinear)]
    if quantization == "int8":
        int8_forms = (NativeInt8Linear, PackedInt8Linear)
        forms = [(partial(make, absmax=absmax), _INT8_BOUND) for make in int8_forms] + forms
    x = torch.sin(torch.arange(_TEST_ROWS * in_features)).view(-1, in_features)
    x = (x if absmax is None else x * absmax).to(weight.dtype)
    wanted = plain(x).float()
    for make, bound in forms:
        try:
            layer = make(plain.weight, plain.bias)
            got = torch.cat([layer(x[:1]), layer(x[1:])])
        except (AttributeError, RuntimeError, NotImplementedError) as reason:
            _warn_once(f"matrices are not packed: {reason}")
            continue
        except ValueError as reason:
            _log.debug("a matrix is not multiplied in C: %s", reason)
            continue
        error = float((got.float() - wanted).norm() / wanted.norm())
        if error <= bound:
            return layer
        name, shape = type(layer).__name__, tuple(weight.shape)
        _warn_once(f"{name} is not used for some matrices: its error is above {bound:.2g}")
        _log.debug("%s for a matrix %s: error %.2g, wanted %.2g", name, shape, error, bound)
    return plain


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
