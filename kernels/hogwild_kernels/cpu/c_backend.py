"""Attention over blocks, and the small operations of a decoder layer, in C for the CPU.

Knows pointers and sizes; the mathematics stands in native.c, which native_build.py compiles. Where
that fails `build_error` says why.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Collection, Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from hogwild_kernels import reference
from hogwild_kernels.cpu.build import BuildError, build_error, library
from hogwild_kernels.table import BlockTable

__all__ = ["BuildError", "Job", "add_norm", "attend", "block_attention", "build_error", "draw"]
__all__ += ["has_tiles", "job_for", "merge_states", "move_kv", "num_threads", "refusal"]
__all__ += ["rotate_write", "silu_mul", "write_kv"]

merge_states = reference.merge_states
move_kv = reference.move_kv
write_kv = reference.write_kv

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
LANES = 16
"""Widths of rows are multiples of this."""
MAX_THREADS = 64
MAX_DIM = 256
MAX_GROUP = 32


class Job(ctypes.Structure):
    """What all layers of a pass share; the C file's ``Job``."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "num_kv_heads", "dim")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride", "page_stride", "slot_stride", "head_stride")
        ),
        *((name, ctypes.c_int) for name in ("num_entries", "pages_width", "page_size")),
        *(
            (name, ctypes.c_void_p)
            for name in ("pages", "first_row", "counts", "first_pair", "lo", "hi", "cos", "sin")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("threads", ctypes.c_int),
        ("tiles", ctypes.c_int),
    ]


def refusal(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> str | None:
    """What the compiled attention wants of tensors on the CPU and does not get, ``None`` where it
    can run.
    """
    num_heads, dim = q.shape[-2:]
    if q.dtype != k_pages.dtype or q.dtype not in DTYPES:
        return f"queries and keys of one type, float32 or bfloat16, got {q.dtype}, {k_pages.dtype}"
    if dim % 32 or dim > MAX_DIM:
        return f"a head dim that 32 divides, {MAX_DIM} at most, got {dim}"
    if k_pages.stride() != v_pages.stride():
        return f"keys and values stored alike, got {k_pages.stride()}, {v_pages.stride()}"
    if num_heads // k_pages.shape[-2] > MAX_GROUP:
        return f"at most {MAX_GROUP} query heads a key head, got {num_heads}"
    if error := build_error():
        return f"a working C compiler ({error})"
    return None


def block_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    job, work = job_for(q, k_pages, v_pages, table, scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2])
    if sinks is not None:
        sinks = sinks.float().contiguous()
    attend(job, q, k_pages, v_pages, sinks, out, lse, work)
    return out, lse


def job_for(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    scale: float,
    softcap: float | None = None,
) -> tuple[Job, torch.Tensor]:
    """What the layers of a pass share, and the memory that the threads work in, both kept on the
    table.

    Args:
        q: ``[T, H, D]``, heads of a row contiguous.
        k_pages: ``[num_pages, page_size, KH, D]``; ``v_pages`` has the same strides.
        v_pages: see above.
        table: int32 and float32, contiguous.
        scale: factor on the scores.
        softcap: see `hogwild_kernels.block_attention`.
    """
    threads = num_threads()
    pages = (k_pages.shape, k_pages.stride())
    key = ("native", q.shape, q.stride(), pages, scale, softcap, threads)
    kept = table.derived.get(key)
    if kept is None:
        columns = (table.pages, table.first_row, table.num_rows, table.first_pair)
        columns = [x.contiguous() for x in (*columns, table.lo, table.hi, table.cos, table.sin)]
        _check_bounds(table, q.shape[0], *k_pages.shape[:2])
        rows, heads, dim = q.shape
        page_stride, slot_stride, head_stride, _ = k_pages.stride()
        job = Job(
            rows,
            heads,
            k_pages.shape[2],
            dim,
            q.stride(0),
            page_stride,
            slot_stride,
            head_stride,
            *table.pages.shape,
            k_pages.shape[1],
            *(column.data_ptr() for column in columns),
            scale,
            softcap or 0,
            threads,
            has_tiles(),
        )
        work = torch.empty(threads * rows * heads * (dim + 17))
        kept = table.derived[key] = (job, work, columns)
    return kept[0], kept[1]


