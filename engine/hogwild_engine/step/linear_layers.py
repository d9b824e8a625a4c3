"""Linear layers as modules that are faster than `nn.Linear` on the CPU, in floats and in int8.

With a few rows of input they take hardly longer than with one. The native forms are batch
invariant (`hogwild_kernels.cpu.matrix`); `row_blocks` makes oneDNN's so. oneDNN's operators are
private to torch: `linear_packing` tests each layer that it makes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hogwild_kernels.cpu import matrix

PACKED_ROWS = 4
"""Rows of input that oneDNN chooses its weight layout for; others run as well."""

_INT8_MAX = 127
_UINT8_ZERO_POINT = 128


class NativeLinear(nn.Module):
    """``x @ weight.T + bias`` in C.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU.
        bias: ``[out]`` or ``None``.
        share: keep the weight itself, which another module reads too; see `matrix.Matrix`.

    Raises:
        ValueError: the C code does not take this weight here.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, share: bool = False
    ) -> None:
        super().__init__()
        self.matrix = matrix.Matrix(weight.detach(), bias, share=share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x)


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a copy of the weight in oneDNN's layout.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._bias = bias
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class Int8Weight(NamedTuple):
    """A weight quantized to int8: ``weight ~ values * scale[:, None] * smoothing``.

    Attributes:
        values: int8 ``[out, in]``.
        scale: of each output channel, float32 ``[out]``.
        smoothing: factors for the input channels: ``x`` is multiplied by them, float32 ``[in]``.
    """

    values: torch.Tensor
    scale: torch.Tensor
    smoothing: torch.Tensor

    @classmethod
    def quantize(cls, weight: torch.Tensor, absmax: torch.Tensor | None) -> Int8Weight:
        """Quantize by SmoothQuant (arXiv 2211.10438) with exponent 1/2.

        An input channel with outliers would leave the other channels of ``x`` few of the 255 steps:
        part of its range moves to the weight.

        Args:
            weight: ``[out, in]``.
            absmax: largest activation of each input channel, ``[in]``; ``None``: no smoothing.
        """
        exact = weight.detach().float()
        smoothing = torch.ones(weight.shape[1])
        if absmax is not None:
            ratio = (absmax.float() / exact.abs().amax(dim=0).clamp_min(1e-8)).clamp_min(1e-8)
            smoothing = ratio.rsqrt() * ratio.log().mean().mul(0.5).exp()  # geometric mean: 1
            exact = exact / smoothing
        scale = exact.abs().amax(dim=1).clamp_min(1e-12) / _INT8_MAX
        return cls((exact / scale[:, None]).round_().to(torch.int8), scale, smoothing)


class NativeInt8Linear(nn.Module):
    """``x @ weight.T + bias`` in C with an int8 weight and int8 activations.

    The weight has a scale for each output channel; each row of ``x`` is quantized when it arrives.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
        absmax: see `Int8Weight.quantize`.

    Raises:
        ValueError: the C code does not take this weight here.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, absmax: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        values, scale, smoothing = Int8Weight.quantize(weight, absmax)
        self.matrix = matrix.Matrix(values, bias, scale, smoothing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x)


class PackedInt8Linear(nn.Module):
    """The same as `NativeInt8Linear` through oneDNN.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
        absmax: see `Int8Weight.quantize`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, absmax: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._bias = bias
        values, self._scale, self._smoothing = Int8Weight.quantize(weight, absmax)
        self._zero_points = torch.zeros(len(values), dtype=torch.int64)
        shape = [PACKED_ROWS, values.shape[1]]
        self._packed: Any = torch.ops.onednn.qlinear_prepack(values, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.reshape(-1, x.shape[-1]).float() * self._smoothing
        scales = exact.abs().amax(dim=1).clamp_min(1e-30) / _INT8_MAX
        quantized = (exact / scales[:, None]).round_().add_(_UINT8_ZERO_POINT).to(torch.uint8)
        x_qparams = (1.0, _UINT8_ZERO_POINT)
        weight = (self._packed, self._scale, self._zero_points)
        output = (1.0, 0, torch.float32)  # the scale of each row follows below
        out = torch.ops.onednn.qlinear_pointwise(
            quantized, *x_qparams, *weight, None, *output, "none", [], ""
        )
        out = (out * scales[:, None]).to(x.dtype).view(*x.shape[:-1], -1)
        return out if self._bias is None else out + self._bias
