"""Logits to tokens, one row a writer. The order of filters is that of transformers' ``generate``.

Noise is counter-based: a draw depends on the seed, the writer and the token's index alone, never on
what else runs. The vocabulary is not sorted where its most probable tokens decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

import torch

from hogwild_engine.step.ranking import Ranking, rank
from hogwild_engine.text.constraint import Constraint, forbid
from hogwild_kernels.cpu import c_backend

MIN_TEMPERATURE = 1e-6
"""Below it the most probable token is taken: float32 could not tell the others' shares from 0."""

CANDIDATES = (64, 1024)
"""How many of the most probable tokens are looked at: first, and where a nucleus reaches further.
The vocabulary is sorted where neither is enough. native_ranking.h has the same numbers.
"""


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
        return self.temperature < MIN_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn, and some of them never."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def unfiltered(self) -> bool:
        """Whether any token may be drawn."""
        return not self.greedy and not self.filters


@dataclass(slots=True)
class SamplingRow:
    """What decides one row's token beside its logits.

    Args:
        sampling: the session's settings.
        writer: number of the writer within its session.
        index: how many tokens the writer has drawn before.
        seen: tokens that the repetition penalty is put on.
        banned: tokens that must not come.
        constraint: the grammar that the text is bound to.
    """

    sampling: Sampling
    writer: int
    index: int
    seen: Collection[int] = field(default_factory=tuple)
    banned: Collection[int] = field(default_factory=tuple)
    constraint: Constraint | None = None


