"""The four operations: their shapes, their checks, and the call of whoever runs them.

Shapes are fixed here for good. T new tokens (rows), H query heads, KH key/value heads, D head dim,
N pairs of (row, block). Pages may have any strides as long as D is contiguous and the slots of
consecutive pages are evenly spaced: page-major ``[P, S, KH, D]`` and head-major storage seen
through a transpose both are.

Logarithms are natural, ``lse`` is float32. A row that sees nothing has output 0 and ``lse`` -inf.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hogwild_kernels.backends import (
    IMPLEMENTATIONS,
    PREFILLS,
    KernelArgumentError,
    check,
    implementation,
    prefill_implementation,
)
from hogwild_kernels.cpu import c_backend
from hogwild_kernels.cuda import long_runs, varlen
from hogwild_kernels.table import BlockRead, BlockTable, KVScales, Run

__all__ = [
    "IMPLEMENTATIONS",
    "PREFILLS",
    "BlockRead",
    "BlockTable",
    "KVScales",
    "KernelArgumentError",
    "Run",
    "block_attention",
    "merge_states",
    "move_kv",
    "prefill_implementation",
    "write_kv",
]

_FP8 = torch.float8_e4m3fn


def block_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
    impl: str = "auto",
    prefill: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each row over the union of the keys that it sees in all blocks.

    Args:
        q: queries, rotated at block-local positions. ``[T, H, D]``.
        k_pages: keys, rotated at block-local positions. ``[num_pages, page_size, KH, D]``.
        v_pages: values. ``[num_pages, page_size, KH, D]``.
        table: which row reads what, and the extra rotation of its query there.
        scale: factor on the scores before softcap and softmax.
        softcap: scores become ``softcap * tanh(score / softcap)`` where given.
        sinks: a logit per head that joins the softmax's denominator and has no value. ``[H]``.
        scales: factors of keys and values in pages of dtype float8_e4m3fn.
        impl: one of `IMPLEMENTATIONS`.
        prefill: one of `PREFILLS`.

    Returns:
        The output ``[T, H, D]`` in q's dtype, and the log-sum-exp of the visible scores (sinks
        included), float32 ``[T, H]``.

    Raises:
        KernelArgumentError: an argument does not fit, or ``impl`` or ``prefill`` cannot run on
            these tensors.
    """
    _check_pages(k_pages, v_pages, dims=4)
    check(q.dim() == 3, "q", "three dims [T, H, D]", tuple(q.shape))
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    check(dim == k_pages.shape[3], "q", f"head dim {k_pages.shape[3]} as k_pages has", dim)
    check(num_heads % num_kv_heads == 0, "q", f"a multiple of {num_kv_heads} heads", num_heads)
    check(dim % 2 == 0, "q", "an even head dim", dim)
    _check_table(table, dim)
    if sinks is not None:
        check(sinks.shape == (num_heads,), "sinks", f"[{num_heads}]", tuple(sinks.shape))
    if softcap is not None:
        check(softcap > 0, "softcap", "a positive number", softcap)
    _check_scales(scales, k_pages)
    if impl in ("auto", "native") and q.device.type == "cpu" and scales is None:
        refusal = c_backend.refusal(q, k_pages, v_pages)
        check(impl == "auto" or refusal is None, "impl", f"for 'native' {refusal}", impl)
        impl = "cpu" if refusal else "native"
    chosen = implementation(impl, q, scales)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    by_blocks = partial(chosen.block_attention, **options, **({"scales": scales} if scales else {}))
    if table.runs:
        name = prefill_implementation(prefill, impl, q.device, k_pages.dtype, dim, softcap)
        if name != "same":
            options |= {"attend": varlen.BACKENDS[name], "rest": by_blocks}
            return long_runs.block_attention(q, k_pages, v_pages, table, **options)
    return by_blocks(q, k_pages, v_pages, table)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    scales: KVScales | None = None,
    impl: str = "auto",
) -> None:
    """Write new keys and values to their slots, in place.

    Args:
        k: keys, rotated at block-local positions. ``[T, KH, D]``.
        v: values. ``[T, KH, D]``.
        k_pages: ``[num_pages, page_size, KH, D]``.
        v_pages: ``[num_pages, page_size, KH, D]``.
        slots: ``page * page_size + offset`` of each row; a negative slot is not written. int64
            ``[T]``.
        scales: written too; wanted where pages have dtype float8_e4m3fn.
        impl: one of `IMPLEMENTATIONS`.

    Raises:
        KernelArgumentError: an argument does not fit, or ``impl`` cannot run on these tensors.
    """
    _check_pages(k_pages, v_pages, dims=4)
    wanted = (slots.shape[0], *k_pages.shape[2:])
    check(k.shape == wanted, "k", f"shape {wanted}", tuple(k.shape))
    check(v.shape == wanted, "v", f"shape {wanted}", tuple(v.shape))
    check(slots.dtype == torch.int64, "slots", "dtype int64", slots.dtype)
    _check_scales(scales, k_pages)
    chosen = implementation(impl, k, scales)
    chosen.write_kv(k, v, k_pages, v_pages, slots, scales=scales)


