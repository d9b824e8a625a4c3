"""Events become one message, whole or in chunks, and both say the same."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import cast

import pytest
from langchain_core.messages import AIMessageChunk

from hogwild_agents.langchain.replies import Reply
from hogwild_engine.api.events import (
    AnswerToken,
    Event,
    Finished,
    Paragraph,
    ParagraphFinished,
    Step,
    Token,
    Usage,
)

BOB = Paragraph("Bob", 1, "Two, three.", step=2)
ALICE = Paragraph("Alice", 1, "On", complete=False, step=3)
USAGE = Usage(
    prompt_tokens=9, cached_tokens=4, worker_tokens={"Alice": 2, "Bob": 3}, answer_tokens=2
)
EVENTS: list[Event] = [
    Step(1, ("Alice", "Bob")),
    Token(1, "Alice", 1, "O"),
    Token(1, "Bob", 1, "Two,"),
    Token(2, "Alice", 1, "n"),
    Token(2, "Bob", 1, " three."),
    ParagraphFinished(2, 0, BOB),
    ParagraphFinished(3, 1, ALICE),
    AnswerToken("It "),
    AnswerToken("is."),
    Finished("It is.", "stop", (BOB, ALICE), USAGE, seed=5),
]
FINISHED = cast(Finished, EVENTS[-1])


def reply(*, is_team: bool = True, answer: str = "write") -> Reply:
    return Reply("r", "some-model", is_team, answer)


def chunks(reply: Reply, events: list[Event] = EVENTS) -> list[AIMessageChunk]:
    return [chunk for event in events if (chunk := reply.chunk(event))]


def merged(all_chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return cast(AIMessageChunk, reduce(add, all_chunks))


def test_a_message_holds_paragraphs_in_history_order_and_then_the_answer() -> None:
    first, second, answer = reply().message(FINISHED).content_blocks
    assert first == {
        "type": "reasoning",
        "reasoning": "Two, three.",
        "id": "r-bob-1",
        "extras": {"worker": "Bob", "paragraph": 1, "index": 0},
    }
    assert second["type"] == "reasoning"
    extras = {"worker": "Alice", "paragraph": 1, "index": 1, "complete": False}
    assert second.get("extras") == extras
    assert answer == {"type": "text", "text": "It is."}


def test_merged_chunks_say_what_the_message_says() -> None:
    full, whole = merged(chunks(reply())), reply().message(FINISHED)
    assert full.text == whole.text == "It is."
    assert full.usage_metadata == whole.usage_metadata
    assert full.response_metadata == whole.response_metadata
    blocks = {b.get("id"): {**b, "index": None} for b in full.content_blocks}
    assert blocks == {b.get("id"): {**b, "index": None} for b in whole.content_blocks}


def test_merged_chunks_stand_in_order_of_beginning_and_tell_their_place() -> None:
    *paragraphs, answer = merged(chunks(reply())).content_blocks
    assert [b.get("extras", {})["worker"] for b in paragraphs] == ["Alice", "Bob"]
    assert [b.get("extras", {})["index"] for b in paragraphs] == [1, 0]
    assert answer["type"] == "text"


def test_every_chunk_of_a_paragraph_bears_its_workers_name() -> None:
    shown = chunks(reply())
    assert all(
        chunk.name == (chunk.content_blocks[0].get("id") or "").split("-")[1].capitalize()
        for chunk in shown
        if chunk.content_blocks and chunk.content_blocks[0]["type"] == "reasoning"
    )
    assert {chunk.name for chunk in shown} == {"Alice", "Bob", None}
    assert merged(shown).name is None


def test_the_metadata_says_when_each_worker_stopped_and_how_it_sampled() -> None:
    about = reply().message(FINISHED).response_metadata
    assert about["workers"]["Bob"].keys() == {"tokens", "end", "step"}
    assert about["sampling"] == FINISHED.sampling


def test_every_worker_token_is_a_chunk_of_its_own() -> None:
    assert [chunk.content_blocks[0].get("reasoning") for chunk in chunks(reply())[:4]] == [
        "O",
        "Two,",
        "n",
        " three.",
    ]


def test_numbers_come_with_the_last_chunk_alone() -> None:
    *others, last = chunks(reply())
    assert last.content == []
    assert last.chunk_position == "last"
    assert last.usage_metadata
    assert last.response_metadata["model_name"] == "some-model"
    assert not any(chunk.usage_metadata for chunk in others)
    assert not any("model_name" in chunk.response_metadata for chunk in others)


def test_usage_tells_thought_from_answer_and_cache_from_prompt() -> None:
    assert reply().message(FINISHED).usage_metadata == {
        "input_tokens": 9,
        "output_tokens": 7,
        "total_tokens": 16,
        "input_token_details": {"cache_read": 4},
        "output_token_details": {"reasoning": 5},
    }


def test_joined_paragraphs_are_no_thought() -> None:
    usage = reply(answer="join").message(FINISHED).usage_metadata
    assert usage is not None
    assert usage.get("output_token_details") == {"reasoning": 0}


@pytest.mark.parametrize("events", [EVENTS[:1] + EVENTS[-3:]])
def test_a_lone_worker_writes_plain_text(events: list[Event]) -> None:
    finished = Finished("It is.", "length", (), Usage(answer_tokens=2), seed=5)
    full = merged(chunks(reply(is_team=False), [*events[:-1], finished]))
    whole = reply(is_team=False).message(finished)
    assert full.content == whole.content == "It is."
    assert full.response_metadata == whole.response_metadata
    assert whole.response_metadata["finish_reason"] == "length"


def test_metadata_is_plain_data() -> None:
    metadata = reply().message(FINISHED).response_metadata
    assert metadata["paragraphs"][0] == {
        "worker": "Bob",
        "number": 1,
        "text": "Two, three.",
        "complete": True,
        "step": 2,
    }
    assert metadata["seed"] == 5
    assert metadata["model_provider"] == "hogwild"
