"""Attention over one contiguous sequence by libraries: flash-attn and torch.

Knows their arguments and what they refuse; nothing of blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch

from hogwild_kernels.api import AttentionSpec, States

_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_MAX_DIM = 256


class PrefillBackend(Protocol):
    """Attention of many query tokens over one sequence."""

    name: str

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return ``None`` if the backend can run such layers, else what it wants instead."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: tuple[int, int],
    ) -> States:
        """Return the output ``[T, H, D]`` and the natural log-sum-exp, float32 ``[T, H]``.

        Every query token must see a key: flash-attn returns a log-sum-exp of plus infinity for one
        that sees none.

        Args:
            q: ``[T, H, D]``.
            k: ``[S, KH, D]``.
            v: ``[S, KH, D]``.
            scale: see `hogwild_kernels.api.AttentionBackend.attend`.
            softcap: see `hogwild_kernels.api.AttentionBackend.attend`.
            window: keys before and after the diagonal that a query token sees, -1 for all. The
                diagonal ends in the last query token and the last key.
        """
        ...


class FlashAttention:
    """The package flash-attn (arXiv 2307.08691)."""

    name = "flash"

    def supports(self, spec: AttentionSpec) -> str | None:
        wanted = "flash-attn 2.7 or newer (pip install flash-attn)"
        return _wanted(spec) or (None if _flash_attn() else wanted)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: tuple[int, int],
    ) -> States:
        function = _flash_attn()
        assert function is not None
        out, lse, _ = function(
            q,
            k,
            v,
            cu_seqlens_q=_cu_seqlens(q),
            cu_seqlens_k=_cu_seqlens(k),
            max_seqlen_q=q.shape[0],
            max_seqlen_k=k.shape[0],
            softmax_scale=scale,
            causal=window[1] == 0,
            window_size=window,
            softcap=softcap or 0.0,
            return_attn_probs=True,
        )
        return out, lse.T


class TorchVarlen:
    """``torch.nn.attention.varlen``."""

    name = "varlen"

    def supports(self, spec: AttentionSpec) -> str | None:
        if reason := _wanted(spec):
            return reason
        if spec.softcap is not None:
            return "a model without a softcap"
        if torch.backends.cuda.is_flash_attention_available() and _torch_varlen():
            return None
        return "a torch with varlen_attn that takes enable_gqa, for example 2.13"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: tuple[int, int],
    ) -> States:
        assert softcap is None
        module: Any = _torch_varlen()
        out, lse = module.varlen_attn(
            q,
            k,
            v,
            _cu_seqlens(q),
            _cu_seqlens(k),
            q.shape[0],
            k.shape[0],
            return_aux=module.AuxRequest(lse=True),
            scale=scale,
            window_size=window,
            enable_gqa=True,
        )
        return out, lse.T  # torch's documentation says [T, H], its code returns [H, T]


def _wanted(spec: AttentionSpec) -> str | None:
    """Return what both libraries want and ``spec`` lacks, if anything."""
    if spec.device.type != "cuda" or torch.cuda.get_device_capability(spec.device) < _CAPABILITY:
        return "a CUDA device of sm_80 or newer"
    if spec.dtype not in _DTYPES:
        return "a cache in float16 or bfloat16"
    if spec.head_dim % 8 or spec.head_dim > _MAX_DIM:
        return f"a head dim that 8 divides, at most {_MAX_DIM}"
    return None


@cache
def _flash_attn() -> Callable[..., Any] | None:
    try:
        function = import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return function if _takes(function, "softcap", "window_size", "return_attn_probs") else None


@cache
def _torch_varlen() -> object | None:
    try:
        module = import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    fits = _takes(module.varlen_attn, "return_aux", "scale", "window_size", "enable_gqa")
    return module if fits else None


def _takes(function: Callable[..., Any], *names: str) -> bool:
    return inspect.signature(function).parameters.keys() >= set(names)


def _cu_seqlens(x: torch.Tensor) -> torch.Tensor:
    """Return start and end of the one sequence, int32 ``[2]``. Made on the device: no copy."""
    return torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
