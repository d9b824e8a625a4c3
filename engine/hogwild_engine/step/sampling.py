"""Sample tokens from logits, one row for each writer. Filters run in the order of ``generate``.

The random numbers are counter-based: a token's number is a hash of the seed, the writer and the
token's index, so a token does not depend on what else runs. The vocabulary is sorted only if its
most probable tokens do not decide.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from hogwild_engine.api.config import MAX_INT64, SamplingParams
from hogwild_engine.step.ranking import Ranking, rank
from hogwild_engine.text.constraint import Constraint, apply_token_mask
from hogwild_kernels.cpu import c_backend

MIN_TEMPERATURE = 1e-6
"""Sampling is greedy below it: float32 rounds the probabilities of all other tokens to 0."""

CANDIDATES = (64, 1024)
"""How many of the most probable tokens are ranked: first, and if a filter keeps more than these.
If it keeps more again, the whole vocabulary is sorted. The C code has the same numbers.
"""


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """`SamplingParams` with every value set."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int

    @classmethod
    def resolve(cls, asked: SamplingParams, default: SamplingParams) -> ResolvedSampling:
        """Return ``asked`` with defaults for ``None``, and a random seed if it has none."""
        values = {field.name: getattr(asked, field.name) for field in fields(cls)}
        for name, value in values.items():
            values[name] = getattr(default, name) if value is None else value
        if asked.seed is None:
            values["seed"] = secrets.randbelow(MAX_INT64)
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(slots=True)
class SamplingRow:
    """How to sample a token from one row of logits.

    Args:
        sampling: the session's settings.
        writer: number of the writer within its session.
        index: how many tokens the writer has sampled before.
        seen: tokens that the repetition penalty applies to.
        banned: tokens with probability 0.
        constraint: the grammar that the writer's text must follow.
    """

    sampling: ResolvedSampling
    writer: int
    index: int
    seen: Collection[int] = field(default_factory=tuple)
    banned: Collection[int] = field(default_factory=tuple)
    constraint: Constraint | None = None

    @property
    def uniform(self) -> float:
        """The row's random number in [0, 1)."""
        return uniform(self.sampling.seed, self.writer, self.index)


class SampledToken(NamedTuple):
    """A token and its probability at temperature 1, before any filter but bans and grammars.

    The probability is NaN if the row's largest logit is not finite; the token means nothing then.
    """

    token: int
    probability: float


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token from each row. No row depends on another one.

    Args:
        logits: ``[R, V]``; bans and grammars may be applied in place.
        rows: one for each row of logits.
    """
    if any(row.sampling.repetition_penalty != 1 for row in rows):
        logits = logits.to(torch.float32, copy=True)
        _apply_repetition_penalty(logits, rows)
    apply_token_mask(logits, [row.constraint for row in rows])
    compiled = logits.device.type == "cpu" and logits.dtype in c_backend.DTYPES
    if compiled and c_backend.build_error() is None:
        return _sample_in_c(logits.contiguous(), rows)
    return _sample_in_torch(logits.float(), rows)


def _sample_in_c(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    settings, banned = [_settings(row) for row in rows], [row.banned for row in rows]
    tokens, probabilities = c_backend.sample(logits, settings, banned)
    sampled = [SampledToken(*pair) for pair in zip(tokens, probabilities, strict=True)]
    undecided = [index for index, token in enumerate(tokens) if token < 0]
    if undecided:
        rest = _sample_in_torch(logits[undecided].float(), [rows[index] for index in undecided])
        for index, token in zip(undecided, rest, strict=True):
            sampled[index] = token
    return sampled


def _settings(row: SamplingRow) -> tuple[float, float, float, float, float]:
    """Temperature, top-k, top-p, min-p and the uniform number, as the C code takes them."""
    s = row.sampling
    if s.greedy:
        return (0.0, 0, 1.0, 0.0, 0.0)
    return (s.temperature, s.top_k, s.top_p, s.min_p, row.uniform)


# PyTorch: on GPUs, without a C compiler, and for rows with more than 1,024 candidates


def _sample_in_torch(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample from float32 logits."""
    vocabulary = logits.shape[1]
    _ban(logits, [frozenset(i for i in row.banned if 0 <= i < vocabulary) for row in rows])
    sampled: dict[int, SampledToken] = {}
    methods = [_method(row.sampling, vocabulary) for row in rows]
    # torch.topk orders equal logits differently for another k: a row's k must not depend on others.
    for method in dict.fromkeys(methods):
        group = [index for index, other in enumerate(methods) if other == method]
        part = logits if len(group) == len(rows) else logits[group]
        tokens = _sample_group(part, [rows[index] for index in group], *method)
        sampled |= zip(group, tokens, strict=True)
    return [sampled[index] for index in range(len(rows))]


_Method = Callable[[torch.Tensor, Ranking, Sequence[SamplingRow]], torch.Tensor]


def _method(sampling: ResolvedSampling, vocabulary: int) -> tuple[_Method, int]:
    """Return the function that samples the token, and how many tokens to rank for it."""
    if sampling.greedy:
        return _sample_greedy, 1
    if sampling.is_filtered:
        return _sample_filtered, _num_candidates(min(sampling.top_k, vocabulary), vocabulary)
    return _sample_unfiltered, 1


