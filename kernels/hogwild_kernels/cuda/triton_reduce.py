# pyright: reportGeneralTypeIssues=false
"""The reduce kernel: merges the partial outputs of a few query rows by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_q_rows", "num_slots"])
def reduce_kernel(
    outs,  # [KH * PARTS, slots, BLOCK_M, D] float32
    lses,  # [KH * PARTS, slots, BLOCK_M] float32
    tile_starts,  # [R + 1]
    share,  # [1]
    sinks,  # [H]
    out,  # [T, H, D]
    lse,  # [T, H]
    num_q_rows,
    num_slots,
    num_heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ROWS: tl.constexpr = BLOCK_M // HEADS
    CHUNKS: tl.constexpr = BLOCK_M // BLOCK_R
    row_tile = tl.program_id(0) // CHUNKS
    lane = tl.program_id(1)
    packed = tl.program_id(0) % CHUNKS * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_tile * ROWS + packed // HEADS
    in_group = lane % PARTS * HEADS + packed % HEADS
    head = lane // PARTS * GROUP + in_group
    exists = (packed < ROWS * HEADS) & (row < num_q_rows) & (in_group < GROUP)
    size = tl.load(share)
    start = tl.load(tile_starts + row_tile)
    stop = tl.load(tile_starts + row_tile + 1)
    first = start // size
    last = tl.where(start < stop, (stop - 1) // size + 1, first)

    dim = tl.arange(0, DIM_PADDED)
    dim_fits = dim < DIM
    acc = tl.full([BLOCK_R, DIM_PADDED], 0.0, tl.float32)
    if HAS_SINKS:
        running_max = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        running_sum = tl.full([BLOCK_R], 1.0, tl.float32)
    else:
        running_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
        running_sum = tl.full([BLOCK_R], 0.0, tl.float32)
    for begin in tl.range(first, last, BLOCK_P):
        program = begin + tl.arange(0, BLOCK_P)
        mask = (program < last)[:, None] & exists[None, :]
        place = (lane * num_slots + row_tile + program).to(tl.int64)[:, None] * BLOCK_M + packed
        part_lse = tl.load(lses + place, mask=mask, other=float("-inf"))
        new_max = tl.maximum(running_max, tl.max(part_lse, axis=0))
        # Subtract 0 while nothing is visible: -inf - -inf is NaN.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp(part_lse - pivot[None, :])
        rescale = tl.exp(running_max - pivot)
        part = tl.load(
            outs + place[:, :, None] * DIM + dim,
            mask=mask[:, :, None] & dim_fits,
            other=0.0,
        )
        acc = acc * rescale[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        running_sum = running_sum * rescale + tl.sum(weight, axis=0)
        running_max = new_max
    safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
    place = row.to(tl.int64) * num_heads + head
    out_mask = exists[:, None] & dim_fits[None, :]
    tl.store(out + place[:, None] * DIM + dim[None, :], acc / safe_sum[:, None], mask=out_mask)
    log_sum = tl.where(running_sum > 0, running_max + tl.log(safe_sum), float("-inf"))
    tl.store(lse + place, log_sum, mask=exists)
