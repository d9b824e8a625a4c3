"""Attention over blocks by torch's operators on the CPU: each key is read once for all workers.

Query heads of one key/value head are folded together with the query tokens, so grouped heads are
never expanded. Consecutive pages are read in place, as one slice. What depends on the table alone
is computed once for all layers and kept on the table.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from hogwild_kernels.api import AttentionSpec, States
from hogwild_kernels.reference import ReferenceBackend, merge_states, rotate
from hogwild_kernels.table import BlockRead, BlockTable


class TorchBackend(ReferenceBackend):
    """Attention by ``scaled_dot_product_attention`` over slices of the cache."""

    name = "cpu"

    def supports(self, spec: AttentionSpec) -> str | None:
        return None if spec.device.type == "cpu" else "tensors on the CPU"

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
        num_rows, num_heads, dim = q.shape
        num_kv_heads = k_pages.shape[2]
        group = num_heads // num_kv_heads
        key = ("cpu", num_rows, *k_pages.shape[:2])
        plan = table.derived.get(key)
        if plan is None:
            plan = table.derived[key] = _plan(table, num_rows, *k_pages.shape[:2])
        query = q[plan.row_of_pair]
        if plan.rotates:
            query = rotate(query, table.cos, table.sin)
        query = query.to(k_pages.dtype).view(-1, num_kv_heads, group, dim)
        query = query.transpose(0, 1).contiguous()  # [KH, N, G, D]
        keys, values = (
            pages.flatten(0, 1).transpose(0, 1) for pages in (k_pages, v_pages)
        )  # [KH, slots, D]
        shape = (plan.num_partials + (sinks is not None), num_rows, num_kv_heads, group)
        outs = torch.zeros((*shape, dim), dtype=torch.float32)
        lses = torch.full(shape, -torch.inf)
        for first_slot, num_tokens, partial, rows, pairs, mask in plan.segments:
            tokens = slice(first_slot, first_slot + num_tokens)
            folded = query[:, pairs].flatten(1, 2)  # [KH, R·G, D]
            out, lse = _attend(folded, keys[:, tokens], values[:, tokens], mask, scale, softcap)
            by_row = (num_kv_heads, -1, group)
            outs[partial, rows] = out.view(*by_row, dim).transpose(0, 1).float()
            lses[partial, rows] = lse.view(by_row).transpose(0, 1)
        outs, lses = outs.flatten(2, 3), lses.flatten(2, 3)
        if sinks is not None:
            lses[-1] = sinks.float()
        out, lse = merge_states(outs, lses)
        return out.to(q.dtype), lse


class Segment(NamedTuple):
    """Consecutive pages of a block, and the query tokens that see some of their tokens."""

    first_slot: int
    num_tokens: int
    partial: int  # index among the partial outputs of these query tokens
    rows: torch.Tensor | slice
    pairs: torch.Tensor | slice
    mask: torch.Tensor | None  # bool [R, S]; None if every query token sees every token


class Plan(NamedTuple):
    """A table as segments. A query token has up to ``num_partials`` outputs to merge."""

    segments: list[Segment]
    num_partials: int
    row_of_pair: torch.Tensor
    rotates: bool


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> States:
    """Attend over one segment. q ``[KH, R·G, D]``, k, v ``[KH, S, D]``, mask bool ``[R, S]``."""
    if mask is not None:
        mask = mask.repeat_interleave(q.shape[1] // mask.shape[0], dim=0)
    if softcap is None:
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
            bias = bias[None, None]
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


def _plan(table: BlockTable, num_rows: int, num_pages: int, page_size: int) -> Plan:
    """Cut every block read into segments; leave out query tokens that see nothing of one."""
    reads = table.checked_reads(num_rows, num_pages, page_size)
    segments: list[Segment] = []
    num_partials = [0] * num_rows
    row_of_pair: list[int] = []
    for read in reads:
        first_pair = len(row_of_pair)
        row_of_pair += range(read.first_row, read.first_row + len(read.hi))
        lo = read.lo(table.window)
        for first_slot, start, stop in _slices(read, lo, page_size):
            index = [i for i, hi in enumerate(read.hi) if start < hi and lo[i] < min(stop, hi)]
            if not index:
                continue
            rows = [read.first_row + i for i in index]
            partial = max(num_partials[row] for row in rows)
            for row in rows:
                num_partials[row] = partial + 1
            mask = None
            if any(lo[i] > start or read.hi[i] < stop for i in index):
                token = torch.arange(start, stop)
                first, last = (torch.tensor([x[i] for i in index]) for x in (lo, read.hi))
                mask = (token >= first[:, None]) & (token < last[:, None])
            whole = len(index) == len(read.hi)
            of_q, of_pairs = (
                slice(first, first + len(index)) if whole else torch.tensor(index) + first
                for first in (read.first_row, first_pair)
            )
            segments.append(Segment(first_slot, stop - start, partial, of_q, of_pairs, mask))
    return Plan(
        segments,
        max(1, *num_partials),
        torch.tensor(row_of_pair, dtype=torch.int64),
        rotates=any(any(read.deltas) for read in reads),
    )


def _slices(read: BlockRead, lo: list[int], page_size: int) -> list[tuple[int, int, int]]:
    """Return the first slot and the token range of each stretch of consecutive pages."""
    length = max((hi for low, hi in zip(lo, read.hi, strict=True) if low < hi), default=0)
    pages = read.pages[: -(-length // page_size)]
    if not pages:
        return []
    breaks = [i + 1 for i, (page, after) in enumerate(pairwise(pages)) if after != page + 1]
    return [
        (pages[start] * page_size, start * page_size, min(end * page_size, length))
        for start, end in zip([0, *breaks], [*breaks, len(pages)], strict=True)
    ]
