"""What an engine counts of its steps, and sessions that go on to their budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hogwild_engine import Engine, EngineConfig, Protocol, Request, SamplingParams, make_workers
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.stats import Recorder
from tiny import tiny_model

# No paragraph ends: what a worker rows is one text.
OPEN_END = Protocol(name="open end", rules="Go.", min_chars=10**9, stagger=0)


def request(workers: int, **more: Any) -> Request:
    return Request(
        ({"role": "user", "content": "Hello"},),
        make_workers(workers),
        protocol=OPEN_END,
        answer="join",
        max_steps=40,
        max_tokens=40,
        sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=5),
        **more,
    )


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    """A tiny random model that likes to end its turn."""
    model = tiny_model("llama", loud={tokenizer.eos_token_id: 8.0})
    config = EngineConfig(model="tiny-llama", num_pages=64, page_size=8)
    with Engine(config, loaded=Pretrained(model, tokenizer)) as engine:
        yield engine


def test_a_worker_that_ignores_the_end_of_its_turn_writes_to_its_budget(engine: Engine) -> None:
    ended = engine.submit(request(1)).result(20).usage
    whole = engine.submit(request(1, ignore_eos=True)).result(20).usage
    assert ended.output_tokens < whole.output_tokens == 40


def test_workers_that_ignore_the_end_of_their_turns_write_one_paragraph_each(
    engine: Engine,
) -> None:
    ended = engine.submit(request(3)).result(20).paragraphs
    whole = engine.submit(request(3, ignore_eos=True)).result(20).paragraphs
    assert any(paragraph.complete for paragraph in ended)
    assert [(paragraph.number, paragraph.complete) for paragraph in whole] == [(1, False)] * 3


def test_a_decoding_step_counts_once_and_encodes_a_token_of_each_worker(engine: Engine) -> None:
    before = engine.stats()
    usage = engine.submit(request(3, ignore_eos=True)).result(20).usage
    after = engine.stats()
    assert after.steps - before.steps == usage.forward_steps
    # The last sampled token of each worker is not encoded any more.
    fresh = usage.prompt_tokens - usage.cached_tokens
    encoded = fresh + usage.forced_tokens + usage.output_tokens - 3
    assert after.encoded_tokens - before.encoded_tokens == encoded


def test_the_forwards_time_is_part_of_the_busy_time(engine: Engine) -> None:
    before = engine.stats()
    engine.submit(request(2, ignore_eos=True)).result(20)
    after = engine.stats()
    forward_s, busy_s = (
        getattr(after, name) - getattr(before, name) for name in ("forward_s", "busy_s")
    )
    assert 0 < forward_s < busy_s


def test_time_without_work_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 6.0, 8.0])  # made, woken, first step over, second one over
    monkeypatch.setattr("hogwild_engine.stats.time.perf_counter", lambda: next(clock))
    recorder = Recorder()
    recorder.wake()
    recorder.add_step(7, 0.5)
    recorder.add_step(2, 1.5)
    wanted = {"steps": 2, "encoded_tokens": 9, "forward_s": 2.0, "busy_s": 3.0}
    sessions = ("prompt", "cached", "worker", "answer", "forced")
    assert recorder.totals() == wanted | {f"{name}_tokens": 0 for name in sessions}