def _check_bounds(table: BlockTable, num_rows: int, num_pages: int, page_size: int) -> None:
    """C reads where it is told to: nothing may point outside."""
    if not table.num_pairs:
        return
    last_row = int((table.first_row + table.num_rows).max())
    last_pair = int((table.first_pair + table.num_rows).max())
    seen = torch.where(table.lo < table.hi, table.hi, 0)
    inside = last_row <= num_rows and last_pair <= table.num_pairs
    inside = inside and int(table.first_row.min()) >= 0 and int(table.first_pair.min()) >= 0
    inside = inside and int(seen.max()) <= table.pages.shape[1] * page_size
    first, last = (int(page) for page in table.pages.aminmax())
    if not (inside and first >= 0 and last < num_pages and int(table.lo.min()) >= 0):
        raise IndexError("table: a row, a pair, a token or a page lies outside of the tensors")


def attend(
    job: Job,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    work: torch.Tensor,
) -> None:
    """`block_attention` into given memory, nothing checked."""
    _function("block_attention", q.dtype)(
        ctypes.byref(job),
        q.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        work.data_ptr(),
    )


def rotate_write(
    job: Job,
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
        job: of this pass, from `job_for`.
        qkv: ``[T, (H + 2 KH) D]``.
        norms: weights ``[D]`` of the RMS norms of queries and of keys before they are rotated, and
            their epsilon.
        cos: of the rows' local positions, float32 ``[T, D/2]``.
        sin: see ``cos``.
        slots: see `hogwild_kernels.write_kv`.
        k_pages: ``[num_pages, page_size, KH, D]``.
        v_pages: the same.
    """
    _function("rotate_write", qkv.dtype)(
        ctypes.byref(job),
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


def draw(
    logits: torch.Tensor,
    settings: Sequence[Sequence[float]],
    banned: Sequence[Collection[int]],
) -> tuple[list[int], list[float]]:
    """Draw a token a row.

    Args:
        logits: ``[R, V]``, contiguous; banned tokens become -inf in place.
        settings: of each row: temperature (0 for the largest), top-k (0 for none), top-p, min-p,
            and a number in [0, 1) that falls on the token.
        banned: tokens that must not come, of each row.

    Returns:
        Tokens, -1 where more than the 1,024 most probable would be needed to tell; and their
        probabilities at temperature 1 before any filter, NaN where the row has no finite largest.
    """
    rows, vocabulary = logits.shape
    ids = array("q", [index for row in banned for index in row])
    ends = array("i", accumulate(map(len, banned)))
    numbers = array("f", chain.from_iterable(settings))
    token, probability = array("q", bytes(8 * rows)), array("f", bytes(4 * rows))
    columns = (ids, ends, numbers, token, probability)
    _function("draw", logits.dtype)(
        logits.data_ptr(),
        rows,
        vocabulary,
        *(column.buffer_info()[0] for column in columns),
        num_threads(),
    )
    return token.tolist(), probability.tolist()


def num_threads() -> int:
    """Threads of a call: torch's."""
    return min(torch.get_num_threads(), MAX_THREADS)


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "block_attention": (_POINTER,) * 8,
    "rotate_write": (*(_POINTER,) * 4, _FLOAT, *(_POINTER,) * 5),
    "add_norm": (*(_POINTER,) * 3, _FLOAT, _INT, _INT, _POINTER, _INT),
    "silu_mul": (_POINTER, _INT, _INT, _POINTER, _INT),
    "draw": (_POINTER, _INT, ctypes.c_int64, *(_POINTER,) * 5, _INT),
}


@functools.cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles of 16 x 16 words (AMX)."""
    return bool(library().has_tiles())


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(library(), f"{name}_{DTYPES[dtype]}")
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function
