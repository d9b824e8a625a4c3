"""The split kernel: each program attends over an equal share of all token tiles.

Stream-K over the work list (see triton_work.py): a program keeps one running softmax while its
share stays in one row tile, and leaves one partial for each row tile that it touches.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def find_segment(starts, num_segments, work):
    """The segment that holds token tile ``work``: the last one that starts at or before it."""
    low = num_segments * 0
    high = num_segments
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= work
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


# These grow and shrink from pass to pass; a kernel for each of their forms would be compiled anew.
@triton.jit(
    do_not_specialize=["num_q_rows", "num_entries", "num_segments", "num_slots", "pages_stride"]
)
def split_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    pages,
    first_row,
    num_rows,
    first_pair,
    lo,
    hi,
    cos,
    sin,
    segments,
    starts,
    share,
    outs,  # [KH * PARTS, slots, BLOCK_M, D] float32
    lses,  # [KH * PARTS, slots, BLOCK_M] float32
    num_q_rows,
    num_entries,
    num_segments,
    num_slots,
    scale,
    softcap,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    scale_page_stride,
    scale_slot_stride,
    scale_head_stride,
    pages_stride,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ROWS: tl.constexpr = BLOCK_M // HEADS
    HALF: tl.constexpr = DIM // 2
    lane = tl.program_id(0)
    kv_head = lane // PARTS
    program = tl.program_id(1)
    total = tl.load(starts + num_segments)
    size = tl.load(share)
    work = program * size
    end = tl.minimum(work + size, total)

    packed = tl.arange(0, BLOCK_M)
    half = tl.arange(0, HALF_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    token_offset = tl.arange(0, BLOCK_N)
    half_fits = half < HALF
    dim_fits = dim < DIM
    head = (lane % PARTS) * HEADS + packed % HEADS
    packs = (packed < ROWS * HEADS) & (head < GROUP)
    q_heads = q + (kv_head * GROUP + head) * q_head_stride
    k_head = k_pages + kv_head * k_head_stride
    v_head = v_pages + kv_head * v_head_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, DIM_PADDED], 0.0, tl.float32)
    segment = find_segment(starts, num_segments, work)
    while work < end:
        tile_and_entry = tl.load(segments + segment)
        row_tile = tile_and_entry // num_entries
        entry = tile_and_entry % num_entries
        segment_start = tl.load(starts + segment)
        count = tl.minimum(end, tl.load(starts + segment + 1)) - work

        row = row_tile * ROWS + packed // HEADS
        index = row - tl.load(first_row + entry)
        reads = packs & (row < num_q_rows) & (index >= 0) & (index < tl.load(num_rows + entry))
        pair = tl.load(first_pair + entry) + index
        low = tl.load(lo + pair, mask=reads, other=0)
        high = tl.load(hi + pair, mask=reads, other=0)
        high = tl.where(low < high, high, 0)
        length = tl.max(high, axis=0)
        first = tl.min(tl.where(high > 0, low, FAR), axis=0) // BLOCK_N + work - segment_start

        # Loaded and turned anew for each segment: a live copy of q would spill.
        q_at = q_heads[:, None] + row[:, None].to(tl.int64) * q_row_stride + half[None, :]
        q_mask = reads[:, None] & half_fits[None, :]
        q1 = tl.load(q_at, mask=q_mask, other=0.0).to(tl.float32)
        q2 = tl.load(q_at + HALF, mask=q_mask, other=0.0).to(tl.float32)
        angle = pair[:, None].to(tl.int64) * HALF + half[None, :]
        c = tl.load(cos + angle, mask=q_mask, other=1.0)
        s = tl.load(sin + angle, mask=q_mask, other=0.0)
        turned1 = (q1 * c - q2 * s).to(COMPUTE)
        turned2 = (q2 * c + q1 * s).to(COMPUTE)

        for token_tile in tl.range(first, first + count):
            token = token_tile * BLOCK_N + token_offset
            written = token < length
            page = tl.load(
                pages + entry * pages_stride + token // PAGE_SIZE, mask=written, other=0
            ).to(tl.int64)
            slot = token % PAGE_SIZE
            k_at = k_head + page * k_page_stride + slot * k_slot_stride
            k_mask = written[:, None] & half_fits[None, :]
            k1 = tl.load(k_at[:, None] + half[None, :], mask=k_mask, other=0.0).to(COMPUTE)
            k2 = tl.load(k_at[:, None] + half[None, :] + HALF, mask=k_mask, other=0.0).to(COMPUTE)
            score = tl.dot(turned1, tl.trans(k1), input_precision=PRECISION)
            score = tl.dot(turned2, tl.trans(k2), score, input_precision=PRECISION) * scale
            if HAS_SCALES:
                scale_at = page * scale_page_stride + slot * scale_slot_stride
                scale_at += kv_head * scale_head_stride
                score *= tl.load(k_scales + scale_at, mask=written, other=0.0)[None, :]
            if HAS_SOFTCAP:
                # tanh, by an exponential that stays exact at both ends.
                score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
            seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
            score = tl.where(seen, score * LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1))
            pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - pivot[:, None])
            fade = tl.exp2(top - pivot)
            norm = norm * fade + tl.sum(weight, axis=1)
            if HAS_SCALES:
                weight *= tl.load(v_scales + scale_at, mask=written, other=0.0)[None, :]
            v_at = v_head + page * v_page_stride + slot * v_slot_stride
            v_mask = written[:, None] & dim_fits[None, :]
            v = tl.load(v_at[:, None] + dim[None, :], mask=v_mask, other=0.0).to(COMPUTE)
            acc = tl.dot(weight.to(COMPUTE), v, acc * fade[:, None], input_precision=PRECISION)
            top = new_top

        work += count
        segment += 1
        next_segment = tl.load(segments + segment, mask=work < end, other=0)
        if (work == end) | (next_segment // num_entries != row_tile):
            # Along one program's share, and from program to program, the sum only grows.
            place = (lane * num_slots + program + row_tile).to(tl.int64) * BLOCK_M + packed
            full = norm > 0
            safe_norm = tl.where(full, norm, 1.0)
            lse = tl.where(full, top * LN_2 + tl.log(safe_norm), float("-inf"))
            tl.store(lses + place, lse)
            out_at = outs + place[:, None] * DIM + dim[None, :]
            tl.store(out_at, acc / safe_norm[:, None], mask=dim_fits[None, :])
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            norm = tl.full([BLOCK_M], 0.0, tl.float32)
            acc = tl.full([BLOCK_M, DIM_PADDED], 0.0, tl.float32)
