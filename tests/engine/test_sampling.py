"""Sampling against transformers' logits processors: the same tokens, the same probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import isnan
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hogwild_engine.step import sampling
from hogwild_engine.step.ranking import rank
from hogwild_engine.step.sampling import CANDIDATES, ResolvedSampling, SamplingRow, sample, uniform
from hogwild_kernels.cpu import c_backend

NEUTRAL = ResolvedSampling(1.0, 1.0, 0, 0.0, 1.0, seed=0)
VOCABULARY = 2_003  # not a multiple of the vector width
NUM_SAMPLES = 4_000

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top-k of one": {"top_k": 1},
    "top-k": {"top_k": 20},
    "top-k that is the candidates": {"top_k": CANDIDATES[0]},
    "top-k beyond the first candidates": {"top_k": CANDIDATES[0] + 50},
    "top-k beyond all candidates": {"top_k": CANDIDATES[1] + 50},
    "top-k beyond all candidates, top-p": {"top_k": CANDIDATES[1] + 50, "top_p": 0.5},
    "top-k beyond the vocabulary": {"top_k": 10 * VOCABULARY},
    "top-p": {"top_p": 0.9},
    "top-p of almost nothing": {"top_p": 1e-6},
    "top-p beyond the candidates": {"top_p": 0.97, "temperature": 2.0},
    "top-p of almost all": {"top_p": 0.9999, "temperature": 2.0},
    "min-p": {"min_p": 0.05},
    "min-p beyond the candidates": {"min_p": 0.001, "temperature": 3.0},
    "min-p of all": {"min_p": 1.0},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
    },
    "all beyond the candidates": {
        "temperature": 2.0,
        "top_k": 900,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
    },
}


def some_logits(seed: int = 0) -> torch.Tensor:
    """Return ``[V]``, no two alike."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def sweep(
    monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, setting: ResolvedSampling, **options: Any
) -> torch.Tensor:
    """Return the tokens sampled from one row at the uniform numbers 0, 1/N, 2/N …"""
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "uniform", lambda _seed, _writer, index: index / NUM_SAMPLES)
        rows = [SamplingRow(setting, 0, index, **options) for index in range(NUM_SAMPLES)]
        sampled = sample(logits.repeat(NUM_SAMPLES, 1), rows)
    return torch.tensor([token for token, _ in sampled])


def processed(
    logits: torch.Tensor, setting: ResolvedSampling, seen: Sequence[int] = ()
) -> torch.Tensor:
    """Return the logits after the processors of transformers' ``generate``, ``[V]``."""
    steps: list[Any] = []
    if setting.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(setting.repetition_penalty))
    steps.append(TemperatureLogitsWarper(setting.temperature))
    if setting.top_k:
        steps.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1:
        steps.append(TopPLogitsWarper(setting.top_p))
    if setting.min_p:
        steps.append(MinPLogitsWarper(setting.min_p))
    ids: Any = torch.tensor([list(seen)], dtype=torch.int64)
    row: Any = logits[None].clone()
    scores: Any = LogitsProcessorList(steps)(ids, row)
    return scores[0]


