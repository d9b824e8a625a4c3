# pyright: reportCallIssue=false
"""Writing new keys and values to pages, and moving cached ones, by Triton: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hogwild_kernels.table import KVScales

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def store_scaled(at, scale_at, heads, mask, HAS_SCALES: tl.constexpr):
    """Store vectors ``[KH, D]``, in fp8 with a scale each where the cache has scales."""
    if HAS_SCALES:
        scale = tl.max(tl.abs(heads), axis=1) / FP8_MAX
        scale = tl.where(scale > 0, scale, 1.0)
        tl.store(scale_at, scale, mask=tl.max(mask.to(tl.int32), axis=1) > 0)
        heads = heads / scale[:, None]
    tl.store(at, heads.to(at.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    slots,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    k_page_stride,
    k_slot_stride,
    k_pages_head_stride,
    v_page_stride,
    v_slot_stride,
    v_pages_head_stride,
    scale_page_stride,
    scale_slot_stride,
    scale_head_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < NUM_HEADS) & (dim < DIM) & (slot >= 0)
    scale_at = page * scale_page_stride + offset * scale_slot_stride
    scale_at += tl.arange(0, HEADS_PADDED) * scale_head_stride

    keys = tl.load(k + row * k_row_stride + head * k_head_stride + dim, mask=mask, other=0.0)
    k_at = page * k_page_stride + offset * k_slot_stride + head * k_pages_head_stride + dim
    store_scaled(k_pages + k_at, k_scales + scale_at, keys.to(tl.float32), mask, HAS_SCALES)
    values = tl.load(v + row * v_row_stride + head * v_head_stride + dim, mask=mask, other=0.0)
    v_at = page * v_page_stride + offset * v_slot_stride + head * v_pages_head_stride + dim
    store_scaled(v_pages + v_at, v_scales + scale_at, values.to(tl.float32), mask, HAS_SCALES)


@triton.jit
def move_kernel(
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    source,
    target,
    cos,
    sin,
    k_layer_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_layer_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    scale_layer_stride,
    scale_page_stride,
    scale_slot_stride,
    scale_head_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    from_slot = tl.load(source + token)
    to_slot = tl.load(target + token)
    from_page = from_slot // PAGE_SIZE
    from_offset = from_slot % PAGE_SIZE
    to_page = to_slot // PAGE_SIZE
    to_offset = to_slot % PAGE_SIZE
    heads = tl.arange(0, HEADS_PADDED)
    head = heads[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < NUM_HEADS) & (dim < DIM)

    k_layer = k_pages + layer * k_layer_stride + head * k_head_stride
    k_from = k_layer + from_page * k_page_stride + from_offset * k_slot_stride
    keys = tl.load(k_from + dim, mask=mask, other=0.0).to(tl.float32)
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    partners = tl.load(k_from + partner, mask=mask, other=0.0).to(tl.float32)
    angle = token * HALF + dim % HALF
    c = tl.load(cos + angle, mask=dim < DIM, other=1.0)
    s = tl.load(sin + angle, mask=dim < DIM, other=0.0)
    keys = keys * c + tl.where(dim < HALF, -partners, partners) * s
    scale_layer = layer * scale_layer_stride + heads * scale_head_stride
    scale_from = scale_layer + from_page * scale_page_stride + from_offset * scale_slot_stride
    scale_to = scale_layer + to_page * scale_page_stride + to_offset * scale_slot_stride
    if HAS_SCALES:
        fits = heads < NUM_HEADS
        keys *= tl.load(k_scales + scale_from, mask=fits, other=0.0)[:, None]
        tl.store(v_scales + scale_to, tl.load(v_scales + scale_from, mask=fits), mask=fits)
    k_to = k_layer + to_page * k_page_stride + to_offset * k_slot_stride
    store_scaled(k_to + dim, k_scales + scale_to, keys, mask, HAS_SCALES)

    v_layer = v_pages + layer * v_layer_stride + head * v_head_stride
    v_from = v_layer + from_page * v_page_stride + from_offset * v_slot_stride
    v_to = v_layer + to_page * v_page_stride + to_offset * v_slot_stride
    tl.store(v_to + dim, tl.load(v_from + dim, mask=mask), mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """See `hogwild_kernels.write_kv`."""
    num_rows, num_heads, dim = k.shape
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    with torch.cuda.device_of(k):
        write_kernel[(num_rows,)](
            k,
            v,
            k_pages,
            v_pages,
            *(scales or (k_pages, v_pages)),
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            *(scales.keys.stride() if scales else (0, 0, 0)),
            PAGE_SIZE=k_pages.shape[1],
            NUM_HEADS=num_heads,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            HAS_SCALES=scales is not None,
            num_warps=4,
        )


def move_kv(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """See `hogwild_kernels.move_kv`."""
    num_layers, _, page_size, num_heads, dim = k_pages.shape
    with torch.cuda.device_of(k_pages):
        move_kernel[(source.shape[0], num_layers)](
            k_pages,
            v_pages,
            *(scales or (k_pages, v_pages)),
            source,
            target,
            cos,
            sin,
            *k_pages.stride()[:4],
            *v_pages.stride()[:4],
            *(scales.keys.stride() if scales else (0, 0, 0, 0)),
            PAGE_SIZE=page_size,
            NUM_HEADS=num_heads,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            HAS_SCALES=scales is not None,
            num_warps=4,
        )