def move_kv(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    scales: KVScales | None = None,
    impl: str = "auto",
) -> None:
    """Copy tokens from slot to slot in all layers at once, keys rotated on the way, values as they
    are.

    Args:
        k_pages: ``[L, num_pages, page_size, KH, D]``, layers that share one rotation.
        v_pages: ``[L, num_pages, page_size, KH, D]``.
        source: slots to read. int64 ``[N]``.
        target: slots to write; none of them is among ``source``. int64 ``[N]``.
        cos: cosines of the keys' rotation, float32 ``[N, D/2]``.
        sin: sines of the keys' rotation, float32 ``[N, D/2]``.
        scales: read and written too; wanted where pages have dtype float8_e4m3fn.
        impl: one of `IMPLEMENTATIONS`.

    Raises:
        KernelArgumentError: an argument does not fit, or ``impl`` cannot run on these tensors.
    """
    _check_pages(k_pages, v_pages, dims=5)
    for name, slots in (("source", source), ("target", target)):
        check(slots.dtype == torch.int64, name, "dtype int64", slots.dtype)
        check(slots.shape == source.shape, name, f"shape {tuple(source.shape)}", slots.shape)
    wanted = (source.shape[0], k_pages.shape[4] // 2)
    check(cos.shape == wanted, "cos", f"shape {wanted}", tuple(cos.shape))
    check(sin.shape == wanted, "sin", f"shape {wanted}", tuple(sin.shape))
    _check_scales(scales, k_pages)
    chosen = implementation(impl, k_pages, scales)
    chosen.move_kv(k_pages, v_pages, source, target, cos, sin, scales=scales)


def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention outputs over disjoint key sets into the output over their union.

    Args:
        outs: partial outputs, each normalised by its own softmax. ``[P, T, H, D]``.
        lses: their natural log-sum-exps, float32 ``[P, T, H]``.
        impl: one of `IMPLEMENTATIONS`.

    Returns:
        Output ``[T, H, D]`` and ``lse`` ``[T, H]``.

    Raises:
        KernelArgumentError: an argument does not fit, or ``impl`` cannot run on these tensors.
    """
    check(outs.dim() == 4, "outs", "four dims [P, T, H, D]", tuple(outs.shape))
    check(lses.shape == outs.shape[:3], "lses", f"shape {tuple(outs.shape[:3])}", tuple(lses.shape))
    return implementation(impl, outs).merge_states(outs, lses)


def _check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, dims: int) -> None:
    names = "[num_pages, page_size, KH, D]" if dims == 4 else "[L, num_pages, page_size, KH, D]"
    check(k_pages.dim() == dims, "k_pages", names, tuple(k_pages.shape))
    check(
        v_pages.shape == k_pages.shape,
        "v_pages",
        f"shape {tuple(k_pages.shape)}",
        tuple(v_pages.shape),
    )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check(pages.stride(-1) == 1, name, "a contiguous last dim", pages.stride())


def _check_scales(scales: KVScales | None, pages: torch.Tensor) -> None:
    wanted = f"scales for pages of dtype {_FP8}, and None for all others"
    check((pages.dtype == _FP8) == (scales is not None), "scales", wanted, pages.dtype)
    if scales is None:
        return
    shape = tuple(pages.shape[:-1])
    for name, factors in zip(scales._fields, scales, strict=True):
        check(factors.shape == shape, f"scales.{name}", f"shape {shape}", tuple(factors.shape))
        check(factors.dtype == torch.float32, f"scales.{name}", "dtype float32", factors.dtype)
    strides = scales.keys.stride()
    check(scales.values.stride() == strides, "scales.values", f"strides {strides}", "others")


def _check_table(table: BlockTable, dim: int) -> None:
    check(table.pages.dim() == 2, "table.pages", "two dims [B, P]", tuple(table.pages.shape))
    check(table.lo.dim() == 1, "table.lo", "one dim [N]", tuple(table.lo.shape))
    hi, pairs = tuple(table.hi.shape), (table.num_pairs,)
    check(hi == pairs, "table.hi", f"shape {pairs}", hi)
    count = table.pages.shape[0]
    for name in ("first_row", "num_rows", "first_pair"):
        column = getattr(table, name)
        check(column.shape == (count,), f"table.{name}", f"shape ({count},)", tuple(column.shape))
    for name in ("pages", "first_row", "num_rows", "first_pair", "lo", "hi"):
        column = getattr(table, name)
        check(column.dtype == torch.int32, f"table.{name}", "dtype int32", column.dtype)
    wanted = (table.num_pairs, dim // 2)
    for name in ("cos", "sin"):
        angles = getattr(table, name)
        check(angles.shape == wanted, f"table.{name}", f"shape {wanted}", tuple(angles.shape))
        check(angles.dtype == torch.float32, f"table.{name}", "dtype float32", angles.dtype)
