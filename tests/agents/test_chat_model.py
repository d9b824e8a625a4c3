"""`ChatHogwild` on the embedded model: what a user of any chat model expects, and a team's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing
from functools import reduce
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Any, cast

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage

from hogwild_agents import ChatHogwild, Worker
from hogwild_agents.langchain import errors
from hogwild_agents.langchain.calls import events
from hogwild_engine.api.events import Token

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

TASK = "Name three uses of a brick."
LONG: dict[str, Any] = {"max_steps": 400, "max_tokens": 400}


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return cast(AIMessageChunk, reduce(add, chunks))


def texts_of(message: AIMessage) -> dict[tuple[str, int], str]:
    """Text by worker and paragraph."""
    thoughts = [b for b in message.content_blocks if b["type"] == "reasoning"]
    extras = [cast(dict[str, Any], block.get("extras")) for block in thoughts]
    keys = [(about["worker"], about["paragraph"]) for about in extras]
    return dict(zip(keys, [block.get("reasoning", "") for block in thoughts], strict=True))


@pytest.fixture(scope="module")
def whole(team_llm: ChatHogwild) -> AIMessage:
    return team_llm.invoke(TASK)


@pytest.fixture(scope="module")
def chunks(team_llm: ChatHogwild) -> list[AIMessageChunk]:
    return list(team_llm.stream(TASK))


def test_a_team_answers_with_its_paragraphs_as_reasoning(whole: AIMessage) -> None:
    *thoughts, answer = whole.content_blocks
    assert {block["type"] for block in thoughts} == {"reasoning"}
    assert answer == {"type": "text", "text": whole.text}
    assert whole.text
    history = whole.response_metadata["paragraphs"]
    assert [p["text"] for p in history] == [block.get("reasoning") for block in thoughts]
    assert {worker for worker, _ in texts_of(whole)} == {"Alice", "Bob"}


def test_a_reply_tells_how_it_came_about(whole: AIMessage) -> None:
    about, usage = whole.response_metadata, whole.usage_metadata
    assert about["model_name"] == "smollm2-135m"
    assert about["model_provider"] == "hogwild"
    assert about["finish_reason"] in ("stop", "length")
    assert about["seed"] == 7
    assert about["steps"] == 6
    assert usage is not None
    assert usage.get("output_token_details") == {"reasoning": 12}
    assert usage["output_tokens"] == 12 + 3
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def uncached(message: AIMessage) -> dict[str, Any]:
    """The usage but for what came from cache: a second call finds the first one's pages."""
    usage: dict[str, Any] = {**(message.usage_metadata or {})}
    assert usage.pop("input_token_details")["cache_read"] >= 0
    return usage


def test_a_stream_says_what_invoke_says(whole: AIMessage, chunks: list[AIMessageChunk]) -> None:
    full = merged(chunks)
    assert full.text == whole.text
    assert texts_of(full) == texts_of(whole)
    assert uncached(full) == uncached(whole)
    assert full.response_metadata == whole.response_metadata


def test_workers_take_turns_in_the_stream(chunks: list[AIMessageChunk]) -> None:
    blocks = [block for chunk in chunks for block in chunk.content_blocks]
    workers = [str(b.get("id")).split("-")[1] for b in blocks if b.get("reasoning")]
    assert sum(before != after for before, after in pairwise(workers)) > 4


def test_a_lone_worker_is_the_plain_model(lone_llm: ChatHogwild) -> None:
    chunks = list(lone_llm.stream(TASK))
    message = lone_llm.invoke(TASK)
    assert isinstance(message.content, str)
    assert message.content
    assert merged(chunks).content == message.content
    assert len(chunks) > 2
    assert message.response_metadata["steps"] == 0
    assert message.response_metadata["paragraphs"] == []


def test_joined_paragraphs_are_the_answer(team_llm: ChatHogwild) -> None:
    message = team_llm.invoke(TASK, answer="join")
    texts = [p["text"] for p in message.response_metadata["paragraphs"]]
    assert message.text == "\n\n".join(texts)
    assert message.usage_metadata is not None
    assert message.usage_metadata.get("output_token_details") == {"reasoning": 0}
    assert merged(list(team_llm.stream(TASK, answer="join"))).text == message.text


def test_roles_and_names_reach_the_workers(team_llm: ChatHogwild) -> None:
    team = [Worker("Ann", role="finds uses in the garden"), Worker("Ben Ó.")]
    message = team_llm.invoke(TASK, workers=team, max_steps=2)
    assert {worker for worker, _ in texts_of(message)} == {"Ann", "Ben Ó."}
    plain = team_llm.invoke(TASK, workers=["Ann", "Ben Ó."], max_steps=2)
    assert message.usage_metadata
    assert plain.usage_metadata
    assert message.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]


def test_a_call_may_differ_from_the_model(team_llm: ChatHogwild) -> None:
    assert team_llm.invoke(TASK, max_steps=3).response_metadata["steps"] == 3
    assert team_llm.bind(max_steps=2).invoke(TASK).response_metadata["steps"] == 2
    assert isinstance(team_llm.invoke(TASK, workers=1).content, str)


def test_a_stop_string_ends_the_answer_and_is_not_shown(lone_llm: ChatHogwild) -> None:
    words = lone_llm.invoke(TASK).text.split()
    stop = f"{words[1]} {words[2]}"
    for text in (
        lone_llm.invoke(TASK, stop=[stop]).text,
        merged(list(lone_llm.stream(TASK, stop=[stop]))).text,
        lone_llm.model_copy(update={"stop": [stop]}).invoke(TASK).text,
    ):
        assert text.split() == words[:1]


