"""Where a run meets its limits, context, pool, budget, memory: it ends with a reason, no crash."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from hogwild_engine import Engine, EngineConfig, Protocol, Request, SamplingParams, make_workers
from hogwild_engine.api.errors import PromptTooLongError
from hogwild_engine.api.events import Finished, Paragraph
from hogwild_engine.api.layout import LAYOUTS, LayoutName
from hogwild_engine.api.protocol import CODE, INSTRUCT, PAPER
from hogwild_engine.cache.block import Block
from hogwild_engine.loading.memory import return_freed_memory
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.sessions.budget import SessionLimits
from hogwild_engine.sessions.context import SessionContext, _max_step_tokens
from hogwild_engine.step.batch import Batch, build_batch
from hogwild_engine.step.sampling import ResolvedSampling
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.prompt import make_prompt
from model_harness import ModelHarness, Script, model_of
from tiny import tiny_model

HELLO = ({"role": "user", "content": "Hello"},)
GREEDY = SamplingParams(temperature=0, seed=1)
SHORT = Protocol(name="short", rules="Go.", stagger=0, min_chars=0, max_repeats=None)


def longest_view(plan: Batch) -> int:
    """Tokens that the row with the longest view reads."""
    seen: dict[int, int] = {}
    for entry in plan.reads:
        for offset, end in enumerate(entry.hi):
            row = entry.first_row + offset
            seen[row] = seen.get(row, 0) + end
    return max(seen.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [2, 5])
@pytest.mark.parametrize("answer", ["write", "join"])
def test_a_full_context_ends_the_run_with_an_answer(
    tiny_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    layout: LayoutName,
    num_workers: int,
    answer: Any,
) -> None:
    engine = tiny_engine("llama", talkative=True)
    run, longest = engine._runner.run, 0

    def watch(plan: Batch) -> Any:
        nonlocal longest
        longest = max(longest, longest_view(plan))
        return run(plan)

    monkeypatch.setattr(engine._runner, "run", watch)
    monkeypatch.setattr(engine, "context_len", 360)
    request = Request(
        HELLO,
        workers=make_workers(num_workers),
        protocol=SHORT,
        layout=layout,
        answer=answer,
        max_steps=10_000,
        max_tokens=20,
        sampling=GREEDY,
    )
    done = engine.submit(request).result(60)
    assert done.finish_reason == "length"
    assert done.text
    assert longest <= 360
    assert done.usage.steps > 2


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sync_interval", [1, None])
def test_a_generous_bound_on_the_answer_is_no_demand(
    tiny_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    num_workers: int,
    layout: LayoutName,
    sync_interval: int | None,
) -> None:
    """A team thinks in half of what its prompt leaves, and its answer fills the rest."""
    engine = tiny_engine("llama")
    monkeypatch.setattr(engine, "context_len", 500)
    request = Request(
        HELLO,
        workers=make_workers(num_workers),
        protocol=SHORT,
        layout=layout,
        sync_interval=sync_interval,
        max_tokens=9000,
        sampling=GREEDY,
        ignore_eos=True,
    )
    done = engine.submit(request).result(60)
    assert done.finish_reason == "length"
    free = 500 - done.usage.prompt_tokens
    thought = sum(done.usage.worker_tokens.values())
    assert thought > free / 8  # headers and the final-answer prompt take the rest of that half
    assert done.usage.answer_tokens > free / 4


@pytest.mark.parametrize("context_len", [1024, 2048, 8192, 32768])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_default_settings_let_a_team_think_behind_half_a_context(
    harness: ModelHarness, chat: ChatTemplate, context_len: int, num_workers: int
) -> None:
    limits = SessionLimits(context_len, max(32_768, context_len * 9 // 8) // 32, 32)  # the default
    sampling = ResolvedSampling(0.0, 1.0, 0, 0.0, 1.0, 0)

    def context(words: int) -> SessionContext:
        request = Request(
            ({"role": "user", "content": "word " * words},), workers=make_workers(num_workers)
        )
        return SessionContext(request, chat, sampling, harness.cache, limits)

    half = context_len // 2 - len(context(0).prompt.tokens)
    budget = context(half).budget
    assert budget.num_pages <= limits.num_pages
    if num_workers > 1:
        writers = [Block(harness.cache) for _ in range(num_workers)]
        common = Block(harness.cache)
        common.pages = [0] * (context_len // 64)
        for view_len in range(context_len // 2, context_len * 9 // 16, 16):
            assert budget.fits_step(view_len, [common, *writers], writers)


def test_a_bound_on_the_answer_reserves_no_more_than_a_context(
    harness: ModelHarness, chat: ChatTemplate
) -> None:
    """Other sessions find room beside one that may answer without end."""
    sampling, pages = ResolvedSampling(0.0, 1.0, 0, 0.0, 1.0, 0), {}
    for num_workers in (1, 2):
        for max_tokens in (100, 10**6):
            request = Request(
                HELLO, workers=make_workers(num_workers), max_steps=40, max_tokens=max_tokens
            )
            limits = SessionLimits(2000, 4000, 8)
            context = SessionContext(request, chat, sampling, harness.cache, limits)
            pages[num_workers, max_tokens] = context.budget.num_pages
        assert pages[num_workers, 100] < 100
        assert 2000 / 8 <= pages[num_workers, 10**6] < 2000 / 8 + 30


def test_a_team_that_is_too_large_for_the_context_is_told_so(
    tiny_engine: Callable[..., Engine],
) -> None:
    with pytest.raises(PromptTooLongError, match=r"^workers: wanted headers .+ fewer than 512 tok"):
        tiny_engine("llama").submit(Request(HELLO, workers=make_workers(256)))


def test_a_single_worker_fills_its_context_and_says_so(
    tiny_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("qwen2")
    monkeypatch.setattr(engine, "context_len", 100)
    request = Request(HELLO, workers=make_workers(1), max_tokens=10_000, sampling=GREEDY)
    done = engine.submit(request).result(60)
    assert done.finish_reason == "length"
    assert done.usage.prompt_tokens + done.usage.answer_tokens == 100


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_small_pool_refuses_or_answers(
    tiny_engine: Callable[..., Engine], num_workers: int, page_size: int
) -> None:
    """At every size of the pool: an error at submit, or a whole run that may be cut short."""
    shared = tiny_engine("llama", talkative=True)
    loaded = Pretrained(model_of(shared), shared.tokenizer)
    outcomes = []
    for tokens in (16, 128, 192, 256, 320, 416, 640):
        config = EngineConfig(model="tiny", num_pages=tokens // page_size, page_size=page_size)
        with Engine(config, loaded=loaded) as engine:
            request = Request(
                HELLO,
                workers=make_workers(num_workers),
                protocol=SHORT,
                max_steps=12,
                max_tokens=8,
                sampling=GREEDY,
            )
            try:
                done = engine.submit(request).result(60)
            except PromptTooLongError:
                outcomes.append("refused")
            else:
                assert done.text
                outcomes.append(done.finish_reason)
            stats = engine.stats()
            assert stats.free_pages == stats.num_pages
    served = outcomes[outcomes.count("refused") :]
    assert outcomes[0] == "refused"
    assert "refused" not in served
    assert served


@pytest.fixture(scope="module")
def harness() -> ModelHarness:
    return ModelHarness(tiny_model("llama"), num_pages=4000)


@pytest.fixture
def free_after(harness: ModelHarness) -> Iterator[None]:
    yield
    assert harness.all_free


FRAGMENTS = (" word", " word word", ".\n\n", "!\n\n", "\n\n", "```\n", "x = 1\n", " STOP")


SECTIONS = ("", "\n\n", "### Others\n\n", "### What the others have not finished\n\n" * 20)


def random_request(rng: random.Random) -> Request:
    some = ("Al", "Worker with a long name", "龘" * 60, "of many letters " * 3 + "x" * 14)
    names = [rng.choice(some) for _ in range(5)]
    workers = make_workers([f"{name}{i}" for i, name in enumerate(names[: rng.randint(1, 5)])])
    history = [Paragraph(worker.name, 998, "word") for worker in workers if rng.random() < 0.2]
    protocol = replace(
        rng.choice((SHORT, PAPER, INSTRUCT, CODE)),
        rules="Go.",
        ending_token=rng.choice(("opens", "closes")),
        max_repeats=rng.choice((None, 2)),
        intervention_tokens=rng.choice((None, 1, 30)),
        forced_prefix=rng.choice(("", "", " a long opening of many words" * 4)),
        first_prefixes=rng.choice(((), (" Hi, I'm {name}.", " 龘" * 20))),
        header=rng.choice(("**{name} [{number}]:**", "{name} {name} {number}:\n\n", "{name}")),
        others_header=rng.choice(SECTIONS),
        after_other=rng.choice(SECTIONS),
        own_header=rng.choice(SECTIONS),
    )
    return Request(
        ({"role": "user", "content": "word " * rng.choice((1, 50, 300))},),
        workers=workers,
        protocol=protocol,
        layout=LAYOUTS[rng.choice(list(LAYOUTS))].name,
        sync_interval=rng.choice((1, 2, 7, None)),
        history=tuple(history),
        answer=rng.choice(("write", "join")),
        max_steps=rng.choice((1, 20, 200)),
        max_tokens=rng.choice((1, 40, 300)),
        stop=rng.choice(((), ("STOP",))),
    )


@pytest.mark.parametrize("seed", range(80))
def test_a_session_never_holds_more_than_it_set_aside(
    harness: ModelHarness, chat: ChatTemplate, free_after: None, seed: int
) -> None:
    """Any pool, context, team and paragraphs: pages and views keep their bounds."""
    rng = random.Random(seed)
    request = random_request(rng)
    names = [worker.name for worker in request.workers]
    texts = {name: rng.choices(FRAGMENTS, k=600) for name in ("", *names)}
    prompt_len = len(make_prompt(request, chat).tokens)
    context_len = rng.choice((200, 700, 4000, prompt_len + rng.randint(0, 400)))
    num_pages = rng.choice((20, 60, 200, 4000, prompt_len // 8 + rng.randint(0, 60)))
    try:
        script = Script(harness, chat, request, texts, context_len=context_len, num_pages=num_pages)
    except PromptTooLongError:
        return
    session = script.session
    assert session.num_pages <= num_pages

    def check(turn: Any) -> None:
        held = harness.cache.pool.num_pages - harness.cache.pool.num_free
        assert held <= session.num_pages
        assert longest_view(build_batch([turn.chunks])) <= context_len

    while session.finished is None:
        assert script.turns < 700
        script.step(50 if session.is_prefill else 10_000, check)
    session.release()
    done = script.events[-1]
    assert isinstance(done, Finished)
    if request.answer == "write":
        assert done.usage.answer_tokens >= 1


SECTION = "### What the others have not finished\n\n" * 20
ENDS = [" a", ".\n\n"] * 100


def run_near_limits(
    harness: ModelHarness, chat: ChatTemplate, request: Request, context: int, pages: int
) -> Finished | None:
    """Run with so many more tokens and pages than the prompt has; ``None`` if that is refused."""
    prompt_len = len(make_prompt(request, chat).tokens)
    context_len, num_pages = prompt_len + context, prompt_len // 8 + pages
    texts = dict.fromkeys(("", *(worker.name for worker in request.workers)), ENDS)
    try:
        script = Script(harness, chat, request, texts, context_len=context_len, num_pages=num_pages)
    except PromptTooLongError:
        return None

    def check(turn: Any) -> None:
        assert longest_view(build_batch([turn.chunks])) <= context_len

    while script.session.finished is None:
        script.step(10_000, check)
    script.session.release()
    return script.session.finished


@pytest.mark.parametrize("layout", ["combined", "interleaved", "contiguous"])
@pytest.mark.parametrize("answer", ["write", "join"])
def test_a_name_of_few_letters_and_many_tokens_has_its_room(
    harness: ModelHarness, chat: ChatTemplate, free_after: None, layout: LayoutName, answer: Any
) -> None:
    """Headers are measured in tokens, and paragraphs end in every second step."""
    request = Request(
        HELLO,
        workers=make_workers(["龘" * 50, "of many letters " * 3 + "x" * 12]),
        protocol=SHORT,
        layout=layout,
        answer=answer,
        max_steps=12,
        max_tokens=1,
    )
    for context in range(300, 900, 75):
        run_near_limits(harness, chat, request, context, 4000)
    for pages in range(20, 100, 3):
        run_near_limits(harness, chat, request, 3000, pages)


@pytest.mark.parametrize("name", ["龘" * 50, "of many letters " * 3 + "x" * 12])
def test_a_step_has_room_for_the_longest_header_in_tokens(chat: ChatTemplate, name: str) -> None:
    others = make_workers(["Al", name, "of many letters " * 3 + "y" * 15])
    request = Request(HELLO, workers=others, protocol=SHORT, max_steps=3000)
    room = _max_step_tokens(request, make_prompt(request, chat), chat)
    for number in (1, 99, 1234, 3001):
        assert len(chat.encode(SHORT.header_for(name, number) + SHORT.intervention)) < room


@pytest.mark.parametrize("others", ["", SECTION])
@pytest.mark.parametrize("after", ["", SECTION + "a"])
@pytest.mark.parametrize("own", ["", SECTION + "b"])
@pytest.mark.parametrize("answer", ["write", "join"])
def test_section_headers_have_their_pages(
    harness: ModelHarness,
    chat: ChatTemplate,
    free_after: None,
    others: str,
    after: str,
    own: str,
    answer: Any,
) -> None:
    protocol = replace(SHORT, others_header=others, after_other=after, own_header=own)
    request = Request(
        HELLO,
        workers=make_workers(2),
        protocol=protocol,
        answer=answer,
        max_steps=10,
        max_tokens=1,
    )
    for pages in range(0, 100, 7):
        run_near_limits(harness, chat, request, 3000, pages)
    done = run_near_limits(harness, chat, request, 3000, 4000)
    assert done is not None
    assert done.usage.steps == 10


@pytest.mark.parametrize("page_size", [1, 8, 64, 256])
@pytest.mark.parametrize("num_workers", [2, 5])
@pytest.mark.parametrize("max_steps", [1, 30])
def test_a_run_that_has_room_is_never_cut_short(
    chat: ChatTemplate, page_size: int, num_workers: int, max_steps: int
) -> None:
    """What a session sets aside is enough for its whole budget."""
    harness = ModelHarness(
        tiny_model("llama"), num_pages=max(80, 2000 // page_size), page_size=page_size
    )
    request = Request(
        HELLO,
        workers=make_workers(num_workers),
        protocol=SHORT,
        max_steps=max_steps,
        max_tokens=5,
        answer="write",
    )
    texts = {
        worker.name: [" a paragraph of about a dozen words that ends here.\n\n"] * 9
        for worker in request.workers
    }
    script = Script(harness, chat, request, {**texts, "": [" Done", 2]})
    script.run()
    done = script.session.finished
    assert done is not None
    assert (done.usage.steps, done.finish_reason, done.text) == (max_steps, "stop", "Done")


def test_a_long_run_grows_by_its_cache_pages_only(tokenizer: Any) -> None:
    """300 steps of four workers, in a pool whose pages are touched before."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096
    config = EngineConfig(model="tiny", num_pages=400, page_size=8)
    request = Request(
        HELLO,
        workers=make_workers(4),
        protocol=SHORT,
        max_steps=300,
        max_tokens=5,
        sampling=GREEDY,
    )
    process = psutil.Process()
    with Engine(config, loaded=Pretrained(model, tokenizer)) as engine:
        for group in engine._cache.groups:
            group.keys.zero_()
            group.values.zero_()
        engine.submit(request).result(120)  # the allocator has its memory from here on
        return_freed_memory()  # what the allocator keeps is not what the engine holds
        before = process.memory_info().rss
        done = engine.submit(request).result(120)
        return_freed_memory()
        growth = process.memory_info().rss - before
    assert done.usage.steps == 300
    assert growth < 2**20