class SampledToken(NamedTuple):
    """A token and its probability at temperature 1, before any filter but bans and grammars."""

    token: int
    probability: float


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token a row.

    Args:
        logits: ``[R, V]``; penalties, bans and grammars may be applied in place.
        draws: one a row.

    Raises:
        FloatingPointError: a row's largest logit is not finite.
    """
    if any(draw.sampling.repetition_penalty != 1 for draw in draws):
        logits = logits.float()
        _penalise(logits, draws)
    forbid(logits, [draw.constraint for draw in draws])
    compiled = logits.device.type == "cpu" and logits.dtype in c_backend.DTYPES
    if compiled and c_backend.build_error() is None:
        drawn = _draw_in_c(logits.contiguous(), draws)
    else:
        drawn = _draw(logits.float(), draws)
    if any(isnan(probability) for _, probability in drawn):
        raise FloatingPointError("the model's logits are not finite")
    return drawn


def _draw_in_c(logits: torch.Tensor, draws: Sequence[SamplingRow]) -> list[SampledToken]:
    settings, banned = [_in_numbers(draw) for draw in draws], [draw.banned for draw in draws]
    tokens, probabilities = c_backend.draw(logits, settings, banned)
    drawn = [SampledToken(*pair) for pair in zip(tokens, probabilities, strict=True)]
    undecided = [row for row, token in enumerate(tokens) if token < 0]
    if undecided:
        rest = _draw(logits[undecided].float(), [draws[row] for row in undecided])
        for row, later in zip(undecided, rest, strict=True):
            drawn[row] = later
    return drawn


def _in_numbers(draw: SamplingRow) -> tuple[float, float, float, float, float]:
    """Temperature, top-k, top-p, min-p and the noise, as `c_backend.draw` takes them."""
    s = draw.sampling
    if s.greedy:
        return (0.0, 0, 1.0, 0.0, 0.0)
    return (s.temperature, s.top_k, s.top_p, s.min_p, uniform(s.seed, draw.writer, draw.index))


def _draw(logits: torch.Tensor, draws: Sequence[SamplingRow]) -> list[SampledToken]:
    """On any device, and where the compiled code gives up. ``logits`` are float32."""
    vocabulary = logits.shape[1]
    _ban(logits, [frozenset(i for i in draw.banned if 0 <= i < vocabulary) for draw in draws])
    drawn: dict[int, SampledToken] = {}
    ways = [_way(draw.sampling, vocabulary) for draw in draws]
    for way in dict.fromkeys(ways):  # equal logits rank by how many are ranked
        rows = [row for row, other in enumerate(ways) if other == way]
        part = logits if len(rows) == len(draws) else logits[rows]
        drawn |= zip(rows, _draw_alike(part, [draws[row] for row in rows], *way), strict=True)
    return [drawn[row] for row in range(len(draws))]


_Pick = Callable[[torch.Tensor, Ranking, Sequence[SamplingRow]], torch.Tensor]


def _way(sampling: Sampling, vocabulary: int) -> tuple[_Pick, int]:
    """How a row is drawn, and how many of its tokens are ranked first."""
    if sampling.filters:
        return _pick_filtered, _width(min(sampling.top_k, vocabulary), vocabulary)
    return (_pick_unfiltered if sampling.unfiltered else _pick_first), 1


def _draw_alike(
    logits: torch.Tensor, draws: Sequence[SamplingRow], pick: _Pick, width: int
) -> Iterator[SampledToken]:
    temperatures = [1.0 if draw.sampling.greedy else draw.sampling.temperature for draw in draws]
    ranking = rank(logits, _row(temperatures, logits), width)
    tokens = pick(logits, ranking, draws)
    score = logits.gather(1, tokens[:, None])[:, 0]
    probabilities = torch.exp(score - ranking.norm)
    probabilities[~ranking.norm.isfinite()] = torch.nan
    return map(SampledToken, tokens.tolist(), probabilities.tolist())


def _width(least: int, vocabulary: int) -> int:
    """How many of the most probable tokens are looked at: the next number that is no less."""
    return next((width for width in CANDIDATES if least <= width < vocabulary), vocabulary)


def _penalise(logits: torch.Tensor, draws: Sequence[SamplingRow]) -> None:
    for row, draw in enumerate(draws):
        penalty = draw.sampling.repetition_penalty
        if penalty != 1 and draw.seen:
            index = torch.tensor(sorted(draw.seen), device=logits.device)
            score = logits[row, index]
            logits[row, index] = torch.where(score < 0, score * penalty, score / penalty)


def _ban(logits: torch.Tensor, banned: Sequence[frozenset[int]]) -> None:
    """Most rows share their bans: one operation for all that do."""
    for ids in dict.fromkeys(banned):
        if ids:
            rows = [row for row, theirs in enumerate(banned) if theirs == ids]
            places = [torch.tensor(part, device=logits.device) for part in (rows, list(ids))]
            logits[places[0][:, None], places[1]] = -torch.inf


# Each row goes the way of its own settings: what runs beside it must not change its token.


def _pick_first(
    logits: torch.Tensor, ranking: Ranking, draws: Sequence[SamplingRow]
) -> torch.Tensor:
    return ranking.token[:, 0]


def _pick_filtered(
    logits: torch.Tensor, ranking: Ranking, draws: Sequence[SamplingRow]
) -> torch.Tensor:
    vocabulary = logits.shape[1]
    picked = _pick(ranking, draws, vocabulary)
    undecided = (picked < 0).nonzero()[:, 0].tolist()
    if undecided:
        rest = [draws[row] for row in undecided]
        temperature = _row([draw.sampling.temperature for draw in rest], logits)
        width = _width(ranking.score.shape[1] + 1, vocabulary)
        more = rank(logits[undecided], temperature, width)
        picked[undecided] = _pick_filtered(logits[undecided], more, rest)
    return picked


def _pick_unfiltered(
    logits: torch.Tensor, ranking: Ranking, draws: Sequence[SamplingRow]
) -> torch.Tensor:
    temperature = _column([draw.sampling.temperature for draw in draws], logits)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    mass = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    choice = torch.searchsorted(mass, _noise(draws, logits) * mass[:, -1:], right=True)
    return choice[:, 0].clamp_(max=logits.shape[1] - 1)


def _pick(ranking: Ranking, draws: Sequence[SamplingRow], vocabulary: int) -> torch.Tensor:
    """Sample from the ranked tokens; -1 where more of them are needed to decide."""
    settings = [draw.sampling for draw in draws]
    score, width = ranking.score, ranking.score.shape[1]
    top_k = torch.tensor(
        [min(s.top_k or vocabulary, vocabulary) for s in settings], device=score.device
    )[:, None]
    limited = top_k <= width
    place = torch.arange(width, device=score.device)
    whole = ranking.whole[:, None]
    if any(s.top_k for s in settings):
        score = score.masked_fill(place >= top_k, -torch.inf)
        whole = torch.where(limited, torch.logsumexp(score, dim=-1, keepdim=True), whole)
    probability = torch.exp(score - whole)
    before = probability.cumsum(dim=-1) - probability
    top_p = _column([s.top_p for s in settings], score)
    min_p = _column([s.min_p for s in settings], score)
    kept = (before < top_p) & (probability >= min_p * probability[:, :1]) & (place < top_k)
    kept[:, 0] = True
    mass = torch.where(kept, probability, 0.0).cumsum(dim=-1)
    decided = limited[:, 0] | ~kept[:, -1] | (width == vocabulary)
    choice = torch.searchsorted(mass, _noise(draws, score) * mass[:, -1:], right=True)
    last = kept.sum(dim=-1, keepdim=True) - 1
    picked = ranking.token.gather(1, torch.minimum(choice, last))[:, 0]
    return torch.where(decided, picked, -1)


def _noise(draws: Sequence[SamplingRow], like: torch.Tensor) -> torch.Tensor:
    return _column([uniform(d.sampling.seed, d.writer, d.index) for d in draws], like)


def _row(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


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
