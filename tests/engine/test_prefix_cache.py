"""The prefix cache: what a prompt shares with earlier ones is not encoded again, and changes
nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

from generation import generated
from hogwild_engine import Engine, Protocol, Request, SamplingParams, make_workers
from hogwild_engine.api.errors import SessionCancelledError, SessionFailedError
from hogwild_engine.api.events import Event, Finished
from hogwild_engine.handle import Handle
from hogwild_engine.loading.pretrained import Pretrained
from model_harness import model_of, sampled_by_writer
from tiny import FAMILIES, tiny_model
from traffic import gated, outcome, pages_held, requests, wait_until

GREEDY = SamplingParams(temperature=0, seed=3)
PAGE_SIZE = 8
LONG = "Read this list first: " + ", ".join(f"item {i}" for i in range(30)) + "."
TEAM: dict[str, Any] = {
    "workers": make_workers(2),
    "protocol": Protocol(name="short", rules="Go.", min_chars=0, max_repeats=None, stagger=1),
    "max_steps": 10,
}

Make = Callable[..., Engine]


@pytest.fixture
def make(tiny_engine: Make) -> Iterator[Make]:
    """Makes engines with a prefix cache of their own, on a model that is shared."""
    engines: list[Engine] = []

    def make(family: str = "llama", *, talkative: bool = True, **config: Any) -> Engine:
        shared = tiny_engine(family, talkative=talkative)
        loaded = Pretrained(model_of(shared), shared.tokenizer)
        engines.append(Engine(replace(shared.config, **config), loaded=loaded))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def embedded_engine(smollm: Engine) -> Iterator[Engine]:
    """The embedded model on small pages."""
    with Engine(replace(smollm.config, page_size=PAGE_SIZE, num_pages=400)) as engine:
        yield engine


def ask(*turns: str, **options: Any) -> Request:
    """Return messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    settings = {"workers": make_workers(1), "max_tokens": 8, "sampling": GREEDY} | options
    return Request(tuple(messages), **settings)


def read(handle: Handle) -> tuple[list[Event], Finished]:
    """Return the events of a session without their cache figures, and its end."""
    events = list(handle)
    assert isinstance(events[-1], Finished)
    return outcome(events), events[-1]


def whole_pages(engine: Engine, tokens: int) -> int:
    """Tokens of the full pages before the last token, which is encoded always."""
    size = engine.config.page_size
    return (tokens - 1) // size * size


# The text does not depend on it


@pytest.mark.parametrize("index", range(7))
def test_a_session_says_the_same_with_and_without_a_hit(make: Make, index: int) -> None:
    request = requests()[index]
    wanted, done = read(make(prefix_cache=False).submit(request))
    assert done.usage.cached_tokens == 0
    engine = make()
    for expected in (0, whole_pages(engine, done.usage.prompt_tokens)):
        got, done = read(engine.submit(request))
        assert got == wanted
        assert done.usage.cached_tokens == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_what_generate_writes_behind_a_hit(
    monkeypatch: pytest.MonkeyPatch, make: Make, family: str
) -> None:
    engine = make(family, talkative=False)
    engine.submit(ask(LONG + " Say nothing.")).result(60)
    request = ask(LONG + " Which item is the best?", max_tokens=12)
    prompt = engine.chat.render(list(request.messages))
    wanted = generated(tiny_model(family), prompt, 12)
    with sampled_by_writer(monkeypatch) as sampled:
        done = engine.submit(request).result(60)
    assert sampled == {0: wanted}
    assert done.usage.cached_tokens > 100


@pytest.mark.parametrize("options", [{}, {**TEAM, "max_steps": 5}])
def test_the_embedded_model_says_the_same_in_a_second_turn(
    monkeypatch: pytest.MonkeyPatch, embedded_engine: Engine, options: dict[str, Any]
) -> None:
    turns, cached = ["Say: item 1, item 2, item 3."], 0
    for question in ("Why?", ""):
        request = ask(*turns, max_tokens=9, **options)
        with monkeypatch.context() as patch:
            patch.setattr(embedded_engine._cache.pool, "find", lambda key: None)
            wanted, _ = read(embedded_engine.submit(request))
        got, done = read(embedded_engine.submit(request))
        assert got == wanted
        turns += [done.text, question]
        cached = done.usage.cached_tokens
    assert cached > 3 * PAGE_SIZE


# What is encoded, and what is not


def test_the_next_turn_encodes_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch, embedded_engine: Engine
) -> None:
    """One worker's answer is found too, as far as its text has the tokens that were sampled."""
    engine, first = embedded_engine, ask("Name the planets.", max_tokens=40)
    with sampled_by_writer(monkeypatch) as sampled:
        answer = engine.submit(first).result(60).text
    prompt = engine.chat.render(list(first.messages))
    second = ask("Name the planets.", answer, "Which is the largest?", max_tokens=1)
    longer = engine.chat.render(list(second.messages))
    pairs = zip([*prompt, *sampled[0][:-1]], longer, strict=False)
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert alike > len(prompt) + PAGE_SIZE
    before = engine.stats()
    done = engine.submit(second).result(60)
    after = engine.stats()
    assert done.usage.cached_tokens == alike // PAGE_SIZE * PAGE_SIZE
    assert after.encoded_tokens - before.encoded_tokens == len(longer) - done.usage.cached_tokens
    assert after.cached_tokens - before.cached_tokens == done.usage.cached_tokens