CASES = [*((name, 0.0) for name in SETTINGS), *((name, -9.0) for name in ("penalty", "reward"))]
"""With an offset of all logits: the repetition penalty treats negative logits differently."""


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("name", "shift"), CASES)
def test_tokens_are_sampled_with_transformers_probabilities(
    monkeypatch: pytest.MonkeyPatch, name: str, shift: float, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(c_backend, "build_error", lambda: "no C compiler")
    setting = replace(NEUTRAL, **SETTINGS[name])
    logits, seen = some_logits() + shift, range(0, VOCABULARY, 7)
    probability = torch.softmax(processed(logits, setting, seen).double(), -1)
    tokens = sweep(monkeypatch, logits, setting, seen=seen)
    count = torch.bincount(tokens, minlength=VOCABULARY)
    assert not count[probability == 0].any()
    assert float((count - probability * NUM_SAMPLES).abs().max()) < 1.01
    likely = probability > 1.1 / NUM_SAMPLES
    assert count[likely].all()


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("seed", range(3))
def test_temperature_zero_is_the_most_probable_token(name: str, seed: int) -> None:
    setting = replace(NEUTRAL, **{**SETTINGS[name], "temperature": 0.0})
    logits, seen = some_logits(seed), [int(some_logits(seed).argmax())]
    wanted = processed(logits, replace(setting, temperature=1.0), seen).argmax()
    [sampled] = sample(logits[None].clone(), [SamplingRow(setting, 0, 0, seen=seen)])
    assert sampled.token == int(wanted)


def test_a_token_depends_only_on_seed_writer_and_index() -> None:
    """Not on the other rows, nor on its place among them."""
    settings = [replace(NEUTRAL, **options) for options in SETTINGS.values()]
    rows = [
        SamplingRow(replace(setting, seed=seed), writer, index)
        for setting in settings
        for seed, writer, index in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
    ]
    logits = torch.stack([some_logits(i) for i in range(len(rows))])
    alone = [sample(x[None].clone(), [row])[0].token for x, row in zip(logits, rows, strict=True)]
    together = sample(logits.clone(), rows)
    assert [token for token, _ in together] == alone
    backwards = sample(logits.flip(0).clone(), rows[::-1])
    assert [token for token, _ in backwards[::-1]] == alone


@pytest.mark.parametrize("change", ["seed", "writer", "index"])
def test_seed_writer_and_index_each_change_the_uniform_number(change: str) -> None:
    base = {"seed": 5, "writer": 2, "index": 9}
    values = {uniform(**{**base, change: value}) for value in range(200)}
    assert len(values) == 200


@pytest.mark.parametrize("change", ["seed", "writer", "index"])
def test_seed_writer_and_index_each_change_the_sampled_token(change: str) -> None:
    sampled = []
    for value in range(8):
        place = {"seed": 5, "writer": 2, "index": 9, change: value}
        setting = replace(NEUTRAL, seed=place["seed"])
        row = SamplingRow(setting, place["writer"], place["index"])
        sampled += sample(torch.zeros(1, 1000), [row])
    assert len({token for token, _ in sampled}) > 4


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    keys = product(range(20), range(5), range(100))
    values = torch.tensor([uniform(*key) for key in keys])
    assert 0 <= float(values.min()) < float(values.max()) < 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert float((counts - 500).abs().max()) < 5 * 500**0.5


def test_neighbouring_seeds_writers_and_indices_share_no_sequence() -> None:
    def row(seed: int, writer: int) -> list[float]:
        return [uniform(seed, writer, index) for index in range(50)]

    rows = [value for seed in range(10) for writer in range(10) for value in row(seed, writer)]
    assert len(set(rows)) > 0.999 * len(rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
def test_banned_tokens_are_never_sampled(
    monkeypatch: pytest.MonkeyPatch, temperature: float, options: dict[str, Any]
) -> None:
    logits = some_logits()
    banned = set(logits.topk(30).indices.tolist())
    setting = replace(NEUTRAL, temperature=temperature, **options)
    tokens = sweep(monkeypatch, logits, setting, banned=banned)
    assert banned.isdisjoint(tokens.tolist())
    wanted = logits.clone()
    wanted[list(banned)] = -torch.inf
    assert int(wanted.argmax()) in tokens.tolist()


def test_the_only_token_that_is_not_banned_is_sampled_with_any_settings() -> None:
    for options in SETTINGS.values():
        setting = replace(NEUTRAL, **options)
        banned = set(range(VOCABULARY)) - {77}
        [sampled] = sample(some_logits()[None], [SamplingRow(setting, 0, 0, banned=banned)])
        assert sampled.token == 77
        assert sampled.probability == pytest.approx(1.0)


def test_probabilities_are_those_before_any_filter() -> None:
    logits = some_logits()
    plain = torch.softmax(logits, -1)
    for options in ({"temperature": 0.0}, {"top_k": 3}, {"temperature": 0.3, "top_p": 0.5}):
        [sampled] = sample(logits[None].clone(), [SamplingRow(replace(NEUTRAL, **options), 0, 0)])
        assert sampled.probability == pytest.approx(float(plain[sampled.token]), rel=1e-4)


def test_a_small_vocabulary_needs_no_candidates_beyond_it() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    rows = [SamplingRow(replace(NEUTRAL, top_k=50, top_p=0.99), 0, index) for index in range(50)]
    tokens = {token for token, _ in sample(logits.repeat(50, 1), rows)}
    assert tokens == {0, 1, 2}


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_smallest_and_largest_uniform_numbers_sample_kept_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, number: float
) -> None:
    setting = replace(NEUTRAL, **SETTINGS[name])
    fixed: Callable[..., float] = lambda *_: number  # noqa: E731
    monkeypatch.setattr(sampling, "uniform", fixed)
    for seed in range(5):
        logits = some_logits(seed)
        [sampled] = sample(logits[None].clone(), [SamplingRow(setting, 0, 0)])
        assert processed(logits, setting, ())[sampled.token] > -torch.inf


# Ranking


@pytest.mark.parametrize("count", [1, 2, 17, 100, 1001])
def test_a_ranking_has_the_sorted_top_k_and_both_log_sum_exps(count: int) -> None:
    logits = torch.randn(5, 1001, generator=torch.Generator().manual_seed(1)) * 4
    logits[1, 3:1000:7] = -torch.inf
    logits[2] += 80
    temperature = torch.tensor([1.0, 0.3, 0.6, 2.0, 5.0])
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    ranking = rank(logits, temperature, count)
    torch.testing.assert_close(ranking.score, scaled.sort(-1, descending=True)[0][:, :count])
    finite = ranking.score.isfinite()
    where = scaled.gather(1, ranking.token)
    torch.testing.assert_close(where[finite], ranking.score[finite])
    torch.testing.assert_close(ranking.norm, logits.logsumexp(-1))
    torch.testing.assert_close(ranking.total, scaled.logsumexp(-1))


def test_a_temperature_next_to_zero_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for temperature in (1e-60, 1e-45, 1e-7):
        sampling = ResolvedSampling(temperature, 1.0, 0, 0.0, 1.0, 5)
        assert sample(logits.clone(), [SamplingRow(sampling, 0, 0)])[0].token == 1


needs_native = pytest.mark.skipif(c_backend.build_error() is not None, reason="no C compiler")


@needs_native
@pytest.mark.parametrize(("options", "kept"), [({"top_k": 8}, 8), ({"temperature": 0.0}, 1)])
def test_equal_logits_are_ranked_by_token_id(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kept: int
) -> None:
    logits = torch.zeros(100)
    logits[50:] = 1
    tokens = sweep(monkeypatch, logits, replace(NEUTRAL, **options))
    assert tokens.unique().tolist() == list(range(50, 50 + kept))


@needs_native
@pytest.mark.parametrize("name", list(SETTINGS))
def test_bfloat16_logits_sample_the_tokens_of_the_same_float32_logits(name: str) -> None:
    setting, rounded = replace(NEUTRAL, **SETTINGS[name]), some_logits().bfloat16()
    rows = [SamplingRow(setting, 0, index, seen=[3, 5], banned=[index]) for index in range(100)]
    sampled = sample(rounded.repeat(100, 1), rows)
    assert sampled == sample(rounded.float().repeat(100, 1), rows)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["nothing", "top-p", "top-k beyond all candidates", "all"])
