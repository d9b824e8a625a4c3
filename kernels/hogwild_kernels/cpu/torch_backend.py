"""Attention over blocks on the CPU: each block's keys are read once for all rows of its session.

Query rows of one key/value head are folded together with the workers, so grouped heads are never
expanded. Runs of consecutive pages are read in place. Everything that depends on the table alone is
computed once and kept on it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from hogwild_kernels import reference
from hogwild_kernels.table import BlockTable

write_kv = reference.write_kv
move_kv = reference.move_kv
merge_states = reference.merge_states


class Segment(NamedTuple):
    """A run of consecutive pages of one entry, and the rows that see something of it."""

    first_slot: int
    num_tokens: int
    ordinal: int  # which partial of its rows this one is
    rows: torch.Tensor | slice
    pairs: torch.Tensor | slice
    mask: torch.Tensor | None  # bool [R, S]; None where every row sees all of the run


class Reading(NamedTuple):
    segments: list[Segment]
    num_partials: int
    row_of_pair: torch.Tensor
    rotates: bool


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
    num_rows, num_heads, dim = q.shape
    num_kv_heads = k_pages.shape[2]
    group = num_heads // num_kv_heads
    reading = table.derived.get("cpu")
    if reading is None:
        reading = table.derived["cpu"] = _reading(table, k_pages.shape[1])
    query = q[reading.row_of_pair]
    if reading.rotates:
        query = reference.rotate(query, table.cos, table.sin)
    query = query.to(k_pages.dtype).view(-1, num_kv_heads, group, dim)
    query = query.transpose(0, 1).contiguous()  # [KH, N, G, D]
    keys, values = (
        pages.flatten(0, 1).transpose(0, 1) for pages in (k_pages, v_pages)
    )  # [KH, slots, D]
    num_partials = reading.num_partials + (sinks is not None)
    shape = (num_partials, num_rows, num_kv_heads, group)
    outs = torch.zeros((*shape, dim), dtype=torch.float32)
    lses = torch.full(shape, -torch.inf)
    for segment in reading.segments:
        tokens = slice(segment.first_slot, segment.first_slot + segment.num_tokens)
        rows = query[:, segment.pairs]  # [KH, R, G, D]
        out, lse = _attend(
            rows.flatten(1, 2), keys[:, tokens], values[:, tokens], segment.mask, scale, softcap
        )
        shape = (num_kv_heads, -1, group)
        outs[segment.ordinal, segment.rows] = out.view(*shape, dim).transpose(0, 1).float()
        lses[segment.ordinal, segment.rows] = lse.view(shape).transpose(0, 1)
    outs, lses = outs.flatten(2, 3), lses.flatten(2, 3)
    if sinks is not None:
        lses[-1] = sinks.float()
    out, lse = merge_states(outs, lses)
    return out.to(q.dtype), lse


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over one run. q ``[KH, R·G, D]``, k, v ``[KH, S, D]``, mask bool ``[R, S]``."""
    if mask is not None:
        mask = mask.repeat_interleave(q.shape[1] // mask.shape[0], dim=0)
    if softcap is None:
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)[
                None, None
            ]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], attn_mask=bias, scale=scale
        )
        return out[0], lse[0]
    score = torch.matmul(q.float(), k.float().transpose(1, 2)) * scale
    score = softcap * torch.tanh(score / softcap)
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    return torch.matmul(torch.exp(score - lse[..., None]), v.float()), lse


def _reading(table: BlockTable, page_size: int) -> Reading:
    """Turn the table into runs of pages and masks, dropping rows that see nothing of a run."""
    segments: list[Segment] = []
    partials_of_row: dict[int, int] = {}
    columns = (table.pages, table.first_row, table.num_rows, table.first_pair)
    for pages, first_row, num_rows, first_pair in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        pairs = slice(first_pair, first_pair + num_rows)
        lo = table.lo[pairs]
        hi = torch.where(lo < table.hi[pairs], table.hi[pairs], 0)
        length = int(hi.max()) if num_rows else 0
        for start, end in _runs(pages[: max(0, -(-length // page_size))]):
            offset, stop = start * page_size, min(end * page_size, length)
            seen = (lo < stop) & (hi > offset)
            if not seen.any():
                continue
            rows, pair_index = _select(seen, first_row), _select(seen, first_pair)
            token = torch.arange(offset, stop)
            mask = (token >= lo[seen, None]) & (token < hi[seen, None])
            members = torch.arange(first_row, first_row + num_rows)[seen].tolist()
            ordinal = max(partials_of_row.get(row, 0) for row in members)
            partials_of_row.update(dict.fromkeys(members, ordinal + 1))
            segments.append(
                Segment(
                    pages[start] * page_size,
                    stop - offset,
                    ordinal,
                    rows,
                    pair_index,
                    None if bool(mask.all()) else mask,
                )
            )
    num_partials = max(partials_of_row.values(), default=1)
    return Reading(segments, num_partials, table.row_of_pair(), bool((table.sin != 0).any()))


def _select(seen: torch.Tensor, first: int) -> torch.Tensor | slice:
    if bool(seen.all()):
        return slice(first, first + seen.shape[0])
    return seen.nonzero().squeeze(1) + first


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """Split a page list into index ranges whose pages are consecutive."""
    if not pages:
        return []
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(pages)) if b != a + 1]
    return list(zip([0, *breaks], [*breaks, len(pages)], strict=True))
