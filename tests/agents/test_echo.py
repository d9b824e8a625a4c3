"""An answer that begins with a speaker's name, as earlier answers in its prompt do."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage

from hogwild_agents import ChatHogwild, Grammar
from hogwild_agents.langchain.echo import Echo
from hogwild_agents.langchain.replies import Reply
from hogwild_engine.api.events import AnswerToken, CallToken, Finished, ToolCall, Usage
from hogwild_engine.api.request import Request, make_workers

TALK: list[BaseMessage] = [
    HumanMessage("Name a fruit."),
    AIMessage("Apple.", name="critic"),
    HumanMessage("Name another fruit."),
    AIMessage("Pear.", name="critic"),
    HumanMessage("Name another fruit."),
]


def echo(*names: str, **more: Any) -> Echo:
    spoken = [{"role": "assistant", "content": "x", "name": name} for name in names]
    messages = (*spoken, {"role": "user", "content": "q"})
    return Echo.of(Request(messages, make_workers(1), **more))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("critic: No.", "No."),
        ("\n critic:\nNo.", "No."),
        ("critics: No.", "critics: No."),
        ("No. critic: yes", "No. critic: yes"),
        ("critic: critic: No.", "critic: No."),
        ("critic:", "critic:"),
        ("crit", "crit"),
        ("", ""),
        ('"a: b": No.', "No."),
    ],
)
def test_a_label_is_dropped_whole_and_in_pieces(text: str, left: str) -> None:
    names = ("critic", "a: b")
    assert echo(*names).without_label(text) == left
    for size in (1, 3):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        dropping = echo(*names)
        assert "".join(map(dropping.feed, pieces)) + dropping.flush() == left


def test_only_labels_that_the_prompt_shows_are_dropped() -> None:
    assert echo().without_label("critic: No.") == "critic: No."
    constrained = echo("critic", grammar=Grammar.regex("critic: No."))
    assert constrained.without_label("critic: No.") == "critic: No."
    last = {"role": "assistant", "content": "x", "name": "critic"}
    continued = Echo.of(Request(({"role": "user", "content": "q"}, last), make_workers(1)))
    assert continued.feed("critic: No.") == "critic: No."


def test_text_that_waited_comes_before_the_call_and_the_end() -> None:
    for is_team in (False, True):
        reply = Reply("id", "model", is_team, "write", echo("critic"))
        call = ToolCall("add", "{}")
        events = (
            AnswerToken("cri"),
            CallToken(0, "add", "{}"),
            Finished("cri", "tool_calls", (), Usage(), 0, calls=(call,)),
        )
        first, *others = [chunk for event in events if (chunk := reply.chunk(event))]
        merged = first + others
        assert isinstance(merged, AIMessageChunk)
        assert merged.text == "cri"
        assert merged.tool_calls[0]["name"] == "add"


async def test_the_models_own_label_shows_in_no_answer(
    lone_llm: ChatHogwild, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        lone_llm.invoke(TALK).text,
        "".join(chunk.text for chunk in lone_llm.stream(TALK)),
        (await lone_llm.ainvoke(TALK)).text,
        lone_llm.batch([TALK])[0].text,
    ]
    monkeypatch.setattr(Echo, "without_label", lambda _, text: text)
    said = lone_llm.invoke(TALK).text
    assert said.startswith("critic: ")
    assert {f"critic: {answer}" for answer in answers} == {said}


def test_a_worker_of_that_name_sees_its_own_answers_bare(lone_llm: ChatHogwild) -> None:
    own = lone_llm.make_call(TALK, workers=["critic"]).request
    assert not any("name" in message for message in own.messages)
