# pyright: reportCallIssue=false
"""Write new keys and values to pages, and move cached ones, by Triton: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def write_kernel(
    k,  # [T, KH, D]
    v,  # [T, KH, D]
    k_pages,  # [num_pages, PAGE_SIZE, KH, D]
    v_pages,  # [num_pages, PAGE_SIZE, KH, D]
    slots,  # [T]
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
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < NUM_HEADS) & (dim < DIM) & (slot >= 0)

    keys = tl.load(k + row * k_row_stride + head * k_head_stride + dim, mask=mask, other=0.0)
    k_at = page * k_page_stride + offset * k_slot_stride + head * k_pages_head_stride + dim
    tl.store(k_pages + k_at, keys.to(k_pages.dtype.element_ty), mask=mask)
    values = tl.load(v + row * v_row_stride + head * v_head_stride + dim, mask=mask, other=0.0)
    v_at = page * v_page_stride + offset * v_slot_stride + head * v_pages_head_stride + dim
    tl.store(v_pages + v_at, values.to(v_pages.dtype.element_ty), mask=mask)


@triton.jit
def move_kernel(
    k_pages,  # [L, num_pages, PAGE_SIZE, KH, D]
    v_pages,  # [L, num_pages, PAGE_SIZE, KH, D]
    source,  # [N]
    target,  # [N]
    cos,  # [N, D/2]
    sin,  # [N, D/2]
    k_layer_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_layer_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
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
    head = tl.arange(0, HEADS_PADDED)[:, None]
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
    k_to = k_layer + to_page * k_page_stride + to_offset * k_slot_stride
    tl.store(k_to + dim, keys.to(k_pages.dtype.element_ty), mask=mask)

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
) -> None:
    """Write as `hogwild_kernels.api.AttentionBackend.write` says."""
    num_rows, num_heads, dim = k.shape
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    with torch.cuda.device_of(k):
        write_kernel[(num_rows,)](
            k,
            v,
            k_pages,
            v_pages,
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            PAGE_SIZE=k_pages.shape[1],
            NUM_HEADS=num_heads,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            num_warps=4,
        )


def move_kv(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Move as `hogwild_kernels.api.AttentionBackend.move` says."""
    num_layers, _, page_size, num_heads, dim = k_pages.shape
    with torch.cuda.device_of(k_pages):
        move_kernel[(source.shape[0], num_layers)](
            k_pages,
            v_pages,
            source,
            target,
            cos,
            sin,
            *k_pages.stride()[:4],
            *v_pages.stride()[:4],
            PAGE_SIZE=page_size,
            NUM_HEADS=num_heads,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            num_warps=4,
        )
