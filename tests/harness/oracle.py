"""Reference attention in float64: every key rotated to its position in the view, one softmax.

Knows no pages, block tables or deltas. The tests compare kernels and engine with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Seen(NamedTuple):
    """A block as one query token sees it.

    Args:
        keys: rotated at block-local positions, ``[S, KH, D]``.
        values: ``[S, KH, D]``.
        lo: first visible token.
        hi: one past the last visible token.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lo: int
    hi: int


def rotate(x: torch.Tensor, by: torch.Tensor | float, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate dims ``(d, d + D/2)`` of ``x`` by ``by * inv_freq[d]``, as complex numbers.

    Args:
        x: ``[S, H, D]``.
        by: positions, ``[S]``, or one for all tokens.
        inv_freq: ``[D/2]``, 0 in dims that do not rotate.
    """
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    position = torch.as_tensor(by, dtype=torch.float64).reshape(-1, 1, 1)
    pairs = pairs * torch.exp(1j * position * inv_freq.double())
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attend(
    q: torch.Tensor,
    view: Sequence[tuple[int, Seen]],
    inv_freq: torch.Tensor,
    own_start: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one query token's output ``[H, D]`` and lse ``[H]``, float64.

    Args:
        q: rotated at its position in its own block, ``[H, D]``.
        view: every block with the position in the view at which it starts.
        inv_freq: the layer's inverse frequencies, ``[D/2]``.
        own_start: position in the view at which the token's own block starts.
        scale: factor on attention scores.
        softcap: as in `block_attention`.
        sinks: as in `block_attention`, ``[H]``.
    """
    num_heads = q.shape[0]
    query = rotate(q[None], own_start, inv_freq)[0]
    keys, values = [], []
    for start, seen in view:
        positions = torch.full((seen.keys.shape[0],), float(start))
        keys.append(rotate(seen.keys, positions, inv_freq)[seen.lo : max(seen.lo, seen.hi)])
        values.append(seen.values.double()[seen.lo : max(seen.lo, seen.hi)])
    group = num_heads // keys[0].shape[1]
    key = torch.cat(keys).repeat_interleave(group, dim=1)  # [S, H, D]
    value = torch.cat(values).repeat_interleave(group, dim=1)
    score = torch.einsum("shd,hd->hs", key, query) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    sink = score[:, :0] if sinks is None else sinks.double()[:, None]
    total = torch.cat((score, sink), dim=1)
    if total.shape[1] == 0:
        nothing = torch.full((num_heads,), -math.inf, dtype=torch.float64)
        return torch.zeros(q.shape, dtype=torch.float64), nothing
    weight = torch.softmax(total, dim=1)[:, : score.shape[1]]
    return torch.einsum("hs,shd->hd", weight, value), torch.logsumexp(total, dim=1)
