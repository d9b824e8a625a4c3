"""A fault of one session ends that session, with an error, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hogwild_engine import Engine
from hogwild_engine.api.errors import SessionFailedError
from hogwild_engine.scheduler import Scheduler
from hogwild_engine.sessions.session import ScheduledStep, Session
from traffic import pages_held, read, requests, wait_until

SICK = 3
"""Workers of the session that fails; the others have fewer."""


def is_sick(session: Session) -> bool:
    return len(session.request.workers) == SICK


def fails_alone(engine: Engine, match: str, wanted: list[Any]) -> None:
    """Three sessions share steps; the sick one fails and the others answer as they do alone."""
    sick, *others = (engine.submit(requests()[i]) for i in (2, 0, 1))
    with pytest.raises(SessionFailedError, match=match):
        sick.result(20)
    assert [read(other) for other in others] == wanted
    wait_until(lambda: pages_held(engine) == 0)


@pytest.fixture
def wanted(tidy_engine: Engine) -> list[Any]:
    return [read(tidy_engine.submit(requests()[i])) for i in (0, 1)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("step", [0, 5])
def test_a_row_of_logits_that_is_not_finite(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: list[Any], bad: float, step: int
) -> None:
    sample = Engine._sample

    @torch.inference_mode()
    def poison(self: Engine, logits: torch.Tensor, scheduled: Sequence[ScheduledStep]) -> Any:
        rows = [(step.session, row) for step in scheduled for row in step.rows]
        for number, (session, row) in enumerate(rows):
            if is_sick(session) and row.index == step:
                logits[number, 7] = bad
        return sample(self, logits, scheduled)

    monkeypatch.setattr(Engine, "_sample", poison)
    fails_alone(tidy_engine, "the model's logits are not finite", wanted)


def raising(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Session, *args: Any) -> Any:
        if is_sick(self):
            raise RuntimeError("a bug of ours")
        return original(self, *args)

    return call


@pytest.mark.parametrize(
    "place", ["schedule", "reuse_prefix", "drain_events", "read_inbox", "begin", "postprocess"]
)
def test_a_fault_in_any_part_of_a_session(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: list[Any], place: str
) -> None:
    if place == "read_inbox":
        requests_of = Engine.submit

        def submit(self: Engine, request: Any) -> Any:  # a message comes with each request
            handle = requests_of(self, request)
            self._has_messages = True
            return handle

        monkeypatch.setattr(Engine, "submit", submit)
    monkeypatch.setattr(Session, place, raising(getattr(Session, place)))
    fails_alone(tidy_engine, "a bug of ours", wanted)


@pytest.mark.parametrize("place", ["is_prefill", "next_prefix_key"])
def test_a_fault_in_what_the_scheduler_asks(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: list[Any], place: str
) -> None:
    getter = getattr(Session, place).fget
    monkeypatch.setattr(Session, place, property(raising(getter)))
    fails_alone(tidy_engine, "a bug of ours", wanted)


def test_a_fault_in_building_the_batch(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: list[Any]
) -> None:
    schedule = Session.schedule

    def broken(self: Session, limit: int) -> Any:
        step = schedule(self, limit)
        return step._replace(chunks=[None] * len(step.chunks)) if is_sick(self) else step

    monkeypatch.setattr(Session, "schedule", broken)
    fails_alone(tidy_engine, "NoneType", wanted)


def test_a_fault_in_a_row_of_the_sampler(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: list[Any]
) -> None:
    class Broken:
        @property
        def compiler(self) -> Any:
            raise RuntimeError("no mask")

    schedule = Session.schedule

    def broken(self: Session, limit: int) -> Any:
        step = schedule(self, limit)
        for row in step.rows if is_sick(self) else ():
            row.constraint = Broken()  # pyright: ignore[reportAttributeAccessIssue]
        return step

    monkeypatch.setattr(Session, "schedule", broken)
    fails_alone(tidy_engine, "no mask", wanted)


def test_sessions_that_wait_go_on_after_a_fault_between_steps(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: list[Any]
) -> None:
    schedule, engine = Scheduler.schedule, tidy_engine
    monkeypatch.setattr(
        Scheduler, "admit", lambda self: [] if self.running else admit_one(self)
    )  # the others wait

    def fail_once(self: Scheduler) -> Any:
        if any(map(is_sick, self.running)):
            raise RuntimeError("a bug of ours")
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", fail_once)
    fails_alone(engine, "a bug of ours", wanted)


def admit_one(scheduler: Scheduler) -> list[Session]:
    if not scheduler.waiting:
        return []
    session = scheduler.waiting.popleft()
    scheduler.running.append(session)
    return [session]
