"""A model's decoder layers in one call of the C code.

Knows pointers and sizes; native_layers.h says what follows what.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hogwild_kernels.cpu import c_backend, matrix
from hogwild_kernels.cpu.build import library


class Norm(NamedTuple):
    """An RMS norm: its weight and epsilon."""

    weight: torch.Tensor
    eps: float


class LayerParts(NamedTuple):
    """What a layer is made of; see `hogwild_engine.step.fused_llama.Layer`."""

    qkv: matrix.Matrix
    out: matrix.Matrix
    gate_up: matrix.Matrix
    down: matrix.Matrix
    before_attention: Norm
    before_mlp: Norm
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    view: int


class View(NamedTuple):
    """What layers of a kind read, and how their rows turn: cos and sin float32 ``[T, D/2]``."""

    job: c_backend.Job
    work: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Scratch(NamedTuple):
    """Memory that layers use one after another, a row of ``x`` each: widths of hidden state, fused
    projections, heads and feed-forward; ``lse`` is float32 ``[T, H]``.
    """

    h: torch.Tensor
    qkv: torch.Tensor
    read: torch.Tensor
    y: torch.Tensor
    gate_up: torch.Tensor
    active: torch.Tensor
    lse: torch.Tensor


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, matrix.Struct) for name in ("qkv", "out", "gate_up", "down")),
        *_pointers("before_attention", "before_mlp", "q_norm", "k_norm", "keys", "values"),
        *((name, ctypes.c_float) for name in ("attention_eps", "mlp_eps", "head_eps")),
        ("view", ctypes.c_int),
    ]


class _View(ctypes.Structure):
    _fields_ = _pointers("job", "work", "cos", "sin")


class _Scratch(ctypes.Structure):
    _fields_ = _pointers(*Scratch._fields)


class Layers:
    """Decoder layers of the Llama shape.

    Args:
        layers: in order.
        dtype: of the hidden state, float32 or bfloat16.
    """

    def __init__(self, layers: Sequence[LayerParts], dtype: torch.dtype) -> None:
        self._kept = layers
        self._structs = (_Layer * len(layers))()
        for struct, layer in zip(self._structs, layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
            struct.before_attention = layer.before_attention.weight.data_ptr()
            struct.before_mlp = layer.before_mlp.weight.data_ptr()
            struct.attention_eps, struct.mlp_eps = layer.before_attention.eps, layer.before_mlp.eps
            struct.view = layer.view
            if layer.head_norms:
                of_query, of_key, struct.head_eps = layer.head_norms
                struct.q_norm, struct.k_norm = of_query.data_ptr(), of_key.data_ptr()
        matrices = [matrix for layer in layers for matrix in layer[:4]]
        self.max_rows = min(matrix.max_rows for matrix in matrices)
        self._function = getattr(library(), f"layers_{c_backend.DTYPES[dtype]}")
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._function.argtypes = [pointer, integer, *[pointer] * 3, integer, pointer]
        self._function.restype = None
        self._stored: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None

    def __call__(
        self,
        x: torch.Tensor,
        stored: Sequence[tuple[torch.Tensor, torch.Tensor]],
        views: Sequence[View],
        scratch: Scratch,
        slots: torch.Tensor,
    ) -> None:
        """Take ``x`` through the layers, in place; what the last one adds is left in ``scratch.y``.

        Args:
            x: ``[T, E]``, at most ``max_rows`` rows.
            stored: keys and values of each layer, ``[num_pages, page_size, KH, D]``.
            views: what the layers' ``view`` counts.
            scratch: as many rows as ``x``.
            slots: see `hogwild_kernels.write_kv`.
        """
        if stored is not self._stored:
            for struct, (keys, values) in zip(self._structs, stored, strict=True):
                struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
            self._stored = stored
        seen = (_View * len(views))(
            *(
                _View(ctypes.addressof(job), *(tensor.data_ptr() for tensor in tensors))
                for job, *tensors in views
            )
        )
        memory = _Scratch(*(tensor.data_ptr() for tensor in scratch))
        self._function(
            self._structs,
            len(self._structs),
            seen,
            ctypes.byref(memory),
            x.data_ptr(),
            x.shape[1],
            slots.data_ptr(),
        )
