"""A model's decoder layers in one call of the C code.

This file passes pointers and sizes to csrc/decoder_layers.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hogwild_kernels.cpu import matrix, structs
from hogwild_kernels.cpu.build import libraries


class Norm(NamedTuple):
    """An RMS norm: its weight and epsilon."""

    weight: torch.Tensor
    eps: float


class LayerParts(NamedTuple):
    """Matrices and norms of a layer, and the index of its `LayerKind`."""

    qkv: matrix.Matrix
    out: matrix.Matrix
    gate_up: matrix.Matrix
    down: matrix.Matrix
    before_attention: Norm
    before_mlp: Norm
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    kind: int


class LayerKind(NamedTuple):
    """What layers of one kind (same RoPE, same sliding window) attend to.

    ``params`` and ``workspace`` are `c_backend.attention_params`; ``cos`` and ``sin`` float32
    ``[T, D/2]``.
    """

    params: Any
    workspace: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Activations(NamedTuple):
    """Activations that all layers reuse, ``[T, ...]``; ``lse`` is float32 ``[T, H]``."""

    hidden: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    lse: torch.Tensor


class Layers:
    """Decoder layers of the Llama shape.

    Args:
        layers: in order.
        dtype: of the hidden state, float32 or bfloat16.
    """

    def __init__(self, layers: Sequence[LayerParts], dtype: torch.dtype) -> None:
        self._kept = layers
        self._structs = (structs.Layer * len(layers))()
        for struct, layer in zip(self._structs, layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
            struct.before_attention = layer.before_attention.weight.data_ptr()
            struct.before_mlp = layer.before_mlp.weight.data_ptr()
            struct.attention_eps, struct.mlp_eps = layer.before_attention.eps, layer.before_mlp.eps
            struct.kind = layer.kind
            if layer.head_norms:
                of_query, of_key, struct.head_eps = layer.head_norms
                struct.q_norm, struct.k_norm = of_query.data_ptr(), of_key.data_ptr()
        self._function = libraries()[dtype].decoder_layers
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._function.argtypes = [pointer, integer, *[pointer] * 3, integer, pointer]
        self._function.restype = None
        self._stored: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None

    def __call__(
        self,
        x: torch.Tensor,
        stored: Sequence[tuple[torch.Tensor, torch.Tensor]],
        kinds: Sequence[LayerKind],
        activations: Activations,
        slots: torch.Tensor,
    ) -> None:
        """Run the layers on ``x`` in place. What the last one adds to it stays in
        ``activations.output``.

        Args:
            x: ``[T, E]``.
            stored: keys and values of each layer, ``[num_pages, page_size, KH, D]``.
            kinds: `LayerParts.kind` is an index into them.
            activations: as many rows as ``x``.
            slots: see `hogwild_kernels.write_kv`.
        """
        if stored is not self._stored:
            for struct, (keys, values) in zip(self._structs, stored, strict=True):
                struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
            self._stored = stored
        kinds_in_c = (structs.LayerKind * len(kinds))(
            *(
                structs.LayerKind(
                    ctypes.addressof(params), *(tensor.data_ptr() for tensor in tensors)
                )
                for params, *tensors in kinds
            )
        )
        buffers = structs.Activations(*(tensor.data_ptr() for tensor in activations))
        self._function(
            self._structs,
            len(self._structs),
            kinds_in_c,
            ctypes.byref(buffers),
            x.data_ptr(),
            x.shape[1],
            slots.data_ptr(),
        )
