"""Replace the linear layers of a model by the fastest batch-invariant form with the same numbers.

Each layer is tested when it is made. A machine without a C compiler, or a torch without oneDNN's
private operators, keeps `nn.Linear`, in blocks of rows, and loses speed, not correctness.
"""

from __future__ import annotations

import logging
from collections import Counter
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
from hogwild_engine.step.row_blocks import MakeLinear, RowBlocks, invariant_sizes

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

    A weight that the form copies is freed, unless another module shares it (tied embeddings): the
    native form reads such a weight in place.

    Args:
        model: any module.
        quantization: see `pack_linear`.
        absmax: from `recorded_absmax`; layers without an entry are quantized without smoothing.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    users = Counter(parameter.data_ptr() for _, parameter in parameters)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child):
                share = users[child.weight.data_ptr()] > 1
                made = pack_linear(
                    child.weight, child.bias, quantization, absmax.get(child), share=share
                )
                if not isinstance(made, nn.Linear):
                    setattr(parent, name, made)


@torch.inference_mode()
def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: Quantization,
    absmax: torch.Tensor | None = None,
    *,
    share: bool = False,
) -> nn.Module:
    """Return ``x @ weight.T + bias`` as the fastest module that computes the same numbers here.

    On the CPU the bits of a row of output depend on that row of ``x`` alone.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
        quantization: "int8" tries the int8 forms first.
        absmax: see `hogwild_engine.step.linear_layers.Int8Weight.quantize`.
        share: another module reads the weight too: a form that keeps it as it is saves memory.
    """
    in_features = weight.shape[1]
    plain = nn_linear(weight, bias)
    if weight.device.type != "cpu":
        return plain
    if weight.dtype not in _BOUND:
        return _in_row_blocks(plain, nn_linear, weight, bias)
    native: Any = partial(NativeLinear, share=share)
    bound = _BOUND[weight.dtype]
    forms: list[tuple[Any, float, bool]] = [(native, bound, True), (PackedLinear, bound, False)]
    if quantization == "int8":
        int8_forms = ((NativeInt8Linear, True), (PackedInt8Linear, False))
        forms = [
            (partial(make, absmax=absmax), _INT8_BOUND, invariant) for make, invariant in int8_forms
        ] + forms
    x = torch.sin(torch.arange(_TEST_ROWS * in_features)).view(-1, in_features)
    x = (x if absmax is None else x * absmax).to(weight.dtype)
    wanted = plain(x).float()
    for make, bound, invariant in forms:
        try:
            layer = make(plain.weight, plain.bias)
            if not invariant:
                layer = _in_row_blocks(layer, type(layer), weight, bias)
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
        form = layer.linear if isinstance(layer, RowBlocks) else layer
        name, shape = type(form).__name__, tuple(weight.shape)
        _warn_once(f"{name} is not used for some matrices: its error is above {bound:.2g}")
        _log.debug("%s for a matrix %s: error %.2g, wanted %.2g", name, shape, error, bound)
    return _in_row_blocks(plain, nn_linear, weight, bias)


def nn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return an `nn.Linear` over a weight ``[out, in]`` and a bias, both kept."""
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return plain


def _in_row_blocks(
    layer: nn.Module, make: MakeLinear, weight: torch.Tensor, bias: torch.Tensor | None
) -> nn.Module:
    """Return ``layer``, which ``make`` makes, as a batch-invariant module."""
    out_features, in_features = weight.shape
    has_bias = bias is not None
    sizes = invariant_sizes(make, (out_features, in_features), weight.dtype, has_bias=has_bias)
    return RowBlocks(layer, sizes)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
