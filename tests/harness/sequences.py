"""Attention over one sequence by its definition, in place of libraries that run only on a GPU."""

from __future__ import annotations

import torch


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as strictly as the libraries do: one dtype, and each query token sees a key.

    A window that is open after the diagonal wants at least as many keys as query tokens: flash-attn
    closes it after as many tokens as there are keys.
    """
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    rows, keys = q.shape[0], k.shape[0]
    diagonal = torch.arange(rows)[:, None] + keys - rows  # ends in the last row and key
    key = torch.arange(keys)
    assert window[0] < 0 or window[1] == 0 or rows <= keys
    before, after = (rows + keys if side < 0 else side for side in window)
    seen = (key >= diagonal - before) & (key <= diagonal + after)
    assert seen.any(dim=1).all()
    group = q.shape[1] // k.shape[1]
    every_k, every_v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q.float(), every_k) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hts,shd->thd", score.softmax(dim=-1), every_v)
    return out.to(q.dtype), score.logsumexp(dim=-1).T  # lse is strided, as theirs is
