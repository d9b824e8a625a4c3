"""The most probable tokens of each row, and what all of them weigh together."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Ranking(NamedTuple):
    """Rows of logits in short.

    Args:
        score: distance from the row's largest logit, over its temperature, of its largest ones in
            falling order. float32 ``[R, K]``.
        token: whose they are, int64 ``[R, K]``.
        norm: log-sum-exp of the row at temperature 1. float32 ``[R]``.
        whole: log of the sum of ``exp(score)`` over the whole vocabulary. float32 ``[R]``.
    """

    score: torch.Tensor
    token: torch.Tensor
    norm: torch.Tensor
    whole: torch.Tensor


def rank(logits: torch.Tensor, temperature: torch.Tensor, count: int) -> Ranking:
    """Rank the ``count`` largest of each row.

    Args:
        logits: float32 ``[R, V]``.
        temperature: float32 ``[R]``, above 0.
        count: at most V.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - largest) / temperature[:, None]
    score, token = torch.topk(scaled, count, dim=-1)
    whole = torch.logsumexp(scaled, dim=-1)
    return Ranking(score, token, torch.logsumexp(logits, dim=-1), whole)