def test_a_seed_makes_a_lone_call_repeatable(team_llm: ChatHogwild) -> None:
    warm = team_llm.model_copy(update={"temperature": 2.0, "max_steps": 3})
    first, again, other = (warm.invoke(TASK, seed=seed) for seed in (1, 1, 2))
    assert (first.text, texts_of(first)) == (again.text, texts_of(again))
    assert (first.text, texts_of(first)) != (other.text, texts_of(other))


def test_messages_of_all_kinds_are_answered(team_llm: ChatHogwild) -> None:
    assert team_llm.invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage("Name a colour.", name="example"),
            AIMessage("Red."),
            HumanMessage([{"type": "text", "text": TASK}]),
            AIMessage("To build a wall.", name="Alice"),
        ]
    ).text


def test_history_goes_on_where_it_stopped(team_llm: ChatHogwild) -> None:
    written = AIMessage("To build a wall.", name="Alice")
    message = team_llm.invoke([HumanMessage(TASK), written])
    alice = [number for worker, number in texts_of(message) if worker == "Alice"]
    assert alice[:1] in ([], [2])


def test_models_of_equal_settings_share_an_engine(
    team_llm: ChatHogwild, lone_llm: ChatHogwild
) -> None:
    assert team_llm.engine is lone_llm.engine


def test_a_timeout_ends_the_session(
    team_llm: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    with pytest.raises(errors.ModelTimeoutError, match=r"within 0\.2 s") as error:
        team_llm.invoke(TASK, timeout=0.2, **LONG)
    assert error.value.is_retryable
    assert all_pages_free(team_llm.engine)


async def test_a_timeout_ends_an_async_session(
    team_llm: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    with pytest.raises(errors.ModelTimeoutError, match="allow more time"):
        await team_llm.ainvoke(TASK, timeout=0.2, **LONG)
    assert all_pages_free(team_llm.engine)


def test_leaving_a_stream_ends_the_session(
    team_llm: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    with closing(cast(Any, team_llm.stream(TASK, **LONG))) as stream:
        next(stream)
        assert team_llm.engine.stats().sessions == 1
    assert all_pages_free(team_llm.engine)


async def test_leaving_an_async_stream_ends_the_session(
    team_llm: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    async with aclosing(cast(Any, team_llm.astream(TASK, **LONG))) as stream:
        await anext(stream)
    await asyncio.sleep(0)
    assert all_pages_free(team_llm.engine)


def test_a_prompt_that_is_too_long_overflows_the_context(team_llm: ChatHogwild) -> None:
    with pytest.raises(errors.PromptTooLongError, match="messages: wanted") as error:
        team_llm.invoke("brick " * 9000)
    assert not error.value.is_retryable


def test_a_model_that_nobody_knows_is_not_found() -> None:
    # The name alone is refused, without asking a hub.
    with pytest.raises(errors.ModelNotFoundError, match="no such"):
        ChatHogwild(model="no such/model").invoke(TASK)


def test_a_closed_engine_is_told_and_replaced(embedded: dict[str, Any]) -> None:
    llm = ChatHogwild(temperature=0, **{**embedded, "num_pages": 64})
    stream = cast(Any, llm.stream(TASK, **LONG))
    next(stream)
    closed = llm.engine
    closed.close()
    with pytest.raises(errors.EngineClosedError) as error:
        list(stream)
    assert error.value.is_retryable
    assert llm.engine is not closed
    assert llm.invoke(TASK, max_steps=1, max_tokens=1).response_metadata["steps"] == 1
    llm.engine.close()


def test_a_cache_tells_calls_apart_by_every_setting(team_llm: ChatHogwild) -> None:
    llm = team_llm.model_copy(update={"cache": InMemoryCache(), "max_steps": 2, "max_tokens": 2})
    num_steps = llm.engine.stats().steps
    llm.invoke(TASK)
    once = llm.engine.stats().steps
    assert once > num_steps
    llm.invoke(TASK)
    assert llm.engine.stats().steps == once
    changes: list[dict[str, Any]] = [{"workers": 1}, {"layout": "interleaved"}, {"seed": 3}]
    for change in [*changes, {"stop": ["x"]}]:
        before = llm.engine.stats().steps
        llm.invoke(TASK, **change)
        assert llm.engine.stats().steps > before


def test_tokens_are_counted_by_the_models_own_tokenizer(lone_llm: ChatHogwild) -> None:
    message = lone_llm.invoke(TASK)
    assert message.usage_metadata is not None
    counted = lone_llm.get_num_tokens_from_messages([HumanMessage(TASK)])
    assert counted == message.usage_metadata["input_tokens"]
    assert lone_llm.get_num_tokens("brick") == len(lone_llm.get_token_ids("brick")) < counted


def test_tracing_learns_the_model_and_the_settings_of_the_call() -> None:
    llm = ChatHogwild(temperature=0.5, max_tokens=9, stop=["."])
    assert llm._get_ls_params() == {
        "ls_provider": "hogwild",
        "ls_model_type": "chat",
        "ls_model_name": "smollm2-135m",
        "ls_temperature": 0.5,
        "ls_max_tokens": 9,
        "ls_stop": ["."],
    }
    assert llm._get_ls_params(model="other").get("ls_model_name") == "other"
    assert llm._llm_type == "chat-hogwild"


def test_raw_events_can_be_read(team_llm: ChatHogwild) -> None:
    call = team_llm.make_call([HumanMessage(TASK)], max_steps=8, max_tokens=1)
    with closing(events(call)) as happening:
        assert any(isinstance(event, Token) for event in happening)


async def test_async_calls_say_what_sync_calls_say(team_llm: ChatHogwild, whole: AIMessage) -> None:
    assert texts_of(await team_llm.ainvoke(TASK)) == texts_of(whole)
    full = merged([chunk async for chunk in team_llm.astream(TASK)])
    assert (full.text, texts_of(full)) == (whole.text, texts_of(whole))
