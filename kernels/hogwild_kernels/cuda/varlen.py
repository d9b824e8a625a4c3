"""Attention of many rows over one contiguous sequence by libraries: flash-attn, and torch's own.

Knows their arguments and what they refuse; nothing of blocks. All take ``q [T, H, D]``, ``k`` and
``v [S, KH, D]`` and a window around the diagonal that ends in the last row and key, as `Run` has
it. They return ``out [T, H, D]`` and the natural ``lse``, float32 ``[T, H]``. Rows that see nothing
are not for them: flash-attn gives such rows an lse of plus infinity.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch

_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_MAX_DIM = 256


class Attend(Protocol):
    """Attention of rows over one sequence."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Through the package flash-attn (arXiv 2307.08691)."""
    function = _flash_attn()
    assert function is not None
    out, lse, _ = function(
        q,
        k,
        v,
        cu_seqlens_q=_bounds(q),
        cu_seqlens_k=_bounds(k),
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
        softmax_scale=scale,
        causal=window[1] == 0,
        window_size=window,
        softcap=softcap or 0.0,
        return_attn_probs=True,
    )
    return out, lse.T


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Through ``torch.nn.attention.varlen``."""
    assert softcap is None
    module: Any = _torch_varlen()
    out, lse = module.varlen_attn(
        q,
        k,
        v,
        _bounds(q),
        _bounds(k),
        q.shape[0],
        k.shape[0],
        return_aux=module.AuxRequest(lse=True),
        scale=scale,
        window_size=window,
        enable_gqa=True,
    )
    return out, lse.T  # its documentation has [T, H], its code gives [H, T]


BACKENDS: dict[str, Attend] = {"flash": flash, "varlen": varlen}
"""By name, the first choice first."""


def refusal(
    name: str, device: torch.device, dtype: torch.dtype, dim: int, softcap: float | None
) -> str | None:
    """What the backend wants and does not find; ``None`` where it can run.

    Args:
        name: one of `BACKENDS`.
        device: where keys and values are.
        dtype: theirs.
        dim: D.
        softcap: as in `hogwild_kernels.block_attention`.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "a CUDA device of sm_80 or newer"
    if dtype not in _DTYPES:
        return "a cache in float16 or bfloat16"
    if dim % 8 or dim > _MAX_DIM:
        return f"a head dim that 8 divides, at most {_MAX_DIM}"
    if name == "flash":
        found = _flash_attn() is not None
        return None if found else "flash-attn 2.7 or newer (pip install flash-attn)"
    if softcap is not None:
        return "a model without a softcap"
    built = torch.backends.cuda.is_flash_attention_available() and _torch_varlen() is not None
    return None if built else "a torch with varlen_attn that takes enable_gqa, torch 2.13, say"


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


def _bounds(x: torch.Tensor) -> torch.Tensor:
    """Where the one sequence starts and ends, int32 ``[2]``. Made there: nothing is copied over."""
    return torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
