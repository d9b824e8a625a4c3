"""Requests of all kinds, the events of their sessions, and steps that wait for the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Engine, Protocol, Request, SamplingParams, make_workers
from hogwild_engine.api.events import Event, Finished
from hogwild_engine.handle import Handle

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
    """Return the events of a session without times and cache figures."""
    done = events[-1]
    assert isinstance(done, Finished)
    timeless = replace(done.usage, duration_s=0.0, forward_steps=0, cached_tokens=0)
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
    """Counts steps that wait to run, and steps that may."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)

    def pass_on(self, count: int = 1) -> None:
        """Let ``count`` steps through and wait until the next one is at the gate."""
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


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]