def test_logits_that_are_not_finite_show_in_their_row_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: float, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(c_backend, "build_error", lambda: "no C compiler")
    logits = torch.stack([some_logits(), some_logits()])
    logits[1, 5 if bad > 0 or bad != bad else slice(None)] = bad
    for temperature in (0.0, 0.7):
        setting = replace(NEUTRAL, **{**SETTINGS[name], "temperature": temperature})
        alone = sample(logits[:1].clone(), [SamplingRow(setting, 0, 0)])
        fine, broken = sample(logits.clone(), [SamplingRow(setting, 0, 0)] * 2)
        assert [fine] == alone
        assert isnan(broken.probability)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.95}, {"top_k": 2**63 - 1, "top_p": 0.99}])
def test_bans_outside_of_the_vocabulary_and_a_huge_top_k_are_harmless(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(c_backend, "build_error", lambda: "no C compiler")
    memory = torch.zeros(3, VOCABULARY)  # flat: top-p keeps more tokens than are ranked
    rows = [SamplingRow(replace(NEUTRAL, **options), 0, 0, banned={-1, 7, VOCABULARY, 10**12})]
    sample(memory[1:2], rows)
    assert (memory[[0, 2]] == 0).all()
    assert memory[1, 7] == -torch.inf or not compiled
    assert (memory[1, [0, -1]] == 0).all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_the_order_of_equal_logits_does_not_depend_on_other_rows(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(c_backend, "build_error", lambda: "no C compiler")
    wide = SamplingRow(replace(NEUTRAL, top_k=CANDIDATES[0] + 50), 9, 0)
    for seed in range(40):
        logits = some_logits(seed).bfloat16().float()
        row = SamplingRow(replace(NEUTRAL, seed=seed, **options), 0, 0)
        [alone] = sample(logits[None].clone(), [row])
        assert sample(logits.repeat(2, 1), [row, wide])[0] == alone
