"""Which sessions share a step, how much prompt goes beside them, and who is let in when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from hogwild_engine import Protocol, Request, make_workers
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.scheduler import PREFILL_SHARE, Scheduler
from hogwild_engine.sessions.budget import SessionLimits
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.session import Session
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import GREEDY, ModelHarness
from tiny import tiny_model

PROTOCOL = Protocol(name="x", rules="Go.", stagger=0, min_chars=0, max_repeats=None)


class Bench:
    """A scheduler over a small pool, and sessions that always draw the same token."""

    def __init__(
        self, harness: ModelHarness, chat: ChatTemplate, max_num_batched_tokens: int
    ) -> None:
        self.harness = harness
        self.chat = chat
        self.scheduler = Scheduler(harness.cache, max_num_batched_tokens)
        self.token = chat.encode(" word")[0]

    def session(
        self, words: int = 1, workers: int = 1, text: str = "word ", **options: Any
    ) -> Session:
        request = Request(
            ({"role": "user", "content": text * words},),
            workers=make_workers(workers),
            protocol=PROTOCOL,
            **{"max_steps": 20, "max_tokens": 30, **options},
        )
        pool = self.harness.cache.pool
        room = SessionLimits(4000, pool.num_pages, pool.page_size)
        session = Session(SessionContext(request, self.chat, GREEDY, self.harness.cache, room))
        self.scheduler.add(session)
        return session

    def admit(self) -> list[Session]:
        admitted = self.scheduler.admit()
        for session in admitted:
            session.begin()
        return admitted

    def check_pages(self) -> None:
        """Every page has as many references as readers, and no holder has more than was reserved
        for it.
        """
        pool, held = self.harness.cache.pool, Counter[int]()
        for session in self.scheduler.running:
            pages = [page for block in session.phase.blocks for page in block.pages]
            assert len(pages) == len(set(pages)) <= session.num_pages
            held.update(pages)
        assert [pool.references(page) for page in range(pool.num_pages)] == [
            held[page] for page in range(pool.num_pages)
        ]
        assert pool.num_free == pool.num_pages - len(held)
        assert len(pool._kept) <= pool.num_free / 2

    def step(self) -> dict[Session, int]:
        """One step; how many tokens each session has in it."""
        steps = self.scheduler.schedule()
        for session, _, rows in steps:
            session.postprocess([SampledToken(self.token, 0.5)] * len(rows))
        return {step.session: sum(chunk.count for chunk in step.chunks) for step in steps}


def replaced_cache(harness: ModelHarness, num_pages: int = 70) -> ModelHarness:
    """The same bench over a small pool that keeps pages; nothing is written to it."""
    other = copy(harness)
    other.cache = KVCache(harness.cache.shapes, num_pages, 8, keeps_pages=True)
    return other


@pytest.fixture(scope="module")
def harness() -> ModelHarness:
    return ModelHarness(tiny_model("llama"), num_pages=200)


@pytest.fixture
def bench(harness: ModelHarness, chat: ChatTemplate) -> Iterator[Bench]:
    bench = Bench(harness, chat, max_num_batched_tokens=40)
    yield bench
    for session in [*bench.scheduler.running, *bench.scheduler.waiting]:
        bench.scheduler.remove(session)
    assert harness.all_free


def test_a_long_prompt_is_fed_in_passes_of_bounded_size(bench: Bench) -> None:
    session = bench.session(words=150)
    bench.admit()
    sizes = []
    while session.is_prefill:
        sizes.append(bench.step()[session])
    assert sizes[:-1] == [40] * (len(sizes) - 1)
    assert sum(sizes) == session.usage().prompt_tokens


def test_sessions_that_decode_are_in_every_step(bench: Bench) -> None:
    first, second = bench.session(max_tokens=99), bench.session(workers=3, max_steps=60)
    bench.admit()
    while (first.num_pending, second.num_pending) != (1, 3):
        bench.step()
    late = bench.session(words=90)
    bench.admit()
    while late.is_prefill:
        sizes = bench.step()
        assert (sizes[first], sizes[second]) == (1, 3)
        assert 0 < sizes[late] <= 40 // PREFILL_SHARE


def test_prompts_get_a_share_of_a_step_however_many_decode(
    harness: ModelHarness, chat: ChatTemplate
) -> None:
    bench = Bench(harness, chat, max_num_batched_tokens=4)
    decoding = [bench.session(max_tokens=160) for _ in range(5)]
    bench.admit()
    while any(session.is_prefill for session in decoding):
        bench.step()
    late = bench.session(words=20)
    bench.admit()
    assert bench.step() == {**dict.fromkeys(decoding, 1), late: 1}
    for session in [*bench.scheduler.running]:
        bench.scheduler.remove(session)


def test_prompts_are_fed_in_the_order_in_which_they_came(bench: Bench) -> None:
    first, second = bench.session(words=60), bench.session(words=60)
    bench.admit()
    while first.is_prefill:
        assert next(iter(bench.step())) is first
    assert second.is_prefill
    assert bench.step() == {first: 1, second: 40 // PREFILL_SHARE}


def test_a_short_prompt_does_not_wait_for_a_long_one(bench: Bench) -> None:
    long = bench.session(words=150)
    bench.admit()
    bench.step()
    short = bench.session(words=10)
    bench.admit()
    num_steps = 0
    while short.is_prefill:
        bench.step()
        num_steps += 1
    assert num_steps == -(-short.usage().prompt_tokens // 20)
    assert long.is_prefill


def test_a_long_prompt_gets_half_of_what_is_left_however_many_short_ones_come(
    bench: Bench,
) -> None:
    decoding = bench.session(max_tokens=160)
    bench.admit()
    while decoding.is_prefill:
        bench.step()
    long = bench.session(words=60)
    bench.admit()
    while long.is_prefill:
        bench.session(words=2, max_tokens=1)
        bench.admit()
        sizes = bench.step()
        assert sizes[decoding] == 1
        assert sizes[long] >= 40 // PREFILL_SHARE / 2 or not long.is_prefill


def test_nobody_overtakes_a_session_that_waits_for_pages(bench: Bench) -> None:
    running = bench.session(max_tokens=1000)
    large, small = bench.session(max_tokens=1000), bench.session(max_tokens=1)
    assert bench.admit() == [running]
    bench.scheduler.remove(running)
    assert bench.admit() == [large, small]


def test_what_is_set_aside_never_exceeds_the_pool(bench: Bench) -> None:
    for _ in range(20):
        bench.session(workers=2)
    admitted = bench.admit()
    assert 0 < len(admitted) < 20
    assert sum(session.num_pages for session in admitted) <= 200
    assert bench.scheduler.has_work


def test_all_workers_of_a_session_write_in_every_step(bench: Bench) -> None:
    session = bench.session(workers=4)
    bench.admit()
    while session.is_prefill:
        bench.step()
    bench.step()
    for _ in range(10):
        assert bench.step() == {session: 4}


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_sessions_passes_and_cancels_keeps_the_pages_counted(
    chat: ChatTemplate, harness: ModelHarness, seed: int
) -> None:
    """Prompts start alike, the pool is tiny, sessions end and are cancelled at any moment."""
    rng = random.Random(seed)
    harness = replaced_cache(harness)
    bench = Bench(harness, chat, max_num_batched_tokens=rng.choice((8, 40, 200)))
    scheduler, ended, reused = bench.scheduler, 0, 0
    for _ in range(300):
        act = rng.random()
        if act < 0.2 and len(scheduler.waiting) < 4:
            bench.session(
                words=rng.choice((1, 30, 60)),
                text=rng.choice(("word ", "other ")),
                workers=rng.choice((1, 1, 2)),
                answer=rng.choice(("write", "join")),
                max_steps=rng.choice((2, 10)),
                max_tokens=rng.choice((1, 9)),
            )
        elif act < 0.25 and (scheduler.running or scheduler.waiting):
            scheduler.remove(rng.choice([*scheduler.running, *scheduler.waiting]))
        else:
            bench.admit()
            bench.check_pages()
            for session in bench.step():
                if session.finished is not None:
                    reused += session.finished.usage.cached_tokens
                    ended += 1
                    scheduler.remove(session)
        bench.check_pages()
    assert ended
    assert reused
    for session in [*scheduler.running, *scheduler.waiting]:
        scheduler.remove(session)
    assert harness.all_free
