"""Matrices in C for the CPU: weights as the model has them, each number read once for all rows.

Knows pointers and sizes; the mathematics stands in native_matrix.h.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

from hogwild_kernels.cpu import c_backend
from hogwild_kernels.cpu.build import build_error, library

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "int8"}
_LANES, _STEP = 16, 64
_ZERO = 128

MAX_MATRIX_ROWS = 32
"""More rows of floats want another operator where the processor has no tiles."""


class Struct(ctypes.Structure):
    """The C file's ``Matrix``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale", "factors", "offset")),
        ("columns", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("tiles", ctypes.c_int),
        ("whole", ctypes.c_int),
    ]


class Matrix:
    """``x @ weight.T + bias``, or ``x @ (weight * scale[:, None] / factors).T + bias`` where the
    weight is whole numbers; rows of ``x`` are then made whole numbers as they come.

    Args:
        weight: ``[out, in]`` on the CPU: float32 or bfloat16, the type of ``x`` too, or int8. Not
            copied where it is contiguous.
        bias: ``[out]`` in the type of ``x``, or ``None``.
        scale: of each row of whole numbers, float32 ``[out]``.
        factors: of each column of ``x`` before it is made whole, float32 ``[in]``.

    Attributes:
        struct: what the C code knows of it.
        max_rows: of ``x`` that it is fast for.

    Raises:
        ValueError: `refusal` says why.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        if said := refusal(weight):
            raise ValueError(f"weight: {said}")
        self.columns, self.width = weight.shape
        whole = weight.dtype == torch.int8
        offset = weight.sum(dim=1, dtype=torch.int32) * _ZERO if whole else None
        self._kept = tuple(
            None if x is None else x.contiguous() for x in (weight, bias, scale, factors, offset)
        )
        pointers = (None if x is None else x.data_ptr() for x in self._kept)
        tiles = c_backend.has_tiles() and weight.dtype != torch.float32
        size = self.width * weight.element_size()
        self._takes = [weight.dtype] if not whole else [torch.float32, torch.bfloat16]
        if bias is not None:
            self._takes = [dtype for dtype in self._takes if dtype == bias.dtype]
        self.struct = Struct(*pointers, self.columns, size, tiles, whole)
        self.max_rows = sys.maxsize if whole or tiles else MAX_MATRIX_ROWS
        self._address = ctypes.byref(self.struct)
        self._kind = _KINDS[weight.dtype]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``.

        Raises:
            ValueError: ``x`` is of another width or type.
        """
        if x.shape[-1] != self.width or x.dtype not in self._takes:
            wanted = f"[..., {self.width}] in one of {self._takes}"
            raise ValueError(f"x: wanted {wanted}, got {list(x.shape)} in {x.dtype}")
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.columns), dtype=x.dtype)
        rows = x.numel() // self.width
        _function(self._kind, x.dtype)(
            self._address, x.data_ptr(), rows, out.data_ptr(), c_backend.num_threads()
        )
        return out


def refusal(weight: torch.Tensor) -> str | None:
    """What the compiled matrices want of a weight and do not get, ``None`` where they can run."""
    if error := build_error():
        return f"wanted a working C compiler ({error})"
    if not library().has_wide_vectors():
        return "wanted a processor with AVX-512"
    if weight.dtype not in _KINDS:
        return f"wanted one of {list(_KINDS)}, got {weight.dtype}"
    columns, width = weight.shape
    if columns % _LANES or width * weight.element_size() % _STEP:
        return (
            f"wanted rows in {_LANES}s, of a multiple of {_STEP} bytes, got {tuple(weight.shape)}"
        )
    return None


@functools.cache
def _function(kind: str, dtype: torch.dtype) -> Any:
    suffix = _KINDS[dtype]
    function = getattr(library(), f"matrix_{suffix if kind == suffix else f'{kind}_{suffix}'}")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes, function.restype = [pointer, pointer, integer, pointer, integer], None
    return function
