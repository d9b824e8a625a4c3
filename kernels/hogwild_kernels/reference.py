"""The plain implementation: short, slow, obviously right. Every other one is held to it.

Attention over blocks is ordinary attention over the concatenation of all blocks, except that a
row's query is rotated anew for each block (Hogwild! Inference, arXiv 2504.06261, section 3).
"""

from __future__ import annotations

import torch

from hogwild_kernels.table import BlockTable, KVScales


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dims ``(d, d + D/2)`` of ``x`` by the angle of pair ``d``, in float32.

    Args:
        x: ``[N, H, D]``.
        cos: ``[N, D/2]``.
        sin: ``[N, D/2]``.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_heads, _ = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = num_heads // num_kv_heads
    scores, values = [], []
    for entry in range(table.pages.shape[0]):
        count, row, pair = (
            int(t[entry]) for t in (table.num_rows, table.first_row, table.first_pair)
        )
        rows, pairs = slice(row, row + count), slice(pair, pair + count)
        hi = torch.where(table.lo[pairs] < table.hi[pairs], table.hi[pairs], 0)
        length = int(hi.max()) if count else 0
        pages = table.pages[entry, : -(-length // page_size)].long()
        keys = _read(k_pages, scales and scales.keys, pages, length)  # [S, KH, D]
        query = rotate(q[rows], table.cos[pairs], table.sin[pairs])  # [R, H, D]
        query = query.unflatten(1, (num_kv_heads, group))
        score = torch.einsum("rkgd,skd->rkgs", query, keys).flatten(1, 2) * scale  # [R, H, S]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        token = torch.arange(length, device=q.device)
        seen = (token >= table.lo[pairs, None]) & (token < hi[:, None])  # [R, S]
        score = score.masked_fill(~seen[:, None], -torch.inf)
        full = score.new_full((num_rows, num_heads, length), -torch.inf)
        full[rows] = score
        scores.append(full)
        values.append(_read(v_pages, scales and scales.values, pages, length))
    if sinks is not None:
        scores.append(sinks.float()[None, :, None].expand(num_rows, -1, 1))
        values.append(torch.zeros((1, *v_pages.shape[2:]), device=q.device))
    score, value = torch.cat(scores, dim=-1), torch.cat(values)  # [T, H, S], [S, KH, D]
    lse = torch.logsumexp(score, dim=-1)  # [T, H]
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    weight = weight.unflatten(1, (num_kv_heads, group))
    out = torch.einsum("tkgs,skd->tkgd", weight, value).flatten(1, 2)
    return out.to(q.dtype), lse


def _read(
    pages: torch.Tensor, scales: torch.Tensor | None, numbers: torch.Tensor, length: int
) -> torch.Tensor:
    """The first tokens on the pages with these numbers, float32 ``[length, KH, D]``."""
    tokens = pages[numbers].flatten(0, 1)[:length].float()
    return tokens if scales is None else tokens * scales[numbers].flatten(0, 1)[:length, :, None]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in fp8 with one scale a vector, such that the largest meets the largest fp8 number.

    Args:
        x: ``[..., D]``.

    Returns:
        float8_e4m3fn ``[..., D]`` and float32 ``[...]``.
    """
    scale = x.float().abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
    scale = scale.masked_fill(scale == 0, 1.0)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    page_size = k_pages.shape[1]
    kept = slots >= 0
    page, offset = slots[kept] // page_size, slots[kept] % page_size
    for index, (x, pages) in enumerate(((k, k_pages), (v, v_pages))):
        stored = x[kept]
        if scales is not None:
            stored, scales[index][page, offset] = quantize(stored)
        pages[page, offset] = stored.to(pages.dtype)


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
    page_size = k_pages.shape[2]
    origin = source // page_size, source % page_size
    goal = target // page_size, target % page_size
    for layer in range(k_pages.shape[0]):
        keys = k_pages[layer][origin]
        if scales is None:
            moved = rotate(keys, cos, sin)
        else:
            keys = keys.float() * scales.keys[layer][origin][..., None]
            moved, scales.keys[layer][goal] = quantize(rotate(keys, cos, sin))
            scales.values[layer][goal] = scales.values[layer][origin]
        k_pages[layer][goal] = moved.to(k_pages.dtype)
        v_pages[layer][goal] = v_pages[layer][origin]


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logsumexp(lses.float(), dim=0)  # [T, H]
    weight = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))  # [P, T, H]
    out = (outs.float() * weight[..., None]).sum(dim=0)
    return out.to(outs.dtype), lse
