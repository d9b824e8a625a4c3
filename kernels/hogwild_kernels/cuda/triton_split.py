"""The split kernel: each program attends over an equal share of all token tiles.

Stream-K over the work list (see triton_work.py): a program keeps one running softmax while its
share stays in one row tile, and stores one partial output for each row tile that it touches.

    for each segment of the share:        # (row tile, block read)
        rotate the tile's queries for this block
        for each token tile of the segment:
            running softmax over its keys
        store the partial output if the next segment has another row tile

The split kernel runs once per (key/value head, part of its query heads) and program.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MAX_INT32 = tl.constexpr(2**31 - 1)


@triton.jit
def find_segment(starts, num_segments, work):
    """Return the segment that holds token tile ``work``: the last that starts at or before it."""
    low = num_segments * 0
    high = num_segments
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= work
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


# These sizes vary from batch to batch: specialised on them, the kernel would compile anew.
@triton.jit(
    do_not_specialize=["num_q_rows", "num_reads", "num_segments", "num_slots", "pages_stride"]
)
def split_kernel(
    q,  # [T, H, D]
    k_pages,  # [num_pages, PAGE_SIZE, KH, D]
    v_pages,  # [num_pages, PAGE_SIZE, KH, D]
    pages,  # [B, max_pages]
    first_row,  # [B]
    num_rows,  # [B]
    first_pair,  # [B]
    lo,  # [N]
    hi,  # [N]
    cos,  # [N, D/2]
    sin,  # [N, D/2]
    segments,  # [R * B]
    starts,  # [R * B + 1]
    share,  # [1]
    outs,  # [KH * PARTS, slots, BLOCK_M, D] float32
    lses,  # [KH * PARTS, slots, BLOCK_M] float32
    num_q_rows,
    num_reads,
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
    # Keys and queries are loaded in halves of D: rotation pairs dims d and d + D/2.
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

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, DIM_PADDED], 0.0, tl.float32)
    segment = find_segment(starts, num_segments, work)
    while work < end:
        tile_and_read = tl.load(segments + segment)
        row_tile = tile_and_read // num_reads
        read = tile_and_read % num_reads
        segment_start = tl.load(starts + segment)
        count = tl.minimum(end, tl.load(starts + segment + 1)) - work

        row = row_tile * ROWS + packed // HEADS
        index = row - tl.load(first_row + read)
        reads = packs & (row < num_q_rows) & (index >= 0) & (index < tl.load(num_rows + read))
        pair = tl.load(first_pair + read) + index
        low = tl.load(lo + pair, mask=reads, other=0)
        high = tl.load(hi + pair, mask=reads, other=0)
        high = tl.where(low < high, high, 0)
        length = tl.max(high, axis=0)
        first = tl.min(tl.where(high > 0, low, MAX_INT32), axis=0) // BLOCK_N + work - segment_start

        # Load and rotate q anew for each segment: kept alive, it would spill registers.
        q_at = q_heads[:, None] + row[:, None].to(tl.int64) * q_row_stride + half[None, :]
        q_mask = reads[:, None] & half_fits[None, :]
        q1 = tl.load(q_at, mask=q_mask, other=0.0).to(tl.float32)
        q2 = tl.load(q_at + HALF, mask=q_mask, other=0.0).to(tl.float32)
        angle = pair[:, None].to(tl.int64) * HALF + half[None, :]
        c = tl.load(cos + angle, mask=q_mask, other=1.0)
        s = tl.load(sin + angle, mask=q_mask, other=0.0)
        rotated1 = (q1 * c - q2 * s).to(COMPUTE)
        rotated2 = (q2 * c + q1 * s).to(COMPUTE)

        for token_tile in tl.range(first, first + count):
            token = token_tile * BLOCK_N + token_offset
            written = token < length
            page = tl.load(
                pages + read * pages_stride + token // PAGE_SIZE, mask=written, other=0
            ).to(tl.int64)
            slot = token % PAGE_SIZE
            k_at = k_head + page * k_page_stride + slot * k_slot_stride
            k_mask = written[:, None] & half_fits[None, :]
            k1 = tl.load(k_at[:, None] + half[None, :], mask=k_mask, other=0.0).to(COMPUTE)
            k2 = tl.load(k_at[:, None] + half[None, :] + HALF, mask=k_mask, other=0.0).to(COMPUTE)
            score = tl.dot(rotated1, tl.trans(k1), input_precision=PRECISION)
            score = tl.dot(rotated2, tl.trans(k2), score, input_precision=PRECISION) * scale
            if HAS_SOFTCAP:
                # tanh, by an exponential that stays exact at both ends.
                score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
            seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
            score = tl.where(seen, score * LOG2_E, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(score, axis=1))
            # Subtract 0 while nothing is visible: -inf - -inf is NaN.
            pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp2(score - pivot[:, None])
            rescale = tl.exp2(running_max - pivot)
            running_sum = running_sum * rescale + tl.sum(weight, axis=1)
            v_at = v_head + page * v_page_stride + slot * v_slot_stride
            v_mask = written[:, None] & dim_fits[None, :]
            v = tl.load(v_at[:, None] + dim[None, :], mask=v_mask, other=0.0).to(COMPUTE)
            acc = tl.dot(weight.to(COMPUTE), v, acc * rescale[:, None], input_precision=PRECISION)
            running_max = new_max

        work += count
        segment += 1
        next_segment = tl.load(segments + segment, mask=work < end, other=0)
        if (work == end) | (next_segment // num_reads != row_tile):
            # Unique: program + row_tile grows along a share and from program to program.
            place = (lane * num_slots + program + row_tile).to(tl.int64) * BLOCK_M + packed
            full = running_sum > 0
            safe_sum = tl.where(full, running_sum, 1.0)
            lse = tl.where(full, running_max * LN_2 + tl.log(safe_sum), float("-inf"))
            tl.store(lses + place, lse)
            out_at = outs + place[:, None] * DIM + dim[None, :]
            tl.store(out_at, acc / safe_sum[:, None], mask=dim_fits[None, :])
            running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            running_sum = tl.full([BLOCK_M], 0.0, tl.float32)
            acc = tl.full([BLOCK_M, DIM_PADDED], 0.0, tl.float32)
