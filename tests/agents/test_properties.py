"""Whatever tools and histories come: calls fit their schemas or say that they were cut, and every
error has a type.
"""

from __future__ import annotations

import json
import string
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from hogwild_agents import ChatHogwild, ContentError, HogwildError, PromptTooLongError
from hogwild_agents.langchain.messages import to_conversation

QUICK = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(string.printable + "é漢🦜", max_size=5)
NAMES = st.text(string.ascii_letters + "_é", min_size=1, max_size=8)
LEAVES = st.one_of(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "string", "maxLength": 5},
            {"type": "string", "minLength": 2},
            {"type": "integer"},
            {"type": "integer", "minimum": 3},
            {"type": "integer", "exclusiveMaximum": -7},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"const": "x"},
        ]
    ),
    st.lists(st.one_of(TEXTS, st.integers(-9, 9), st.none()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def objects(schemas: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(NAMES, schemas, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or ["x"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
            }
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda items: {"type": "array", "items": items}),
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=4,
)
TOOLS = st.dictionaries(NAMES, objects(SCHEMAS), min_size=1, max_size=2)


@QUICK
@given(tools=TOOLS, budget=st.integers(10, 90), seed=st.integers(0, 99))
def test_calls_fit_their_schemas_or_say_that_they_were_cut(
    tiny_llm: ChatHogwild, tools: dict[str, Any], budget: int, seed: int
) -> None:
    bound = tiny_llm.bind_tools(
        [
            {
                "type": "function",
                "function": {"name": name, "description": "", "parameters": schema},
            }
            for name, schema in tools.items()
        ],
        tool_choice="any",
        parallel_tool_calls=True,
    )
    try:
        reply = bound.invoke("Hello", max_tokens=budget, seed=seed)
    except PromptTooLongError:
        reject()
    for call in reply.tool_calls:
        jsonschema.validate(call["args"], tools[call["name"]])
        assert call["args"].keys() <= tools[call["name"]]["properties"].keys()
    if reply.invalid_tool_calls:
        assert reply.response_metadata["finish_reason"] == "length"
    else:
        assert reply.tool_calls
    assert not reply.text


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)
KINDS = ["text", "reasoning", "thinking", "image", "image_url", "tool_use", "tool_call", "odd"]
BLOCKS = st.one_of(
    st.text(max_size=8),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(st.sampled_from(KINDS), st.text(max_size=3)),
            "text": st.one_of(st.text(max_size=8), VALUES),
            "reasoning": VALUES,
            "extras": st.one_of(VALUES, st.just({"worker": "Alice"})),
            "id": VALUES,
            "name": st.just("f"),
        },
    ),
)
CONTENT = st.one_of(st.text(max_size=20), st.lists(BLOCKS, max_size=3))
WHO = st.one_of(st.none(), st.sampled_from(["Alice", "Bob", "Zoë"]))
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.text(max_size=5),
            "args": st.dictionaries(st.text(max_size=5), VALUES, max_size=2),
            "id": st.one_of(st.none(), st.text(max_size=5)),
        }
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(HumanMessage, CONTENT, name=WHO),
        st.builds(SystemMessage, CONTENT),
        st.builds(AIMessage, CONTENT, name=WHO, tool_calls=CALLS),
        st.builds(ToolMessage, CONTENT, tool_call_id=st.text(max_size=5)),
        st.builds(FunctionMessage, st.text(max_size=5), name=st.just("f")),
        st.builds(ChatMessage, CONTENT, role=st.sampled_from(["user", "critic", "assistant"])),
    ),
    max_size=5,
)


@settings(QUICK, max_examples=150)
@given(messages=MESSAGES, team=st.booleans())
def test_a_history_is_turns_or_an_error_of_ours(messages: list[BaseMessage], team: bool) -> None:
    with suppress(HogwildError):
        conversation = to_conversation(messages, ["Alice", "Bob"] if team else ())
        assert all(isinstance(turn["content"], str) for turn in conversation.messages)
        json.dumps(conversation.messages)


@settings(QUICK, max_examples=20)
@given(messages=MESSAGES, workers=st.integers(1, 2))
def test_a_history_is_answered_or_refused_with_an_error_of_ours(
    tiny_llm: ChatHogwild, messages: list[BaseMessage], workers: int
) -> None:
    with suppress(HogwildError):
        reply = tiny_llm.invoke(messages, workers=workers, max_tokens=2, max_steps=2)
        assert reply.usage_metadata


async def first(answer: Any) -> None:
    """The first thing that a method of a model gives, whichever method it was."""
    match answer:
        case Awaitable():
            await answer
        case AsyncIterator():
            await anext(answer)
        case Iterator():
            next(answer)


@pytest.mark.parametrize("method", ["invoke", "stream", "ainvoke", "astream"])
async def test_a_broken_image_is_refused_before_core_trips_over_it(
    tiny_llm: ChatHogwild, method: str
) -> None:
    broken = [HumanMessage([{"type": "image", "text": ""}])]
    with pytest.raises(ContentError, match="image"):
        await first(getattr(tiny_llm, method)(broken))


@pytest.mark.parametrize("tool", ["a text", 3, {"name": 3}, {"type": "web_search"}])
def test_what_is_no_tool_is_refused_by_type(tiny_llm: ChatHogwild, tool: Any) -> None:
    with pytest.raises(HogwildError, match="tools: wanted"):
        tiny_llm.bind_tools([tool])
