"""Attention over blocks, the small operations of a decoder layer, and sampling, in C for the CPU.

This file passes pointers and sizes to csrc/. If that cannot be compiled `build_error` says why.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from hogwild_kernels.api import AttentionSpec, States, check
from hogwild_kernels.cpu.build import DTYPES, BuildError, build_error, libraries
from hogwild_kernels.cpu.structs import CONSTANTS, AttentionParams
from hogwild_kernels.reference import ReferenceBackend
from hogwild_kernels.table import BlockRead, BlockTable

__all__ = ["DTYPES", "BuildError", "NativeBackend", "add_norm", "attend", "attention_params"]
__all__ += ["build_error", "has_amx", "num_threads", "rotate_write", "sample", "silu_mul"]

LANES = CONSTANTS["LANES"]
"""Widths of rows are multiples of this."""
MAX_HEAD_DIM, MAX_GROUP = CONSTANTS["MAX_HEAD_DIM"], CONSTANTS["MAX_GROUP"]
WORKSPACE_FLOATS = 1 << 19
"""Floats of partial softmaxes that a call keeps at once, unless one query token has more. They are
2 MB, which stay in the nearest caches.
"""

_CHUNK = CONSTANTS["CHUNK"]


class NativeBackend(ReferenceBackend):
    """Attention in C. See `AttentionBackend` for shapes."""

    name = "native"

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return "tensors on the CPU"
        if spec.dtype not in DTYPES:
            return "a cache in float32 or bfloat16"
        if spec.head_dim % 32 or spec.head_dim > MAX_HEAD_DIM:
            return f"a head dim that 32 divides, {MAX_HEAD_DIM} at most"
        if spec.group_size > MAX_GROUP:
            return f"at most {MAX_GROUP} query heads for each key head"
        if error := build_error():
            return f"a working C compiler ({error})"
        return None

    def _attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        table: BlockTable,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> States:
        strides = k_pages.stride()
        check(q.dtype == k_pages.dtype == v_pages.dtype, "q", f"dtype {k_pages.dtype}", q.dtype)
        check(v_pages.stride() == strides, "v_pages", f"strides {strides}", v_pages.stride())
        group_size = q.shape[1] // k_pages.shape[2]
        reason = self.supports(AttentionSpec(q.device, q.dtype, q.shape[2], group_size))
        check(reason is None, "q", str(reason), (q.device, q.dtype, tuple(q.shape)))
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        params, workspace = attention_params(q, k_pages, v_pages, table, scale, softcap)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2])
        if sinks is not None:
            sinks = sinks.float().contiguous()
        attend(params, q, k_pages, v_pages, sinks, out, lse, workspace)
        return out, lse


def attention_params(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    scale: float,
    softcap: float | None = None,
) -> tuple[Any, torch.Tensor]:
    """Return the parameters that all layers of a step share, and memory for partial softmaxes.

    Both are stored on the table.

    Args:
        q: ``[T, H, D]``, heads of a row contiguous.
        k_pages: ``[num_pages, page_size, KH, D]``; ``v_pages`` has the same strides.
        v_pages: see above.
        table: see `BlockTable`.
        scale: factor on the scores.
        softcap: see `AttentionBackend.attend`.
    """
    threads = num_threads()
    pages = (k_pages.shape, k_pages.stride())
    key = ("native", q.shape, q.stride(), pages, scale, softcap, threads)
    kept = table.derived.get(key)
    if kept is None:
        max_pages, columns = _columns(table, q.shape[0], *k_pages.shape[:2])
        cos, sin = table.cos.contiguous(), table.sin.contiguous()
        rows, heads, dim = q.shape
        partials = columns["partials_of_row"]
        most = max((stop - start for start, stop in pairwise(partials)), default=0)
        max_partials = max(most, min(partials[-1], WORKSPACE_FLOATS // (heads * (dim + 2))))
        page_stride, slot_stride, head_stride, _ = k_pages.stride()
        params = AttentionParams(
            num_tokens=rows,
            num_heads=heads,
            num_kv_heads=k_pages.shape[2],
            head_dim=dim,
            q_stride=q.stride(0),
            page_stride=page_stride,
            slot_stride=slot_stride,
            head_stride=head_stride,
            num_reads=len(table.pages),
            max_pages=max_pages,
            page_size=k_pages.shape[1],
            **{name: column.buffer_info()[0] for name, column in columns.items()},
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            scale=scale,
            softcap=softcap or 0,
            max_partials=max_partials,
            num_threads=threads,
            use_amx=has_amx(),
        )
        workspace = torch.empty(max_partials * heads * (dim + 2))
        # params holds raw pointers into columns, cos and sin: storing them here keeps that memory.
        kept = table.derived[key] = (params, workspace, columns, cos, sin)
    return kept[0], kept[1]


def _columns(
    table: BlockTable, num_rows: int, num_pages: int, page_size: int
) -> tuple[int, dict[str, array[int]]]:
    """Return the length of the longest page list, and the int32 arrays of `AttentionParams`."""
    reads = table.checked_reads(num_rows, num_pages, page_size)
    max_pages = max((len(read.pages) for read in reads), default=0)
    counts = [len(read.hi) for read in reads]
    pages, lo, hi = array("i"), array("i"), array("i")
    for read in reads:
        pages.fromlist(read.pages + [0] * (max_pages - len(read.pages)))
        lo.fromlist(read.lo(table.window))
        hi.fromlist(read.hi)
    first_partial, partials_of_row = _partials(reads, lo, hi, num_rows)
    return max_pages, {
        "pages": pages,
        "first_query": array("i", [read.first_row for read in reads]),
        "num_queries": array("i", counts),
        "first_pair": array("i", accumulate(counts[:-1], initial=0)),
        "lo": lo,
        "hi": hi,
        "first_partial": first_partial,
        "partials_of_row": partials_of_row,
    }


def _partials(
    reads: Sequence[BlockRead], lo: Sequence[int], hi: Sequence[int], num_rows: int
) -> tuple[array[int], array[int]]:
    """Number the partial softmaxes: those of a query token one after another, in its view's order.

    A block that stands further left in a view has a larger delta. The order of the reads is another
    one: it depends on which query tokens share the step.

    Returns:
        The first partial of each pair, and of each query token, with their total at the end.
    """
    pairs_of_row: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    pair = 0
    for read in reads:
        for row, delta in enumerate(read.deltas, read.first_row):
            if lo[pair] < hi[pair]:
                pairs_of_row[row].append((-delta, pair))
            pair += 1
    first_partial, partials_of_row, count = array("i", bytes(4 * pair)), array("i", [0]), 0
    for pairs in pairs_of_row:
        for _, pair in sorted(pairs):
            first_partial[pair] = count
            count += (hi[pair] - 1) // _CHUNK - lo[pair] // _CHUNK + 1
        partials_of_row.append(count)
    return first_partial, partials_of_row


def attend(
    params: Any,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """Attend and write to ``out`` and ``lse``. Nothing is checked."""
    _function("block_attention", q.dtype)(
        ctypes.byref(params),
        q.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        workspace.data_ptr(),
    )


def rotate_write(
    params: Any,
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> None:
    """Rotate queries in place; rotate keys and write them and the values to their slots.

    Args:
        params: of this step, from `attention_params`.
        qkv: ``[T, (H + 2 KH) D]``.
        norms: weights ``[D]`` of the RMS norms of queries and of keys before they are rotated, and
            their epsilon.
        cos: of the rows' local positions, float32 ``[T, D/2]``.
        sin: see ``cos``.
        slots: see `AttentionBackend.write`.
        k_pages: ``[num_pages, page_size, KH, D]``.
        v_pages: the same.
    """
    _function("rotate_write", qkv.dtype)(
        ctypes.byref(params),
        qkv.data_ptr(),
        norms[0].data_ptr() if norms else None,
        norms[1].data_ptr() if norms else None,
        norms[2] if norms else 0.0,
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
    )


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """``x += y``, then ``out = x / sqrt(mean(x ** 2) + eps) * weight``. x, y, out ``[T, E]``."""
    _function("add_norm", x.dtype)(
        x.data_ptr(),
        None if y is None else y.data_ptr(),
        weight.data_ptr(),
        eps,
        *x.shape,
        out.data_ptr(),
        num_threads(),
    )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """``out = silu(gate) * up``; gate and up are the halves of ``gate_up``. out ``[T, I]``."""
    _function("silu_mul", out.dtype)(gate_up.data_ptr(), *out.shape, out.data_ptr(), num_threads())


def sample(
    logits: torch.Tensor,
    settings: Sequence[Sequence[float]],
    banned: Sequence[Collection[int]],
) -> tuple[list[int], list[float]]:
    """Sample a token for each row.

    Args:
        logits: ``[R, V]``, contiguous; banned tokens become -inf in place.
        settings: of each row: temperature (0 for the largest), top-k (0 for none), top-p, min-p,
            and a number in [0, 1) that chooses the token.
        banned: tokens of each row that must not be sampled.

    Returns:
        Tokens, -1 where the 1,024 most probable are not enough to decide; and their
        probabilities at temperature 1 before any filter, NaN where the row has no finite largest.
    """
    rows, vocabulary = logits.shape
    ids = array("q", [index for row in banned for index in row])
    ends = array("i", accumulate(map(len, banned)))
    numbers = array("f", chain.from_iterable(settings))
    token, probability = array("q", bytes(8 * rows)), array("f", bytes(4 * rows))
    columns = (ids, ends, numbers, token, probability)
    _function("sample", logits.dtype)(
        logits.data_ptr(),
        rows,
        vocabulary,
        *(column.buffer_info()[0] for column in columns),
        num_threads(),
    )
    return token.tolist(), probability.tolist()


def num_threads() -> int:
    """Threads of a call: as many as torch uses."""
    return min(torch.get_num_threads(), CONSTANTS["MAX_THREADS"])


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "block_attention": (_POINTER,) * 8,
    "rotate_write": (*(_POINTER,) * 4, _FLOAT, *(_POINTER,) * 5),
    "add_norm": (*(_POINTER,) * 3, _FLOAT, _INT, _INT, _POINTER, _INT),
    "silu_mul": (_POINTER, _INT, _INT, _POINTER, _INT),
    "sample": (_POINTER, _INT, ctypes.c_int64, *(_POINTER,) * 5, _INT),
}


@functools.cache
def has_amx() -> bool:
    """Whether the processor has AMX: matrix products of 16 x 16 tiles."""
    return bool(libraries()[torch.float32].has_amx())


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(libraries()[dtype], name)
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function
