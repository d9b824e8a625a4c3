# pyright: reportCallIssue=false
"""Attention over blocks by Triton: one split and one reduce kernel for all query tokens of a batch.

Runs on CUDA tensors, and on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1 in the
environment before Triton is imported). Never waits for the device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton import knobs

from hogwild_kernels.api import States
from hogwild_kernels.cuda.triton_config import Config, choose, heads_per_tile
from hogwild_kernels.cuda.triton_reduce import reduce_kernel
from hogwild_kernels.cuda.triton_split import split_kernel
from hogwild_kernels.cuda.triton_work import work_list
from hogwild_kernels.table import BlockTable

INTERPRETED: bool = knobs.runtime.interpret
"""Whether the kernels of this process run in Triton's interpreter."""

REDUCE_ROWS, REDUCE_PARTIALS = 4, 8
"""Query rows per program of the reduce kernel, and partial outputs that it loads at once."""

_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def block_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    config: Config | None = None,
    num_programs: int | None = None,
) -> States:
    """Attend as `hogwild_kernels.api.AttentionBackend.attend` says.

    Args:
        config: tile sizes; by default chosen from the shapes.
        num_programs: programs per key/value head; by default as many as fill the device.
    """
    num_rows, num_heads, dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = num_heads // num_kv_heads
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty((num_rows, num_heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
    if num_rows == 0:
        return out, lse
    # In bfloat16 the interpreter's dot returns wrong numbers without an error.
    compute = k_pages.dtype
    if INTERPRETED and compute is torch.bfloat16:
        compute = torch.float32
    active = num_rows if table.num_active is None else table.num_active
    config = config or choose(active, group, dim, compute.itemsize)
    heads = heads_per_tile(group, config.block_m)
    lanes = num_kv_heads * -(-group // heads)
    num_programs = num_programs or max(1, _num_sms(q.device) * config.programs_per_sm // lanes)
    work = work_list(table, num_rows, config.block_m // heads, config, num_programs)
    num_tiles = work.tile_starts.shape[0] - 1
    num_slots = num_programs + num_tiles - 1
    shape = (lanes, num_slots, config.block_m)
    outs = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    dim_padded = triton.next_power_of_2(dim)
    with torch.cuda.device_of(q):
        if table.pages.shape[0]:
            split_kernel[(lanes, num_programs)](
                q,
                k_pages,
                v_pages,
                table.pages,
                table.first_row,
                table.num_rows,
                table.first_pair,
                table.lo,
                table.hi,
                table.cos,
                table.sin,
                work.segments,
                work.starts,
                work.share,
                outs,
                lses,
                num_rows,
                table.pages.shape[0],
                work.segments.shape[0],
                num_slots,
                scale,
                softcap or 0.0,
                *q.stride()[:2],
                *k_pages.stride()[:3],
                *v_pages.stride()[:3],
                table.pages.stride(0),
                PAGE_SIZE=page_size,
                GROUP=group,
                HEADS=heads,
                DIM=dim,
                HALF_PADDED=max(16, triton.next_power_of_2(dim // 2)),
                DIM_PADDED=max(16, dim_padded),
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                COMPUTE=_TRITON_DTYPE[compute],
                PRECISION="ieee",
                HAS_SOFTCAP=softcap is not None,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        reduce_kernel[(num_tiles * config.block_m // REDUCE_ROWS, lanes)](
            outs,
            lses,
            work.tile_starts,
            work.share,
            sinks,
            out,
            lse,
            num_rows,
            num_slots,
            num_heads,
            GROUP=group,
            HEADS=heads,
            DIM=dim,
            DIM_PADDED=dim_padded,
            BLOCK_M=config.block_m,
            BLOCK_R=REDUCE_ROWS,
            BLOCK_P=REDUCE_PARTIALS,
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )
    return out, lse


@lru_cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
