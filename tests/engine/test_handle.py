"""What readers of sessions get: events in order, late, across threads and loops; what they cost."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Engine, Request
from hogwild_engine.api.errors import (
    SessionCancelledError,
)
from hogwild_engine.api.events import Event, Finished, Step, Token
from traffic import finished, gated, outcome, read, requests, wait_until


def test_a_slow_reader_delays_nobody(tidy_engine: Engine) -> None:
    unread = tidy_engine.submit(requests()[0])
    assert read(tidy_engine.submit(requests()[1]))
    wait_until(lambda: tidy_engine.stats().sessions == 0)
    assert isinstance(list(unread)[-1], Finished)


def test_a_result_that_is_late_times_out_and_comes_later(
    tidy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(tidy_engine, monkeypatch):
        handle = tidy_engine.submit(requests()[0])
        with pytest.raises(TimeoutError):
            handle.result(0.05)
    assert isinstance(handle.result(20), Finished)


async def test_many_sessions_are_read_in_one_event_loop(tidy_engine: Engine) -> None:
    wanted = [read(tidy_engine.submit(request)) for request in requests()]

    async def follow(request: Request) -> list[Event]:
        return outcome([event async for event in tidy_engine.submit(request)])

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


async def test_a_cancel_reaches_an_asynchronous_reader(tidy_engine: Engine) -> None:
    handle = tidy_engine.submit(replace(requests()[0], max_steps=500, max_tokens=100))

    async def read_and_cancel() -> None:
        async for event in handle:
            if isinstance(event, Token):
                handle.cancel()

    with pytest.raises(SessionCancelledError):
        await read_and_cancel()


def test_a_reader_whose_loop_is_gone_cancels_its_session(tidy_engine: Engine) -> None:
    handle = tidy_engine.submit(replace(requests()[0], max_steps=500, max_tokens=100))

    async def leave() -> Any:
        parser = aiter(handle)
        await anext(parser)
        return parser

    parser = asyncio.run(leave())
    wait_until(lambda: tidy_engine.stats().sessions == 0)
    del parser


def test_every_event_is_plain_data(tidy_engine: Engine) -> None:
    for request in requests():
        for event in tidy_engine.submit(request):
            data = json.loads(json.dumps(event.as_dict()))
            assert data["type"] == event.type


def test_steps_count_up_and_name_who_wrote(tidy_engine: Engine) -> None:
    events = read(tidy_engine.submit(requests()[2]))
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


def test_the_engine_counts_what_its_sessions_cost(tidy_engine: Engine) -> None:
    before = tidy_engine.stats()
    done = [tidy_engine.submit(request).result(20) for request in requests()]
    after = tidy_engine.stats()

    def cost(name: str) -> int:
        return getattr(after, name) - getattr(before, name)

    assert cost("prompt_tokens") == sum(d.usage.prompt_tokens for d in done)
    assert cost("worker_tokens") == sum(sum(d.usage.worker_tokens.values()) for d in done)
    assert cost("answer_tokens") == sum(d.usage.answer_tokens for d in done)
    assert cost("forced_tokens") == sum(d.usage.forced_tokens for d in done)
    assert cost("steps") == sum(d.usage.forward_steps for d in done)
    assert after.cache_bytes == 256 * 8 * tidy_engine._cache.bytes_per_token
