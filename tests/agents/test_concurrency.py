"""Many calls at once: the same texts, a free event loop, no page lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessage

from hogwild_agents import ChatHogwild

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

THINGS = ["brick", "rope", "door", "cup", "coat", "lamp", "book", "wheel"]
TASKS = [f"Name three uses of a {thing}." for thing in THINGS]


class Ticker:
    """Counts how often the event loop comes round, and the longest time that it did not."""

    def __init__(self) -> None:
        self.ticks = 0
        self.longest_gap_s = 0.0

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            self.longest_gap_s = max(self.longest_gap_s, now - last)
            self.ticks += 1
            last = now


@pytest.fixture(scope="module")
def llm(team_llm: ChatHogwild) -> ChatHogwild:
    return team_llm.model_copy(update={"max_steps": 4, "max_tokens": 2})


@pytest.fixture(scope="module")
def in_a_row(llm: ChatHogwild) -> list[AIMessage]:
    return [llm.invoke(task) for task in TASKS]


def texts_of(message: AIMessage) -> list[Any]:
    return [(b.get("extras"), b.get("reasoning"), b.get("text")) for b in message.content_blocks]


async def test_eight_calls_at_once_say_what_eight_in_a_row_say(
    llm: ChatHogwild, in_a_row: list[AIMessage], all_pages_free: Callable[[Engine], bool]
) -> None:
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.run())
    num_steps = llm.engine.stats().steps
    at_once = await asyncio.gather(*[llm.ainvoke(task) for task in TASKS])
    ticking.cancel()
    assert [texts_of(message) for message in at_once] == [texts_of(message) for message in in_a_row]
    # One call takes some eight steps; these share theirs.
    assert llm.engine.stats().steps - num_steps < 4 * 8
    # Generous: a loop that waited for a single call would stand for seconds.
    assert ticker.ticks > 10
    assert ticker.longest_gap_s < 1
    assert all_pages_free(llm.engine)


async def test_the_first_load_leaves_the_event_loop_free(embedded: dict[str, Any]) -> None:
    llm = ChatHogwild(workers=1, max_tokens=1, **{**embedded, "num_pages": 32})
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.run())
    assert (await llm.ainvoke("Hello")).usage_metadata
    ticking.cancel()
    llm.engine.close()
    assert ticker.ticks > 10
    assert ticker.longest_gap_s < 2


def test_threads_and_batches_say_what_calls_in_a_row_say(
    llm: ChatHogwild, in_a_row: list[AIMessage]
) -> None:
    tasks, expected = TASKS[:4], [texts_of(message) for message in in_a_row[:4]]
    with ThreadPoolExecutor(4) as pool:
        assert [texts_of(message) for message in pool.map(llm.invoke, tasks)] == expected
    assert [texts_of(message) for message in llm.batch(list(tasks))] == expected


async def test_a_cancelled_call_frees_its_pages_and_leaves_the_others_alone(
    llm: ChatHogwild, in_a_row: list[AIMessage], all_pages_free: Callable[[Engine], bool]
) -> None:
    endless = asyncio.create_task(llm.ainvoke(TASKS[1], max_steps=400, max_tokens=400))
    kept = asyncio.create_task(llm.ainvoke(TASKS[0]))
    while llm.engine.stats().sessions < 2:
        await asyncio.sleep(0.01)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert texts_of(await kept) == texts_of(in_a_row[0])
    assert await asyncio.to_thread(all_pages_free, llm.engine)


async def test_a_call_that_is_cancelled_before_it_runs_leaves_nothing(
    llm: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    assert llm.engine.stats().sessions == 0
    for delay_s in (0, 0.001, 0.01):
        call = asyncio.create_task(llm.ainvoke(TASKS[0], max_steps=400, max_tokens=400))
        await asyncio.sleep(delay_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.sleep(0.05)
    assert await asyncio.to_thread(all_pages_free, llm.engine)
