"""Invariants 5 and 6: sessions in shared steps leave each other alone, and give all pages back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Engine, EngineConfig
from hogwild_engine.api.errors import (
    EngineClosedError,
    SessionCancelledError,
    SessionFailedError,
)
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.sessions.session import Session
from model_harness import model_of
from traffic import finished, gated, pages_held, read, requests, wait_until

# Invariant 5


def test_sessions_that_run_together_say_what_each_says_alone(tidy_engine: Engine) -> None:
    num_steps = [tidy_engine.stats().steps]
    alone = [read(tidy_engine.submit(request)) for request in requests()]
    num_steps.append(tidy_engine.stats().steps)
    together = [read(handle) for handle in [tidy_engine.submit(request) for request in requests()]]
    num_steps.append(tidy_engine.stats().steps)
    assert together == alone
    assert any(p.complete for events in alone for p in finished(events).paragraphs)
    assert num_steps[2] - num_steps[1] < (num_steps[1] - num_steps[0]) / 2


def test_sessions_admitted_at_different_times_say_what_each_says_alone(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [read(tidy_engine.submit(request)) for request in requests()]
    with gated(tidy_engine, monkeypatch) as gate:
        handles = []
        for request, wait in zip(requests(), (1, 4, 2, 0, 7, 3, 5), strict=True):
            handles.append(tidy_engine.submit(request))
            if len(handles) == 1:
                assert gate.arrived.acquire(timeout=20)
            gate.pass_on(wait)
    assert [read(handle) for handle in handles] == alone


@pytest.mark.parametrize("num_pages", [70, 100])
def test_sessions_that_wait_for_pages_say_what_each_says_alone(
    tidy_engine: Engine, num_pages: int
) -> None:
    """A pool for one or two of them at once; a session's own bounds do not depend on the rest."""
    config = replace(tidy_engine.config, num_pages=num_pages)
    loaded = Pretrained(model_of(tidy_engine), tidy_engine.tokenizer)
    fitting = [request for request in requests() if len(request.workers) < 4]
    with Engine(config, loaded=loaded) as small:
        alone = [read(small.submit(request)) for request in fitting]
        handles = [small.submit(request) for request in fitting]
        assert [read(handle) for handle in handles] == alone
        assert pages_held(small) == 0


def test_a_session_says_the_same_twice(tidy_engine: Engine) -> None:
    for request in requests():
        assert read(tidy_engine.submit(request)) == read(tidy_engine.submit(request))


# Invariant 6


def test_a_finished_session_holds_no_page(tidy_engine: Engine) -> None:
    for request in requests():
        tidy_engine.submit(request).result(20)
        assert pages_held(tidy_engine) == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 9])
def test_a_cancelled_session_is_gone_before_the_next_step(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """Cancelled while a step runs, in prefill or decoding, beside a session that goes on."""
    with gated(tidy_engine, monkeypatch) as gate:
        other = tidy_engine.submit(requests()[2])
        assert gate.arrived.acquire(timeout=20)
        only_other = pages_held(tidy_engine)
        handle = tidy_engine.submit(requests()[0])
        gate.pass_on(num_steps)
        handle.cancel()
        gate.pass_on()
        assert tidy_engine.stats().sessions == 1
        with pytest.raises(SessionCancelledError):
            list(handle)
        handle.cancel()
        assert pages_held(tidy_engine) >= only_other
        gate.turns.release(10_000)
        other.result(20)


def test_a_session_cancelled_in_its_answer_is_gone(tidy_engine: Engine) -> None:
    request = replace(requests()[0], max_steps=2, max_tokens=200)
    handle = tidy_engine.submit(request)
    for event in handle:
        if event.type == "answer_token":
            handle.cancel()
            break
    with pytest.raises(SessionCancelledError):
        handle.result(20)


def test_a_waiting_session_can_be_cancelled(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(tidy_engine, monkeypatch) as gate:
        long = replace(requests()[0], max_steps=500)
        running = [tidy_engine.submit(long) for _ in range(2)]
        assert gate.arrived.acquire(timeout=20)
        waiting = tidy_engine.submit(long)
        gate.pass_on()
        assert tidy_engine.stats().waiting > 0
        waiting.cancel()
        for handle in running:
            handle.cancel()
        gate.turns.release(10_000)
        for handle in (waiting, *running):
            with pytest.raises(SessionCancelledError):
                handle.result(20)


def test_cancelling_a_finished_session_is_harmless(tidy_engine: Engine) -> None:
    handle = tidy_engine.submit(requests()[1])
    handle.result(20)
    handle.cancel()
    assert read(tidy_engine.submit(requests()[1]))


@pytest.mark.parametrize("failing_step", [1, 2, 6])
def test_a_model_that_fails_fails_the_sessions_of_that_pass_only(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, failing_step: int
) -> None:
    model, seen = model_of(tidy_engine), 0
    forward = model.forward

    def fail_once(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == failing_step:
            raise RuntimeError("the device is on fire")
        return forward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail_once)
        handles = [tidy_engine.submit(request) for request in requests()[:3]]
        for handle in handles[:1]:
            with pytest.raises(SessionFailedError, match="the device is on fire") as caught:
                handle.result(20)
            assert isinstance(caught.value.__cause__, RuntimeError)
        for handle in handles[1:]:
            with suppress(SessionFailedError):
                handle.result(20)
    wait_until(lambda: pages_held(tidy_engine) == 0)
    assert read(tidy_engine.submit(requests()[0]))


@pytest.mark.parametrize("place", ["begin", "postprocess"])
def test_a_session_that_fails_by_itself_fails_alone(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    healthy = read(tidy_engine.submit(requests()[1]))
    step = getattr(Session, place)

    def fail(self: Session, *args: Any) -> Any:
        if len(self.request.workers) == 3:
            raise RuntimeError("a bug of ours")
        return step(self, *args)

    monkeypatch.setattr(Session, place, fail)
    sick, other = (tidy_engine.submit(requests()[i]) for i in (2, 1))
    with pytest.raises(SessionFailedError, match="a bug of ours"):
        sick.result(20)
    assert read(other) == healthy


def test_a_fault_between_passes_leaves_no_reader_waiting(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "schedule", fail)
        for handle in [tidy_engine.submit(request) for request in requests()[:3]]:
            with pytest.raises(SessionFailedError, match="a bug of ours"):
                handle.result(20)
    assert read(tidy_engine.submit(requests()[0]))


def test_a_session_that_fails_while_sampling_gives_its_pages_back(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr("hogwild_engine.engine.sample", fail)
        with pytest.raises(SessionFailedError, match="no such token"):
            tidy_engine.submit(requests()[0]).result(20)


def test_closing_an_engine_ends_its_sessions_and_its_thread(tidy_engine: Engine) -> None:
    loaded = Pretrained(model_of(tidy_engine), tidy_engine.tokenizer)
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


def test_an_idle_engines_helpers_end_and_the_next_request_is_served(tidy_engine: Engine) -> None:
    first = tidy_engine.submit(requests()[0]).result(20)
    working = tidy_engine._working
    assert working is not None
    wait_until(lambda: not working.is_alive())
    assert tidy_engine.submit(requests()[0]).result(20).text == first.text
    assert tidy_engine._working is not working