def _num_candidates(minimum: int, vocabulary: int) -> int:
    return next((count for count in CANDIDATES if minimum <= count < vocabulary), vocabulary)


def _sample_group(
    logits: torch.Tensor, rows: Sequence[SamplingRow], sample_tokens: _Method, count: int
) -> Iterator[SampledToken]:
    """Sample rows that share a method; ``count`` tokens of each are ranked. logits: ``[R, V]``."""
    temperatures = [1.0 if row.sampling.greedy else row.sampling.temperature for row in rows]
    ranking = rank(logits, _tensor(temperatures, logits), count)
    tokens = sample_tokens(logits, ranking, rows)
    score = logits.gather(1, tokens[:, None])[:, 0]
    probabilities = torch.exp(score - ranking.norm)
    probabilities[~ranking.norm.isfinite()] = torch.nan
    return map(SampledToken, tokens.tolist(), probabilities.tolist())


def _apply_repetition_penalty(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    for index, row in enumerate(rows):
        penalty = row.sampling.repetition_penalty
        if penalty != 1 and row.seen:
            seen = torch.tensor(list(row.seen), device=logits.device)
            score = logits[index, seen]
            logits[index, seen] = torch.where(score < 0, score * penalty, score / penalty)


def _ban(logits: torch.Tensor, banned: Sequence[frozenset[int]]) -> None:
    """Set banned logits to -inf, with one operation for all rows that have the same bans."""
    for ids in dict.fromkeys(banned):
        if ids:
            group = [index for index, other in enumerate(banned) if other == ids]
            at = [torch.tensor(part, device=logits.device) for part in (group, list(ids))]
            logits[at[0][:, None], at[1]] = -torch.inf


def _sample_greedy(
    logits: torch.Tensor, ranking: Ranking, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    return ranking.token[:, 0]


def _sample_filtered(
    logits: torch.Tensor, ranking: Ranking, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    """Sample from the ranked tokens; rows that these leave undecided are ranked deeper."""
    vocabulary = logits.shape[1]
    tokens = _sample_ranked(ranking, rows, vocabulary)
    undecided = (tokens < 0).nonzero()[:, 0].tolist()
    if undecided:
        rest = [rows[index] for index in undecided]
        temperature = _tensor([row.sampling.temperature for row in rest], logits)
        count = _num_candidates(ranking.score.shape[1] + 1, vocabulary)
        longer = rank(logits[undecided], temperature, count)
        tokens[undecided] = _sample_filtered(logits[undecided], longer, rest)
    return tokens


def _sample_unfiltered(
    logits: torch.Tensor, ranking: Ranking, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    temperature = _column([row.sampling.temperature for row in rows], logits)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    cumulative = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    return _inverse_cdf(cumulative, rows)[:, 0].clamp_(max=logits.shape[1] - 1)


def _sample_ranked(ranking: Ranking, rows: Sequence[SamplingRow], vocabulary: int) -> torch.Tensor:
    """Sample from the ranked tokens; -1 if the filters may keep tokens that are not ranked."""
    settings = [row.sampling for row in rows]
    score, count = ranking.score, ranking.score.shape[1]
    top_k = torch.tensor(
        [min(s.top_k or vocabulary, vocabulary) for s in settings], device=score.device
    )[:, None]
    all_ranked = top_k <= count
    rank_of = torch.arange(count, device=score.device)
    total = ranking.total[:, None]
    if any(s.top_k for s in settings):
        # top-p and min-p take probabilities among the top-k, as in transformers.
        score = score.masked_fill(rank_of >= top_k, -torch.inf)
        total = torch.where(all_ranked, torch.logsumexp(score, dim=-1, keepdim=True), total)
    probability = torch.exp(score - total)
    # Top-p keeps a token if the more probable ones together stay below top_p.
    preceding = probability.cumsum(dim=-1) - probability
    top_p = _column([s.top_p for s in settings], score)
    min_p = _column([s.min_p for s in settings], score)
    kept = (preceding < top_p) & (probability >= min_p * probability[:, :1]) & (rank_of < top_k)
    kept[:, 0] = True
    cumulative = torch.where(kept, probability, 0.0).cumsum(dim=-1)
    decided = all_ranked[:, 0] | ~kept[:, -1] | (count == vocabulary)
    last = kept.sum(dim=-1, keepdim=True) - 1
    choice = torch.minimum(_inverse_cdf(cumulative, rows), last)
    return torch.where(decided, ranking.token.gather(1, choice)[:, 0], -1)


def _inverse_cdf(cumulative: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Map each row's uniform number to an index, ``[R, 1]``; rounding may return one too many."""
    at = _column([row.uniform for row in rows], cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)


def _tensor(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return _tensor(values, like)[:, None]


def uniform(seed: int, writer: int, index: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments (SplitMix64, Steele et al.,
    OOPSLA 2014).
    """
    state = _mix(_mix(_mix(seed) + writer) + index)
    return (state >> 40) / (1 << 24)


def _mix(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
