"""LangChain messages become turns and history, and nothing is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    HumanMessageChunk,
    SystemMessage,
    ToolMessage,
)

from hogwild_agents.langchain.errors import ContentError, RequestError
from hogwild_agents.langchain.messages import to_conversation, to_messages
from hogwild_engine.api.events import Paragraph

TEAM = ("Alice", "Bob")
CALL = {"name": "add", "args": {"a": 1}, "id": "call-1"}


def turns(*messages: BaseMessage, team: tuple[str, ...] = TEAM) -> list[tuple[str, str]]:
    conversation = to_conversation(messages, team)
    return [(turn["role"], turn["content"]) for turn in conversation.messages]


def history(*messages: BaseMessage) -> list[tuple[str, int, str]]:
    return [(p.worker, p.number, p.text) for p in to_conversation(messages, TEAM).history]


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "reasoning": text, **more}


def test_every_kind_of_message_becomes_a_turn_in_order() -> None:
    assert turns(
        SystemMessage("be brief"),
        HumanMessage("one"),
        AIMessage("two"),
        SystemMessage("a late rule"),
        HumanMessage("three"),
        HumanMessage("four"),
    ) == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "two"),
        ("system", "a late rule"),
        ("user", "three"),
        ("user", "four"),
    ]


def test_tool_calls_and_their_results_keep_what_templates_need() -> None:
    conversation = to_conversation(
        [
            HumanMessage("q"),
            AIMessage("", tool_calls=[CALL]),
            ToolMessage("2", tool_call_id="call-1"),
        ]
    )
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"type": "function", "id": "call-1", "function": function}
    assert conversation.messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call-1"},
    )


def test_a_trailing_answer_stays_the_last_turn() -> None:
    assert turns(HumanMessage("q"), AIMessage("So far"))[-1] == ("assistant", "So far")


def test_chunks_are_messages() -> None:
    rendered = turns(HumanMessageChunk(content="q"), AIMessageChunk(content="a"))
    assert rendered == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("role", "known_as"), [("user", "user"), ("Assistant", "assistant"), ("developer", "system")]
)
def test_roles_by_name_are_understood(role: str, known_as: str) -> None:
    assert turns(ChatMessage(role=role, content="x")) == [(known_as, "x")]


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'critic'"):
        to_conversation([ChatMessage(role="critic", content="x")])


def test_no_message_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one message"):
        to_conversation([])


def test_messages_named_for_workers_after_the_last_human_message_are_history() -> None:
    messages = (
        HumanMessage("q"),
        AIMessage("first", name="Alice"),
        AIMessage("other", name="Bob"),
        AIMessage("second", name="Alice"),
    )
    assert turns(*messages) == [("user", "q")]
    assert history(*messages) == [
        ("Alice", 1, "first"),
        ("Bob", 1, "other"),
        ("Alice", 2, "second"),
    ]


def test_other_names_are_ordinary_names() -> None:
    messages = [HumanMessage("q", name="Alice"), AIMessage("a", name="critic")]
    conversation = to_conversation(messages, TEAM)
    assert [turn["name"] for turn in conversation.messages] == ["Alice", "critic"]
    assert conversation.history == ()


def test_one_worker_alone_has_no_history() -> None:
    conversation = to_conversation([HumanMessage("q"), AIMessage("a", name="Alice")], ["Alice"])
    assert conversation.messages == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    )
    assert conversation.history == ()


def test_another_agents_message_on_the_current_task_is_something_to_answer() -> None:
    messages = (
        HumanMessage("q", name="Barnaby"),
        AIMessage("a plan", name="planner"),
        HumanMessage("go on"),
        AIMessage("a draft", name="writer"),
        AIMessage("", name="critic", tool_calls=[CALL]),
        ToolMessage("2", tool_call_id="call-1", name="add"),
        AIMessage("two flaws", name="critic"),
    )
    for team in (TEAM, ("Alice",)):
        spoken = [
            (turn["role"], turn.get("name")) for turn in to_conversation(messages, team).messages
        ]
        assert spoken == [
            ("user", "Barnaby"),
            ("assistant", "planner"),
            ("user", None),
            ("user", "writer"),
            ("assistant", "critic"),
            ("tool", "add"),
            ("user", "critic"),
        ]


@pytest.mark.parametrize(
    "given", [[{"content": "secret"}], [HumanMessage("hi"), 5], ["hi", {"role": "user"}], {}, 5]
)
def test_what_is_no_list_of_messages_is_refused_without_its_content(given: Any) -> None:
    with pytest.raises(RequestError, match="messages: wanted") as error:
        to_messages(given)
    assert "secret" not in str(error.value)
    assert error.value.__cause__ is None


def test_an_earlier_turn_is_told_by_its_answer_without_reasoning() -> None:
    answer = AIMessage([thought("hm", extras={"worker": "Bob"}), {"type": "text", "text": "a"}])
    messages = (HumanMessage("q"), AIMessage("draft", name="Alice"), answer, HumanMessage("next"))
    assert turns(*messages) == [("user", "q"), ("assistant", "a"), ("user", "next")]
    assert history(*messages) == []


def test_an_earlier_turn_without_an_answer_is_told_by_what_its_workers_wrote() -> None:
    messages = (
        HumanMessage("q"),
        AIMessage("one", name="Alice"),
        AIMessage("two", name="Bob"),
        HumanMessage("next"),
    )
    assert turns(*messages) == [("user", "q"), ("assistant", "one\n\ntwo"), ("user", "next")]


def test_workers_reasoning_blocks_on_the_current_task_are_history_once() -> None:
    block = thought("first", id="x-alice-1", extras={"worker": "Alice"})
    answer = AIMessage([block, thought("more", extras={"worker": "Bob"})], tool_calls=[CALL])
    messages = (
        HumanMessage("q"),
        AIMessage("first", name="Alice", id="x-alice-1"),
        answer,
        ToolMessage("2", tool_call_id="call-1"),
    )
    assert history(*messages) == [("Alice", 1, "first"), ("Bob", 1, "more")]
    assert [role for role, _ in turns(*messages)] == ["user", "assistant", "tool"]


def test_reasoning_of_other_models_is_told_on_the_current_task_only() -> None:
    answer = AIMessage([thought("hm"), {"type": "text", "text": "a"}])
    now = to_conversation([HumanMessage("q"), answer], TEAM).messages
    later = to_conversation([HumanMessage("q"), answer, HumanMessage("next")], TEAM).messages
    assert now[1]["reasoning_content"] == "hm"
    assert "reasoning_content" not in later[1]


def test_a_named_message_that_calls_tools_is_a_turn() -> None:
    messages = (HumanMessage("q"), AIMessage("", name="Alice", tool_calls=[CALL]))
    assert history(*messages) == []
    assert len(turns(*messages)) == 2


def test_blocks_of_text_are_joined() -> None:
    assert turns(
        HumanMessage(["one", {"type": "text", "text": "two"}]),
        AIMessage([{"type": "text", "text": "thr"}, {"type": "text", "text": "ee"}]),
    ) == [("user", "one\ntwo"), ("assistant", "three")]


@pytest.mark.parametrize(
    "kind", ["image_url", "image", "input_audio", "file", "tool_result", "new"]
)
def test_a_block_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    with pytest.raises(ContentError, match=repr(kind)) as error:
        to_conversation([HumanMessage([{"type": kind, "url": "http://x"}])])
    assert isinstance(error.value, ModelInvalidRequestError)
    assert not error.value.is_retryable


def test_a_call_that_stands_in_the_content_too_is_told_once() -> None:
    block = {"type": "tool_use", "id": "call-1", "name": "add", "input": {"a": 1}}
    message = AIMessage([{"type": "text", "text": "calling"}, block], tool_calls=[CALL])
    assert turns(HumanMessage("q"), message)[1] == ("assistant", "calling")


def test_a_call_that_stands_in_the_content_alone_is_refused() -> None:
    with pytest.raises(ContentError, match="tool_use"):
        turns(HumanMessage("q"), AIMessage([{"type": "tool_use", "id": "x", "name": "f"}]))


def test_a_call_with_broken_arguments_is_told_in_words() -> None:
    broken = {"name": "add", "args": '{"a": ', "id": "x", "error": None}
    ((_, _), (role, text)) = turns(HumanMessage("q"), AIMessage("", invalid_tool_calls=[broken]))
    assert role == "assistant"
    assert text == '{"name": "add", "arguments": "{\\"a\\": "}'


def test_paragraphs_are_what_the_engine_takes() -> None:
    messages = [HumanMessage("q"), AIMessage("first", name="Alice")]
    assert to_conversation(messages, TEAM).history == (Paragraph("Alice", 1, "first"),)