def test_what_workers_wrote_under_each_others_eyes_is_not_found_again(make: Make) -> None:
    engine = make()
    done = engine.submit(ask(LONG, **TEAM, answer="join")).result(20)
    assert any(paragraph.complete for paragraph in done.paragraphs)
    kept = whole_pages(engine, done.usage.prompt_tokens) // PAGE_SIZE
    assert len(engine._cache.pool._key_of) == kept
    again = ask(LONG, **TEAM, history=done.paragraphs)
    assert engine.submit(again).result(20).usage.cached_tokens == kept * PAGE_SIZE


def test_a_prompt_that_fills_its_last_page_is_encoded_as_far_as_a_draw_needs(make: Make) -> None:
    engine = make()
    for extra in range(PAGE_SIZE):
        request = ask("word " * (40 + extra))
        wanted, first = read(engine.submit(request))
        got, second = read(engine.submit(request))
        assert got == wanted
        assert second.usage.cached_tokens == whole_pages(engine, first.usage.prompt_tokens)


def test_sessions_that_start_alike_at_once_encode_it_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them would fit into one step; one goes first, and the others find what it encoded."""
    config = {"talkative": False, "max_num_batched_tokens": 2000}
    engine, control = make(**config), make(**config, prefix_cache=False)
    asked = [ask(LONG + end) for end in (" One.", " Two.", " Three.", " Four.")]
    wanted = [read(control.submit(request))[0] for request in asked]
    with gated(engine, monkeypatch) as gate:
        earlier = engine.submit(ask("Hello"))
        assert gate.arrived.acquire(timeout=20)
        handles = [engine.submit(request) for request in asked]
    results = [read(handle) for handle in handles]
    assert [events for events, _ in results] == wanted
    cached = sorted(done.usage.cached_tokens for _, done in results)
    assert cached[0] <= whole_pages(engine, earlier.result(20).usage.prompt_tokens)
    assert cached[1] > 100


def test_without_the_cache_nothing_is_found(make: Make) -> None:
    engine = make(prefix_cache=False)
    for _ in range(2):
        assert engine.submit(ask(LONG)).result(20).usage.cached_tokens == 0
    assert engine.stats().cached_tokens == 0


@pytest.mark.parametrize("failing_step", [0, 1, 3])
def test_pages_of_a_step_that_failed_are_not_found(
    make: Make, monkeypatch: pytest.MonkeyPatch, failing_step: int
) -> None:
    engine = make(talkative=False)
    wanted, _ = read(make(talkative=False, prefix_cache=False).submit(ask(LONG)))
    run, steps = engine._runner.run, iter(range(100))

    def fail_once(plan: Any) -> Any:
        if next(steps) == failing_step:
            raise RuntimeError("the device is on fire")
        return run(plan)

    monkeypatch.setattr(engine._runner, "run", fail_once)
    with pytest.raises(SessionFailedError):
        engine.submit(ask(LONG)).result(20)
    got, done = read(engine.submit(ask(LONG)))
    assert got == wanted
    assert done.usage.cached_tokens == failing_step * engine.config.max_num_batched_tokens


# Pages run short


def test_a_pool_full_of_prefixes_serves_what_comes_next(make: Make) -> None:
    """Many prompts through a pool for two of them: each says what it says without a cache."""
    engine = make(num_pages=70, talkative=False)
    control = make(num_pages=70, talkative=False, prefix_cache=False)
    rng, cached = random.Random(5), 0
    for index in range(24):
        request = ask(f"{rng.randrange(6)} " + "word " * 150, max_tokens=4 + index % 3)
        wanted, _ = read(control.submit(request))
        got, done = read(engine.submit(request))
        assert got == wanted
        cached += done.usage.cached_tokens
        assert pages_held(engine) == 0
    assert cached > 0


def random_request(rng: random.Random) -> Request:
    """Few ways to start, many to go on."""
    turns = [f"{rng.randrange(3)} " + "word " * rng.choice((3, 40, 80))]
    if rng.random() < 0.5:
        turns += [rng.choice(("Yes.", "No, no.")), rng.choice(("Why?", "word " * 30))]
    team = {**TEAM, "max_steps": rng.choice((2, 9)), "answer": rng.choice(("write", "join"))}
    options = team if rng.random() < 0.5 else {}
    return ask(*turns, **options, max_tokens=rng.choice((1, 12)))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_sessions_and_cancels_leaks_nothing_and_changes_nothing(
    make: Make, seed: int
) -> None:
    """More sessions than a tiny pool holds, some cancelled at any time, some found again."""
    rng = random.Random(seed)
    engine, control = make(num_pages=66), make(prefix_cache=False)
    asked = [random_request(rng) for _ in range(24)]
    wanted = {id(request): read(control.submit(request))[0] for request in asked}
    handles = []
    for request in asked:
        handles.append((request, engine.submit(request)))
        if rng.random() < 0.4:
            list(zip(range(rng.randrange(6)), handles[-1][1], strict=False))
        if rng.random() < 0.3:
            rng.choice(handles)[1].cancel()
    finished = 0
    for request, handle in handles:
        with suppress(SessionCancelledError):
            done = handle.result(60)
            last = wanted[id(request)][-1]
            assert isinstance(last, Finished)
            assert (done.text, done.paragraphs) == (last.text, last.paragraphs)
            finished += 1
    assert finished > 8
    wait_until(lambda: pages_held(engine) == 0)
    pool = engine._cache.pool
    assert set(pool._kept) == set(pool._key_of) == set(pool._page_of.values())
    assert sum(pool._used) == len(pool._kept)
