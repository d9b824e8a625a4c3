"""Logits to tokens, one row a writer. The order of filters is that of transformers' ``generate``.

Noise is counter-based: a draw depends on the seed, the writer and the token's index alone, never on
what else runs. The vocabulary is not sorted where its most probable tokens decide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

CANDIDATES = 256
"""Rows whose nucleus lies within this many most probable tokens need no sort of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`SamplingParams` with every value decided."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(slots=True)
class Draw:
    """What decides one row's token beside its logits.

    Args:
        sampling: the session's settings.
        writer: number of the writer within its session.
        index: how many tokens the writer has drawn before.
        seen: tokens that the repetition penalty is put on.
        banned: tokens that must not come.
    """

    sampling: Sampling
    writer: int
    index: int
    seen: Collection[int] = field(default_factory=tuple)
    banned: Collection[int] = field(default_factory=tuple)


class Drawn(NamedTuple):
    """A token and its probability at temperature 1, before any filter but bans."""

    token: int
    probability: float


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token a row.

    Args:
        logits: float32 ``[R, V]``; penalties and bans are applied in place.
        draws: one a row.
    """
    _penalise(logits, draws)
    for row, draw in enumerate(draws):
        if draw.banned:
            logits[row, list(draw.banned)] = -torch.inf
    norm = torch.logsumexp(logits, dim=-1)
    if not bool(torch.isfinite(norm).all()):
        raise FloatingPointError("the model's logits are not finite")
    tokens = logits.argmax(dim=-1)
    free = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if free:
        tokens[free] = _sample(logits[free], [draws[row] for row in free])
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    probabilities = torch.exp(chosen - norm)
    return [Drawn(*pair) for pair in zip(tokens.tolist(), probabilities.tolist(), strict=True)]


def _penalise(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    for row, draw in enumerate(draws):
        penalty = draw.sampling.repetition_penalty
        if penalty != 1 and draw.seen:
            index = torch.tensor(sorted(draw.seen), device=logits.device)
            score = logits[row, index]
            logits[row, index] = torch.where(score < 0, score * penalty, score / penalty)


def _sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    settings = [draw.sampling for draw in draws]
    temperature = _column([s.temperature for s in settings], logits)
    noise = _column([uniform(d.sampling.seed, d.writer, d.index) for d in draws], logits)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    picked = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    # Each row goes the way of its own settings: what runs beside it must not change its token.
    filtered = [row for row, s in enumerate(settings) if s.filters]
    unfiltered = [row for row, s in enumerate(settings) if not s.filters]
    if unfiltered:
        picked[unfiltered] = _pick_unfiltered(logits[unfiltered], noise[unfiltered])
    if filtered:
        kept = [settings[row] for row in filtered]
        picked[filtered] = _pick_filtered(logits[filtered], kept, noise[filtered])
    return picked


def _pick_filtered(
    logits: torch.Tensor, settings: Sequence[Sampling], noise: torch.Tensor
) -> torch.Tensor:
    width = min(CANDIDATES, logits.shape[1])
    if any(s.top_k > width for s in settings):
        width = logits.shape[1]
    picked = _pick(logits, settings, noise, width)
    undecided = (picked < 0).nonzero()[:, 0].tolist()
    if undecided:
        rest = [settings[row] for row in undecided]
        picked[undecided] = _pick(logits[undecided], rest, noise[undecided], logits.shape[1])
    return picked


def _pick_unfiltered(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    mass = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    choice = torch.searchsorted(mass, noise * mass[:, -1:], right=True)
    return choice[:, 0].clamp_(max=logits.shape[1] - 1)


def _pick(
    logits: torch.Tensor, settings: Sequence[Sampling], noise: torch.Tensor, width: int
) -> torch.Tensor:
    """Draw from the ``width`` most probable tokens; -1 where more of them are needed to decide."""
    vocabulary = logits.shape[1]
    score, token = torch.topk(logits, width, dim=-1)  # [R, width], descending
    top_k = torch.tensor([s.top_k or vocabulary for s in settings], device=logits.device)[:, None]
    limited = top_k <= width
    whole = torch.logsumexp(logits, dim=-1, keepdim=True)
    place = torch.arange(width, device=logits.device)
    score = score.masked_fill(place >= top_k, -torch.inf)
    whole = torch.where(limited, torch.logsumexp(score, dim=-1, keepdim=True), whole)
    probability = torch.exp(score - whole)
    before = probability.cumsum(dim=-1) - probability
    top_p = _column([s.top_p for s in settings], logits)
    min_p = _column([s.min_p for s in settings], logits)
    kept = (before < top_p) & (probability >= min_p * probability[:, :1]) & (place < top_k)
    kept[:, 0] = True
    mass = torch.where(kept, probability, 0.0).cumsum(dim=-1)
    decided = limited[:, 0] | ~kept[:, -1] | (width == vocabulary)
    choice = torch.searchsorted(mass, noise * mass[:, -1:], right=True)
    last = kept.sum(dim=-1, keepdim=True) - 1
    picked = token.gather(1, torch.minimum(choice, last))[:, 0]
    return torch.where(decided, picked, -1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def uniform(seed: int, writer: int, index: int) -> float:
    """A number in [0, 1) that depends on its arguments alone (SplitMix64, Steele et al., OOPSLA
    2014).
    """
    state = _mix(_mix(_mix(seed) + writer) + index)
    return (state >> 40) / (1 << 24)


def _mix(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
