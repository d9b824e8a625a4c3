"""Matrices as modules: over the weight as it lies, prepacked by oneDNN, or of 8-bit whole numbers.

On the CPU a few rows then cost little more than one. oneDNN's operators are private to torch:
whoever makes a layer checks it (linear.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hogwild_kernels.cpu import matrix

PACKED_ROWS = 4
"""Rows that oneDNN's order is chosen for; others run as well."""

_INT8_MAX = 127
_ZERO = 128


class NativeLinear(nn.Module):
    """``x @ weight.T + bias`` in C, over the weight as it lies.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; kept, not copied.
        bias: ``[out]`` or ``None``.

    Raises:
        ValueError: the C code does not take this weight here.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight, self._bias = weight.detach(), bias
        self.matrix = matrix.Matrix(self._weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.matrix.max_rows * self.matrix.width:
            return nn.functional.linear(x, self._weight, self._bias)
        return self.matrix(x)


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over oneDNN's copy of the weight.

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


class Whole(NamedTuple):
    """A weight in whole numbers of 8 bits: ``weight ~ numbers * scale[:, None] * factors``.

    Attributes:
        numbers: int8 ``[out, in]``.
        scale: of each row, float32 ``[out]``.
        factors: what the columns of ``x`` are multiplied by, float32 ``[in]``.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, reach: torch.Tensor | None) -> Whole:
        """Columns of ``x`` that reach far would leave the others few steps: part of their reach
        goes to the weight (SmoothQuant, arXiv 2211.10438, with exponent 1/2).

        Args:
            weight: ``[out, in]``.
            reach: how far each column of ``x`` goes from zero, ``[in]``; ``None`` for all alike.
        """
        exact = weight.detach().float()
        factors = torch.ones(weight.shape[1])
        if reach is not None:
            far = (reach.float() / exact.abs().amax(dim=0).clamp_min(1e-8)).clamp_min(1e-8)
            factors = far.rsqrt() * far.log().mean().mul(0.5).exp()
            exact = exact / factors
        scale = exact.abs().amax(dim=1).clamp_min(1e-12) / _INT8_MAX
        return cls((exact / scale[:, None]).round_().to(torch.int8), scale, factors)


class NativeInt8Linear(nn.Module):
    """``x @ weight.T + bias`` over whole numbers of 8 bits, in C: a scale for each row of the
    weight, and one for each row of ``x``, found as it comes.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
        reach: see `Whole.of`.

    Raises:
        ValueError: the C code does not take this weight here.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, reach: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        numbers, scale, factors = Whole.of(weight, reach)
        self.matrix = matrix.Matrix(numbers, bias, scale, factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x)


class PackedInt8Linear(nn.Module):
    """What `NativeInt8Linear` computes, through oneDNN.

    Args:
        weight: ``[out, in]``, float32 or bfloat16, on the CPU; not kept.
        bias: ``[out]`` or ``None``.
        reach: see `Whole.of`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, reach: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._bias = bias
        numbers, self._scale, self._factors = Whole.of(weight, reach)
        self._zeros = torch.zeros(len(numbers), dtype=torch.int64)
        shape = [PACKED_ROWS, numbers.shape[1]]
        self._packed: Any = torch.ops.onednn.qlinear_prepack(numbers, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.reshape(-1, x.shape[-1]).float() * self._factors
        scales = exact.abs().amax(dim=1).clamp_min(1e-30) / _INT8_MAX
        whole = (exact / scales[:, None]).round_().add_(_ZERO).to(torch.uint8)
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
        out = (out * scales[:, None]).to(x.dtype).view(*x.shape[:-1], -1)
        return out if self._bias is None else out + self._bias
