"""Invariants 5 and 6: sessions in shared passes leave each other alone, and give all pages back."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from rig import model_of

from hogwild_engine import Engine, EngineConfig, Protocol, Request, SamplingParams, make_workers
from hogwild_engine.errors import (
    EngineClosedError,
    SessionCancelledError,
    SessionFailedError,
)
from hogwild_engine.events import Event, Finished, Step, Token
from hogwild_engine.handle import Handle
from hogwild_engine.session import Session
from hogwild_engine.weights import Weights

PROTOCOL = Protocol(name="short", rules="Go.", min_chars=0, max_repeats=None, stagger=2)
QUESTIONS = (
    "Hello",
    "Name three colours, please.",
    "Sum " + " and ".join(str(i) for i in range(40)),
)


def requests() -> list[Request]:
    """Sessions of all kinds: workers, layouts, lengths, budgets, ways to answer and to sample."""
    common: dict[str, Any] = {"protocol": PROTOCOL, "max_tokens": 8}
    greedy = SamplingParams(temperature=0, seed=3)
    # Few candidates: between thousands of likely ones, rounding in the logits decides.
    lively = SamplingParams(temperature=1.0, top_k=4, seed=11)
    return [
        Request(({"role": "user", "content": question},), **common, **more)
        for question, more in (
            (QUESTIONS[0], {"workers": make_workers(2), "sampling": greedy, "max_steps": 18}),
            (QUESTIONS[1], {"workers": make_workers(1), "sampling": greedy}),
            (QUESTIONS[2], {"workers": make_workers(3), "sampling": greedy, "max_steps": 14}),
            (
                QUESTIONS[2],
                {
                    "workers": make_workers(2),
                    "sampling": greedy,
                    "max_steps": 20,
                    "layout": "contiguous",
                    "answer": "join",
                },
            ),
            (
                QUESTIONS[0],
                {
                    "workers": make_workers(4),
                    "sampling": lively,
                    "max_steps": 12,
                    "layout": "interleaved",
                },
            ),
            (
                QUESTIONS[1],
                {
                    "workers": make_workers(3),
                    "sampling": lively,
                    "max_steps": 9,
                    "layout": "arrival",
                },
            ),
            (
                QUESTIONS[1],
                {
                    "workers": make_workers(2),
                    "sampling": greedy,
                    "max_steps": 13,
                    "sync_interval": 3,
                },
            ),
        )
    ]


def outcome(events: list[Event]) -> list[Event]:
    """What a session said; times, and what the prefix cache spared it, left out."""
    done = events[-1]
    assert isinstance(done, Finished)
    timeless = replace(done.usage, duration_s=0.0, passes=0, cached_tokens=0)
    return [*events[:-1], replace(done, usage=timeless)]


def read(handle: Handle) -> list[Event]:
    return outcome(list(handle))


@contextmanager
def gated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Passes of ``engine`` wait until the test lets them run."""
    gate = Gate()
    run = engine._runner.run

    def wait(plan: Any) -> Any:
        gate.arrived.release()
        gate.turns.acquire()
        return run(plan)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", wait)
        try:
            yield gate
        finally:
            gate.turns.release(10_000)


class Gate:
    """Counts passes that wait to run, and passes that may."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)

    def pass_on(self, count: int = 1) -> None:
        """Let ``count`` passes through and wait until the next one stands at the gate."""
        for _ in range(count):
            self.turns.release()
            assert self.arrived.acquire(timeout=20)


def wait_until(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never holds"
        time.sleep(0.002)


def pages_held(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_pages - stats.free_pages


@pytest.fixture
def engine(tiny_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """A tiny engine that ends paragraphs and turns; every test must leave its pages free."""
    engine = tiny_engine("llama", talkative=True)
    yield engine
    wait_until(lambda: pages_held(engine) == 0)
    assert engine.stats().sessions == engine.stats().waiting == 0


# Invariant 5


def test_sessions_that_run_together_say_what_each_says_alone(engine: Engine) -> None:
    passes = [engine.stats().steps]
    alone = [read(engine.submit(request)) for request in requests()]
    passes.append(engine.stats().steps)
    together = [read(handle) for handle in [engine.submit(request) for request in requests()]]
    passes.append(engine.stats().steps)
    assert together == alone
    assert any(p.complete for events in alone for p in finished(events).paragraphs)
    assert passes[2] - passes[1] < (passes[1] - passes[0]) / 2


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_sessions_admitted_at_different_times_say_what_each_says_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [read(engine.submit(request)) for request in requests()]
    with gated(engine, monkeypatch) as gate:
        handles = []
        for request, wait in zip(requests(), (1, 4, 2, 0, 7, 3, 5), strict=True):
            handles.append(engine.submit(request))
            if len(handles) == 1:
                assert gate.arrived.acquire(timeout=20)
            gate.pass_on(wait)
    assert [read(handle) for handle in handles] == alone


@pytest.mark.parametrize("num_pages", [70, 100])
def test_sessions_that_wait_for_pages_say_what_each_says_alone(
    engine: Engine, num_pages: int
) -> None:
    """A pool for one or two of them at once; a session's own bounds do not depend on the rest."""
    config = replace(engine.config, num_pages=num_pages)
    loaded = Weights(model_of(engine), engine.tokenizer)
    fitting = [request for request in requests() if len(request.workers) < 4]
    with Engine(config, loaded=loaded) as small:
        alone = [read(small.submit(request)) for request in fitting]
        handles = [small.submit(request) for request in fitting]
        assert [read(handle) for handle in handles] == alone
        assert pages_held(small) == 0


