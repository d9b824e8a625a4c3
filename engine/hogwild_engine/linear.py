"""Matrices as callables: plain, prepacked by oneDNN, or of 8-bit whole numbers.

On the CPU a few rows then cost little more than one. The operators are private to torch: each layer
is checked when it is made and stays plain where it cannot be, so that a torch without them loses
speed, not correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from hogwild_kernels import native

_log = logging.getLogger(__name__)

Quantization = Literal["none", "int8"]

PACKED_ROWS = 4
"""Rows that the packed order is chosen for; others run as well."""

_PACKED_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_INT8_BOUND = 5e-2
_LARGEST = 127
_ZERO = 128


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


class Int8Linear(nn.Module):
    """``x @ weight.T + bias`` over whole numbers of 8 bits: a scale for each row of the weight, and
    one for each row of ``x``, found as it comes.

    Columns of ``x`` that reach far would leave the others few steps: part of their reach goes to
    the weight (SmoothQuant, arXiv 2211.10438, with exponent 1/2).

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
        reach: how far each column of ``x`` goes from zero, ``[in]``; ``None`` for all alike.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, reach: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        exact = weight.detach().float()
        self._factors = torch.ones(self.in_features)
        if reach is not None:
            far = (reach.float() / exact.abs().amax(dim=0).clamp_min(1e-8)).clamp_min(1e-8)
            self._factors = far.rsqrt() * far.log().mean().mul(0.5).exp()
            exact = exact / self._factors
        self._scale = exact.abs().amax(dim=1).clamp_min(1e-12) / _LARGEST
        whole = (exact / self._scale[:, None]).round_().to(torch.int8)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        shape = [PACKED_ROWS, self.in_features]
        self._packed: Any = torch.ops.onednn.qlinear_prepack(whole, shape)
        self._native = native.build_error() is None and not (
            self.in_features % native.LANES or self.out_features % native.LANES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        whole, scales = self._quantize(rows)
        out = torch.ops.onednn.qlinear_pointwise(
            whole,
            1.0,
            _ZERO,
            self._packed,
            self._scale,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return self._finish(out, scales, x.dtype).view(*x.shape[:-1], self.out_features)

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._native:
            whole, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x))
            native.quantize_rows(x.contiguous(), self._factors, whole, scales)
            return whole, scales
        exact = x.float() * self._factors
        scales = exact.abs().amax(dim=1).clamp_min(1e-30) / _LARGEST
        return (exact / scales[:, None]).round_().add_(_ZERO).to(torch.uint8), scales

    def _finish(self, x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._native:
            out = torch.empty(x.shape, dtype=dtype)
            native.unquantize_rows(x, scales, self.bias, out)
            return out
        out = (x * scales[:, None]).to(dtype)
        return out if self.bias is None else out + self.bias


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
    """Pack the plain linear layers of ``model`` in place; their weights are freed.

    Layers that share their weight with another module keep it (tied embeddings), and a packed copy
    stands beside it.

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
        quantization: "int8" makes an `Int8Linear` where it can.
        reach: see `Int8Linear`.
    """
    out_features, in_features = weight.shape
    plain = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_BOUND:
        return plain
    wanted: list[tuple[Any, float]] = [(PackedLinear, _PACKED_BOUND[weight.dtype])]
    if quantization == "int8":
        wanted.insert(0, (partial(Int8Linear, reach=reach), _INT8_BOUND))
    probe = torch.sin(torch.arange(2 * weight.shape[1])).view(2, -1).to(weight.dtype)
    probe = probe if reach is None else (probe * reach).to(weight.dtype)
    exact = plain(probe).float()
    for make, bound in wanted:
        try:
            layer = make(plain.weight, plain.bias)
            error = float((layer(probe).float() - exact).norm() / exact.norm())
        except (AttributeError, RuntimeError, NotImplementedError) as reason:
            _say_once(f"matrices are not packed: {reason}")
            continue
        if error <= bound:
            return layer
        name, shape = type(layer).__name__, tuple(weight.shape)
        _say_once(f"some matrices are no {name}: it is too inexact for them")
        _log.debug("a matrix %s is no %s: error %.2g, bound %.2g", shape, name, error, bound)
    return plain


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
