"""``hogwild bench``: what it counts, what its figures come to, what it prints. Nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from hogwild_agents.bench import systems
from hogwild_agents.bench.engine_system import EngineSystem
from hogwild_agents.bench.figures import figures_of
from hogwild_agents.bench.measurement import Measured
from hogwild_agents.bench.prompts import Prompts
from hogwild_agents.bench.systems import BenchConfig, Loaded, Reading, SystemName, loaded, rounds
from hogwild_agents.bench.table import tables_of
from hogwild_agents.cli import terminal
from hogwild_agents.cli.commands import main
from hogwild_engine.api.errors import ConfigError
from tiny import save_tiny

CONTEXT = 64
STEPS = 12
BASE = SystemName("generate", "bfloat16", 1)
ONE, THREE, FOUR = (SystemName("hogwild", "bfloat16", workers) for workers in (1, 3, 4))


@pytest.fixture(scope="module")
def tiny(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that loads at once."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, 512)


@pytest.fixture(scope="module")
def config(tiny: str) -> BenchConfig:
    return BenchConfig(
        tiny, contexts=(CONTEXT,), sessions=(1, 2), workers=(1, 3), steps=STEPS, repeats=2
    )


@pytest.fixture(scope="module")
def models(config: BenchConfig) -> Iterator[Loaded]:
    with loaded(config) as models:
        yield models


@pytest.fixture(scope="module")
def readings(config: BenchConfig, models: Loaded) -> list[Reading]:
    return list(rounds(config, models.systems, models.engine))


def made(system: SystemName, repeat: int, decode_s: float, *, tokens: int, **more: Any) -> Reading:
    run = Measured(64, 64, 0.5, steps=10, tokens=tokens, decode_s=decode_s, **more)
    return Reading(64, 1, repeat, system, run)


def test_every_arm_takes_its_turn_in_every_round_of_every_setting(readings: list[Reading]) -> None:
    systems = [BASE, ONE, THREE]
    turns = [(r.context, r.sessions, r.repeat, r.system) for r in readings]
    assert turns == [
        (CONTEXT, count, repeat, system)
        for count in (1, 2)
        for repeat in (0, 1)
        for system in systems
    ]


def test_a_step_decodes_one_token_of_every_worker_of_every_session(
    readings: list[Reading],
) -> None:
    for r in readings:
        run = r.measured
        # Requests are longer than what is measured; an engine's reader may miss some of it.
        assert 0 < run.steps <= STEPS + 1
        assert run.tokens == run.steps * r.system.workers * r.sessions


def test_prompts_are_about_as_long_as_asked_for_and_all_of_them_is_prefilled(
    readings: list[Reading],
) -> None:
    for r in readings:
        assert abs(r.measured.prompt_tokens - CONTEXT) <= 4
        assert abs(r.measured.prefilled - r.sessions * CONTEXT) <= 4 * r.sessions


def test_workers_share_what_private_caches_would_repeat(readings: list[Reading]) -> None:
    for r in readings:
        held, private = r.measured.cache_bytes, r.measured.private_cache_bytes
        if r.system == BASE:
            assert (held, private) == (None, None)
        else:
            assert held
            assert private
            # A page has 32 tokens: blocks that fill theirs in part hold more than they store.
            assert held < 1.6 * private if r.system.workers == 1 else held < private


def test_the_forward_is_part_of_a_step(readings: list[Reading]) -> None:
    for r in readings:
        share = r.measured.outside_forward
        assert share is None if r.system == BASE else share is not None and 0 < share < 1


def test_no_two_prompts_begin_alike(models: Loaded) -> None:
    prompts = Prompts(models.engine)
    tasks = [*prompts.tasks(CONTEXT, 3, 1), *prompts.tasks(CONTEXT, 3, 4)]
    assert len({task[:24] for task in tasks}) == 6


def test_nothing_of_an_arms_sessions_is_left_behind(
    models: Loaded, readings: list[Reading]
) -> None:
    stats = models.engine.stats()
    assert stats.sessions == stats.waiting == 0
    assert stats.free_pages == stats.num_pages


def test_a_prompt_is_cut_to_what_the_models_context_holds_beside_the_decoding(
    config: BenchConfig, models: Loaded
) -> None:
    long = replace(config, contexts=(4096,), sessions=(1,), repeats=1)
    for r in rounds(long, models.systems, models.engine):
        assert r.context == 4096
        assert 256 < r.measured.prompt_tokens < models.engine.context_len - 3 * STEPS
        assert r.measured.tokens == r.measured.steps * r.system.workers


def test_a_prompt_as_long_as_the_context_allows_leaves_all_steps_to_every_worker(
    config: BenchConfig, models: Loaded
) -> None:
    engine = models.engine
    room = engine.context_len - replace(config, workers=(5,)).written(1)
    before = engine.stats().worker_tokens
    EngineSystem(engine, 5).measure(Prompts(engine).tasks(room, 1, 7), STEPS, 7)
    # One token each when the prompt is read; then the first one and those that are measured.
    assert engine.stats().worker_tokens - before == 5 * (1 + 1 + STEPS)


def test_a_context_that_the_model_has_no_room_for_is_refused(models: Loaded, tiny: str) -> None:
    config = BenchConfig(tiny, contexts=(CONTEXT,), workers=(8,), steps=64)
    with pytest.raises(ConfigError, match=r"context: .* fewer steps or workers"):
        list(rounds(config, {}, models.engine))


def test_figures_are_medians() -> None:
    readings = [
        made(ONE, repeat, seconds, tokens=10) for repeat, seconds in enumerate((0.5, 3.0, 0.8))
    ]
    (row,) = figures_of(readings)
    assert row.rounds == 3
    assert row.step_ms == pytest.approx(80)
    assert row.tokens_per_s == pytest.approx(12.5)
    assert row.prefill_tokens_per_s == 128


def test_ratios_compare_arms_within_a_round() -> None:
    seconds = {BASE: (1.0, 4.0, 2.0), ONE: (0.25, 2.0, 2.0), FOUR: (1.0, 4.0, 1.0)}
    readings = [
        made(system, repeat, times[repeat], tokens=10 * system.workers)
        for repeat in range(3)
        for system, times in seconds.items()
    ]
    base, one, four = figures_of(readings)
    assert [base.over_generate, base.over_one_worker] == [1.0, None]
    assert [one.over_generate, one.over_one_worker] == [2.0, 1.0]  # of 4, 2 and 1
    assert four.over_generate == 4.0  # of 4, 4 and 8
    assert four.over_one_worker == 2.0  # of 4, 2 and 0.5


def test_int8_is_compared_with_generate_in_bfloat16() -> None:
    int8 = SystemName("hogwild", "int8", 1)
    figures = figures_of([made(BASE, 0, 1.0, tokens=10), made(int8, 0, 0.25, tokens=10)])
    assert figures[1].over_generate == 4.0


def test_what_was_not_measured_is_no_figure() -> None:
    (only,) = figures_of([made(FOUR, 0, 1.0, tokens=40)])
    assert only.over_generate is only.over_one_worker is only.cache_bytes is None


def test_a_table_names_the_setting_and_has_a_row_an_arm(
    readings: list[Reading], capsys: pytest.CaptureFixture[str]
) -> None:
    for table in tables_of(figures_of(readings)):
        Console(width=80).print(table)
    out = capsys.readouterr().out
    assert out.count("medians of 2 rounds") == 2
    assert "2 sessions at once" in out
    assert out.count("generate, bfloat16") == out.count("3 workers, bfloat16") == 2
    assert "…" not in out  # all of it fits a terminal of 80 columns


def test_json_holds_settings_machine_figures_and_readings(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in terminal.QUIET.items():
        monkeypatch.setenv(name, value)
    small = ["--context", "64", "--workers", "2,1", "--steps", "8", "--repeats", "1", "--json"]
    assert main(["bench", "--model", tiny, *small]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["settings"]["workers"] == [2, 1]
    assert report["settings"]["temperature"] == 0.6
    assert report["machine"]["torch"] == torch.__version__
    assert [row["workers"] for row in report["figures"]] == [1, 2, 1]
    assert [row["system"] for row in report["readings"]] == ["generate", "hogwild", "hogwild"]
    assert report["figures"][1]["over_generate"] > 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--context", "long"], "--context"),
        (["--context", "8"], "context"),
        (["--workers", "1,,2"], "--workers"),
        (["--workers", "0"], "workers"),
        (["--sessions", "0"], "sessions"),
        (["--dtype", "int7"], "dtype"),
        (["--steps", "1"], "steps"),
        (["--repeats", "0"], "repeats"),
        (["--threads", "0"], "threads"),
        (["--model", ""], "model"),
    ],
)
def test_bad_usage_ends_with_2_and_one_line(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hogwild: ")
    assert err.count("\n") == 1
    assert named in err


def test_an_interrupt_prints_what_there_is_and_ends_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_then_interrupt(*_: object) -> Iterator[Reading]:
        yield made(FOUR, 0, 1.0, tokens=40)
        raise KeyboardInterrupt

    nothing = Loaded({}, cast(Any, None), {})
    monkeypatch.setattr(systems, "loaded", lambda _: nullcontext(nothing))
    monkeypatch.setattr(systems, "rounds", one_then_interrupt)
    assert main(["bench", "--json"]) == 130
    out, err = capsys.readouterr()
    assert err == ""
    assert [row["workers"] for row in json.loads(out)["figures"]] == [4]
