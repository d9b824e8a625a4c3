"""Linear layers in C for the CPU.

They are batch invariant: the bits of a row of output depend on that row of input alone, not on the
number of rows, the row's place or the number of threads.

This file passes pointers and sizes to csrc/matrix.h.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from hogwild_kernels.cpu import c_backend, structs
from hogwild_kernels.cpu.build import build_error, libraries

_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
_ROW_ALIGNMENT = 64
_UINT8_ZERO_POINT = 128


class Matrix:
    """``x @ weight.T + bias``, or ``x @ (weight * scale[:, None] / input_scale).T + bias`` for an
    int8 weight, where ``x * input_scale`` is quantized row by row.

    Args:
        weight: ``[out, in]`` on the CPU: float32 or bfloat16, the type of ``x`` too, or int8.
        bias: ``[out]`` in the type of ``x``, or ``None``.
        scale: of each output channel of an int8 weight, float32 ``[out]``.
        input_scale: factors on the columns of ``x`` before it is quantized, float32 ``[in]``.
        share: keep a contiguous ``weight``, in its own order. Else processors without AMX keep a
            packed copy, which is faster for many rows.

    Attributes:
        struct: its fields in C.

    Raises:
        ValueError: see `unsupported_reason`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        share: bool = False,
    ) -> None:
        if reason := unsupported_reason(weight):
            raise ValueError(f"weight: {reason}")
        self.columns, self.width = weight.shape
        is_int8 = weight.dtype == torch.int8
        zero = weight.sum(dim=1, dtype=torch.int32) * _UINT8_ZERO_POINT if is_int8 else None
        use_amx = c_backend.has_amx() and weight.dtype != torch.float32
        is_packed = not (use_amx or share)
        size = self.width * weight.element_size()
        stored = _packed(weight) if is_packed else weight
        self._kept = tuple(
            None if x is None else x.contiguous() for x in (stored, bias, scale, input_scale, zero)
        )
        pointers = (None if x is None else x.data_ptr() for x in self._kept)
        self._input_dtypes = [weight.dtype] if not is_int8 else [torch.float32, torch.bfloat16]
        if bias is not None:
            self._input_dtypes = [dtype for dtype in self._input_dtypes if dtype == bias.dtype]
        self.struct = structs.Matrix(*pointers, self.columns, size, use_amx, is_int8, is_packed)
        self._address = ctypes.byref(self.struct)
        self._name = "int8_matrix" if is_int8 else "float_matrix"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``.

        Raises:
            ValueError: ``x`` has another width or dtype.
        """
        if x.shape[-1] != self.width or x.dtype not in self._input_dtypes:
            wanted = f"[..., {self.width}] in one of {self._input_dtypes}"
            raise ValueError(f"x: wanted {wanted}, got {list(x.shape)} in {x.dtype}")
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.columns), dtype=x.dtype)
        rows = x.numel() // self.width
        _function(self._name, x.dtype)(
            self._address, x.data_ptr(), rows, out.data_ptr(), c_backend.num_threads()
        )
        return out


def unsupported_reason(weight: torch.Tensor) -> str | None:
    """Why `Matrix` does not take a weight on this machine; ``None`` if it does."""
    if error := build_error():
        return f"wanted a working C compiler ({error})"
    if weight.dtype not in _DTYPES:
        return f"wanted one of {list(_DTYPES)}, got {weight.dtype}"
    columns, width = weight.shape
    if columns % c_backend.LANES or width * weight.element_size() % _ROW_ALIGNMENT:
        return (
            f"wanted rows in {c_backend.LANES}s, of a multiple of {_ROW_ALIGNMENT} bytes, "
            f"got {tuple(weight.shape)}"
        )
    return None


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Word i (32 bits) of 16 output channels side by side, then word i + 1 of the same channels."""
    words = weight.contiguous().view(torch.int32)
    return words.unflatten(0, (-1, c_backend.LANES)).transpose(1, 2).contiguous()


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(libraries()[dtype], name)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes, function.restype = [pointer, pointer, integer, pointer, integer], None
    return function
