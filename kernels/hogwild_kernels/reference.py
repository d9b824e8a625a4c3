"""The plain backend: short, slow, obviously right. Every other backend is tested against it.

Attention over blocks is ordinary attention over the concatenation of all blocks, except that a
query is rotated anew for each block (Hogwild! Inference, arXiv 2504.06261, section 3).
"""

from __future__ import annotations

import torch

from hogwild_kernels.api import AttentionBackend, AttentionSpec, States
from hogwild_kernels.table import BlockTable


class ReferenceBackend(AttentionBackend):
    """Attention in plain PyTorch, for any device and dtype. See `AttentionBackend` for shapes."""

    name = "reference"

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

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
        num_rows, num_heads, _ = q.shape
        page_size, num_kv_heads = k_pages.shape[1:3]
        group = num_heads // num_kv_heads
        scores, values = [], []
        for read in range(table.pages.shape[0]):
            count, row, pair = (
                int(column[read]) for column in (table.num_rows, table.first_row, table.first_pair)
            )
            rows, pairs = slice(row, row + count), slice(pair, pair + count)
            hi = torch.where(table.lo[pairs] < table.hi[pairs], table.hi[pairs], 0)
            length = int(hi.max()) if count else 0
            numbers = table.pages[read, : -(-length // page_size)].long()
            keys = k_pages[numbers].flatten(0, 1)[:length].float()  # [S, KH, D]
            query = rotate(q[rows], table.cos[pairs], table.sin[pairs])  # [R, H, D]
            query = query.unflatten(1, (num_kv_heads, group))
            score = torch.einsum("rkgd,skd->rkgs", query, keys).flatten(1, 2) * scale  # [R, H, S]
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            token = torch.arange(length, device=q.device)
            visible = (token >= table.lo[pairs, None]) & (token < hi[:, None])  # [R, S]
            score = score.masked_fill(~visible[:, None], -torch.inf)
            full = score.new_full((num_rows, num_heads, length), -torch.inf)
            full[rows] = score
            scores.append(full)
            values.append(v_pages[numbers].flatten(0, 1)[:length].float())
        if sinks is not None:
            scores.append(sinks.float()[None, :, None].expand(num_rows, -1, 1))
            values.append(torch.zeros((1, *v_pages.shape[2:]), device=q.device))
        score, value = torch.cat(scores, dim=-1), torch.cat(values)  # [T, H, S], [S, KH, D]
        lse = torch.logsumexp(score, dim=-1)  # [T, H]
        weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        weight = weight.unflatten(1, (num_kv_heads, group))
        out = torch.einsum("tkgs,skd->tkgd", weight, value).flatten(1, 2)
        return out.to(q.dtype), lse

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        page_size = k_pages.shape[1]
        written = slots >= 0
        place = slots[written] // page_size, slots[written] % page_size
        k_pages[place] = k[written].to(k_pages.dtype)
        v_pages[place] = v[written].to(v_pages.dtype)

    def _move(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        page_size = k_pages.shape[2]
        old = source // page_size, source % page_size
        new = target // page_size, target % page_size
        for keys, values in zip(k_pages, v_pages, strict=True):
            keys[new] = rotate(keys[old], cos, sin).to(keys.dtype)
            values[new] = values[old]


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


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> States:
    """Merge attention over disjoint key sets into attention over their union.

    Args:
        outs: partial outputs, each normalised by its own softmax. ``[P, T, H, D]``.
        lses: their natural log-sum-exps, float32 ``[P, T, H]``.

    Returns:
        Output ``[T, H, D]`` and log-sum-exp ``[T, H]``.
    """
    lse = torch.logsumexp(lses.float(), dim=0)  # [T, H]
    weight = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))  # [P, T, H]
    out = (outs.float() * weight[..., None]).sum(dim=0)
    return out.to(outs.dtype), lse