def test_a_session_says_the_same_twice(engine: Engine) -> None:
    for request in requests():
        assert read(engine.submit(request)) == read(engine.submit(request))


# Invariant 6


def test_a_finished_session_holds_no_page(engine: Engine) -> None:
    for request in requests():
        engine.submit(request).result(20)
        assert pages_held(engine) == 0


@pytest.mark.parametrize("passes", [0, 1, 2, 3, 9])
def test_a_cancelled_session_is_gone_before_the_next_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Cancelled while a pass runs, in prefill or decoding, beside a session that goes on."""
    with gated(engine, monkeypatch) as gate:
        other = engine.submit(requests()[2])
        assert gate.arrived.acquire(timeout=20)
        only_other = pages_held(engine)
        handle = engine.submit(requests()[0])
        gate.pass_on(passes)
        handle.cancel()
        gate.pass_on()
        assert engine.stats().sessions == 1
        with pytest.raises(SessionCancelledError):
            list(handle)
        handle.cancel()
        assert pages_held(engine) >= only_other
        gate.turns.release(10_000)
        other.result(20)


def test_a_session_cancelled_in_its_answer_is_gone(engine: Engine) -> None:
    request = replace(requests()[0], max_steps=2, max_tokens=200)
    handle = engine.submit(request)
    for event in handle:
        if event.type == "answer_token":
            handle.cancel()
            break
    with pytest.raises(SessionCancelledError):
        handle.result(20)


def test_a_waiting_session_can_be_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(engine, monkeypatch) as gate:
        long = replace(requests()[0], max_steps=500)
        running = [engine.submit(long) for _ in range(2)]
        assert gate.arrived.acquire(timeout=20)
        waiting = engine.submit(long)
        gate.pass_on()
        assert engine.stats().waiting > 0
        waiting.cancel()
        for handle in running:
            handle.cancel()
        gate.turns.release(10_000)
        for handle in (waiting, *running):
            with pytest.raises(SessionCancelledError):
                handle.result(20)


def test_cancelling_a_finished_session_is_harmless(engine: Engine) -> None:
    handle = engine.submit(requests()[1])
    handle.result(20)
    handle.cancel()
    assert read(engine.submit(requests()[1]))


@pytest.mark.parametrize("failing_pass", [1, 2, 6])
def test_a_model_that_fails_fails_the_sessions_of_that_pass_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, failing_pass: int
) -> None:
    model, seen = model_of(engine), 0
    forward = model.forward

    def fail_once(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == failing_pass:
            raise RuntimeError("the device is on fire")
        return forward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail_once)
        handles = [engine.submit(request) for request in requests()[:3]]
        for handle in handles[:1]:
            with pytest.raises(SessionFailedError, match="the device is on fire") as caught:
                handle.result(20)
            assert isinstance(caught.value.__cause__, RuntimeError)
        for handle in handles[1:]:
            with suppress(SessionFailedError):
                handle.result(20)
    wait_until(lambda: pages_held(engine) == 0)
    assert read(engine.submit(requests()[0]))


@pytest.mark.parametrize("place", ["begin", "advance"])
def test_a_session_that_fails_by_itself_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    healthy = read(engine.submit(requests()[1]))
    step = getattr(Session, place)

    def fail(self: Session, *args: Any) -> Any:
        if len(self.request.workers) == 3:
            raise RuntimeError("a bug of ours")
        return step(self, *args)

    monkeypatch.setattr(Session, place, fail)
    sick, other = (engine.submit(requests()[i]) for i in (2, 1))
    with pytest.raises(SessionFailedError, match="a bug of ours"):
        sick.result(20)
    assert read(other) == healthy


def test_a_fault_between_passes_leaves_no_reader_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "take", fail)
        for handle in [engine.submit(request) for request in requests()[:3]]:
            with pytest.raises(SessionFailedError, match="a bug of ours"):
                handle.result(20)
    assert read(engine.submit(requests()[0]))


def test_a_session_that_fails_while_sampling_gives_its_pages_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr("hogwild_engine.engine.sample", fail)
        with pytest.raises(SessionFailedError, match="no such token"):
            engine.submit(requests()[0]).result(20)


def test_closing_an_engine_ends_its_sessions_and_its_thread(engine: Engine) -> None:
    loaded = Weights(model_of(engine), engine.tokenizer)
    config = EngineConfig(model="tiny", num_pages=80, page_size=8)
    closing = Engine(config, loaded=loaded)
    long = replace(requests()[0], max_steps=400, max_tokens=100)
    handles = [closing.submit(long) for _ in range(3)]
    next(iter(handles[0]))
    closing.close()
    closing.close()
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result(20)
    assert not closing._thread.is_alive()
    assert pages_held(closing) == 0
    with pytest.raises(EngineClosedError):
        closing.submit(long)


def test_an_idle_engines_helpers_end_and_the_next_request_is_served(engine: Engine) -> None:
    first = engine.submit(requests()[0]).result(20)
    working = engine._working
    assert working is not None
    wait_until(lambda: not working.is_alive())
    assert engine.submit(requests()[0]).result(20).text == first.text
    assert engine._working is not working


# Events


def test_a_slow_reader_delays_nobody(engine: Engine) -> None:
    unread = engine.submit(requests()[0])
    assert read(engine.submit(requests()[1]))
    wait_until(lambda: engine.stats().sessions == 0)
    assert isinstance(list(unread)[-1], Finished)


def test_a_result_that_is_late_times_out_and_comes_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(engine, monkeypatch):
        handle = engine.submit(requests()[0])
        with pytest.raises(TimeoutError):
            handle.result(0.05)
    assert isinstance(handle.result(20), Finished)


async def test_many_sessions_are_read_in_one_event_loop(engine: Engine) -> None:
    wanted = [read(engine.submit(request)) for request in requests()]

    async def follow(request: Request) -> list[Event]:
        return outcome([event async for event in engine.submit(request)])

    longest, last = 0.0, time.monotonic()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    got = await asyncio.gather(*(follow(request) for request in requests()))
    ticking.cancel()
    assert list(got) == wanted
    assert longest < 1.0


async def test_a_cancel_reaches_an_asynchronous_reader(engine: Engine) -> None:
    handle = engine.submit(replace(requests()[0], max_steps=500, max_tokens=100))

    async def read_and_cancel() -> None:
        async for event in handle:
            if isinstance(event, Token):
                handle.cancel()

    with pytest.raises(SessionCancelledError):
        await read_and_cancel()


def test_a_reader_whose_loop_is_gone_cancels_its_session(engine: Engine) -> None:
    handle = engine.submit(replace(requests()[0], max_steps=500, max_tokens=100))

    async def leave() -> Any:
        reader = aiter(handle)
        await anext(reader)
        return reader

    reader = asyncio.run(leave())
    wait_until(lambda: engine.stats().sessions == 0)
    del reader


def test_every_event_is_plain_data(engine: Engine) -> None:
    for request in requests():
        for event in engine.submit(request):
            told = json.loads(json.dumps(event.as_dict()))
            assert told["type"] == event.type


def test_steps_count_up_and_name_who_wrote(engine: Engine) -> None:
    events = read(engine.submit(requests()[2]))
    steps = [event for event in events if isinstance(event, Step)]
    assert [event.step for event in steps] == list(range(1, 15))
    assert [event.active for event in steps[:5]] == [
        ("Alice",),
        ("Alice",),
        ("Alice", "Bob"),
        ("Alice", "Bob"),
        ("Alice", "Bob", "Carol"),
    ]
    done = finished(events)
    assert done.usage.steps == 14
    counted = {name: sum(name in step.active for step in steps) for name in ("Alice", "Bob")}
    assert counted.items() <= done.usage.worker_tokens.items()


def test_the_engine_counts_what_its_sessions_cost(engine: Engine) -> None:
    before = engine.stats()
    done = [engine.submit(request).result(20) for request in requests()]
    after = engine.stats()

    def cost(name: str) -> int:
        return getattr(after, name) - getattr(before, name)

    assert cost("prompt_tokens") == sum(d.usage.prompt_tokens for d in done)
    assert cost("worker_tokens") == sum(sum(d.usage.worker_tokens.values()) for d in done)
    assert cost("answer_tokens") == sum(d.usage.answer_tokens for d in done)
    assert cost("forced_tokens") == sum(d.usage.forced_tokens for d in done)
    assert cost("steps") == sum(d.usage.passes for d in done)
    assert after.cache_bytes == 256 * 8 * engine._cache.bytes_per_token
