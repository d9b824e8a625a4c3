"""Rank the most probable tokens of each row of logits, with the log-sum-exp over all of them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Ranking(NamedTuple):
    """The top-k of each row.

    Args:
        score: top-k logits, scaled: ``(logit - the row's largest) / temperature``, descending.
            float32 ``[R, K]``.
        token: their token ids, int64 ``[R, K]``.
        norm: log-sum-exp of the row's logits at temperature 1. float32 ``[R]``.
        total: log-sum-exp of the scaled logits of the whole vocabulary. float32 ``[R]``.
    """

    score: torch.Tensor
    token: torch.Tensor
    norm: torch.Tensor
    total: torch.Tensor


def rank(logits: torch.Tensor, temperature: torch.Tensor, count: int) -> Ranking:
    """Rank the ``count`` largest logits of each row.

    Args:
        logits: float32 ``[R, V]``.
        temperature: float32 ``[R]``, above 0.
        count: at most V.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - largest) / temperature[:, None]
    score, token = torch.topk(scaled, count, dim=-1)
    total = torch.logsumexp(scaled, dim=-1)
    return Ranking(score, token, torch.logsumexp(logits, dim=-1), total)
