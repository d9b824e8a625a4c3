"""Structured output of every schema, by every method, in every way to call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from pydantic import BaseModel, Field, RootModel

from hogwild_agents import AnswerMismatchError, ChatHogwild, HogwildNode
from hogwild_agents.langchain.bindings import to_schema, to_tools

METHODS = ["json_schema", "function_calling"]
WORDS: Any = {"type": "string", "maxLength": 6}


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


class Owner(BaseModel):
    """Who owns a pet."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Flags(RootModel[list[Literal["a", "b"]]]):
    """Some flags."""

    root: list[Literal["a", "b"]] = Field(max_length=3)


class Tree(BaseModel):
    """A tree."""

    full: bool
    left: Tree | None = None


TWICE = {
    "title": "twice",
    "type": "object",
    "properties": {
        "x": {"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True}
        | {"maxItems": 2}
    },
    "required": ["x"],
}
CUT = {"title": "city", "const": {"country": "France"}}

SCHEMAS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "union": (Owner, lambda made: isinstance(made, Owner)),
    "root model": (Flags, lambda made: isinstance(made, Flags)),
    "recursive class": (Tree, lambda made: isinstance(made, Tree)),
    "array": (
        {"title": "bits", "type": "array", "items": {"enum": [0, 1]}, "maxItems": 3},
        lambda made: isinstance(made, list) and set(made) <= {0, 1},
    ),
    "literals": (
        {"title": "Color", "enum": ["red", "blue"]},
        lambda made: made in ("red", "blue"),
    ),
    "scalar": ({"title": "n", "type": "boolean"}, lambda made: isinstance(made, bool)),
    "no title": (
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        lambda made: made.keys() == {"a"},
    ),
    "recursion by reference": (
        to_schema(Tree),
        lambda made: isinstance(made["full"], bool),
    ),
}


def settings(**more: Any) -> Any:
    return {"max_tokens": 160, "temperature": 1.0, **more}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_object_of_every_schema_comes_by_every_method(
    tiny_llm: ChatHogwild, name: str, method: Any, workers: int
) -> None:
    schema, fits = SCHEMAS[name]
    more: Any = {"workers": workers, "max_steps": 4} if workers > 1 else {}
    llm = tiny_llm.with_structured_output(schema, method=method, **more)
    for seed in range(2):
        assert fits(llm.invoke("Hello", **settings(seed=seed)))
    assert fits(list(llm.stream("Hello", **settings(seed=3)))[-1])


async def test_structured_output_works_in_async_calls(tiny_llm: ChatHogwild) -> None:
    for name in ("union", "array"):
        schema, fits = SCHEMAS[name]
        llm = tiny_llm.with_structured_output(schema)
        assert fits(await llm.ainvoke("Hello", **settings()))
        assert all(map(fits, await llm.abatch(["Hello", "Bye"], **settings())))


@pytest.mark.filterwarnings("ignore:schema")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("schema", "stop", "problem"),
    [(TWICE, None, "non-unique"), (CUT, ["ance"], "stop string")],
    ids=["breaks its schema", "cut by a stop string"],
)
def test_an_answer_that_does_not_fit_is_an_error(
    tiny_llm: ChatHogwild, schema: Any, stop: Any, problem: str, method: Any
) -> None:
    llm = tiny_llm.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match=problem):
        llm.invoke("Hello", **settings(stop=stop))
    with pytest.raises(OutputParserException, match=problem):
        list(llm.stream("Hello", **settings(stop=stop)))
    raw = tiny_llm.with_structured_output(schema, method=method, include_raw=True)
    result = cast(Any, raw.invoke("Hello", **settings(stop=stop)))
    assert isinstance(result["raw"], AIMessage)
    assert result["parsed"] is None
    assert problem in str(result["parsing_error"])


def test_what_is_left_out_is_warned_of_once_a_call(tiny_llm: ChatHogwild) -> None:
    tools = [{**TWICE, "description": "d"}, {**TWICE, "title": "again", "description": "d"}]
    with pytest.warns(UserWarning, match=r"uniqueItems.*'twice'.*uniqueItems.*'again'") as warned:
        tiny_llm.bind_tools(tools).invoke("Hello", max_tokens=2)
    assert len(warned) == 1


@pytest.mark.filterwarnings("ignore:schema")
def test_calls_that_do_not_fit_are_invalid_and_others_are_not(tiny_llm: ChatHogwild) -> None:
    tool = {**TWICE, "description": "d"}
    bound = tiny_llm.bind_tools([tool], tool_choice="any")
    reply = bound.invoke("Hello", **settings())
    assert not reply.tool_calls
    assert "non-unique" in str(reply.invalid_tool_calls[0]["error"])
    chunks = list(bound.stream("Hello", **settings()))
    merged = sum(chunks[1:], cast(AIMessageChunk, chunks[0]))
    assert not merged.tool_calls
    assert merged.invalid_tool_calls
    assert "non-unique" in merged.response_metadata["error"]


@pytest.mark.filterwarnings("ignore:schema")
def test_agents_get_an_object_or_an_error(tiny_llm: ChatHogwild) -> None:
    llm = tiny_llm.model_copy(update={"max_tokens": 160})
    for strategy in (ToolStrategy(Owner), ProviderStrategy(Owner), ProviderStrategy(Tree)):
        agent = create_agent(llm, [], response_format=strategy)
        asked: Any = {"messages": [HumanMessage("Hello")]}
        assert isinstance(agent.invoke(asked)["structured_response"], BaseModel)
    agent = create_agent(llm, [], response_format=ProviderStrategy(TWICE))
    with pytest.raises(AnswerMismatchError, match="non-unique") as caught:
        agent.invoke(asked)
    assert json.loads(caught.value.llm_output or "") == {"x": [1, 1]}


@pytest.mark.filterwarnings("ignore:schema")
def test_a_node_gives_an_object_or_an_error(tiny_llm: ChatHogwild) -> None:
    node, state = HogwildNode(tiny_llm), {"messages": [HumanMessage("Hello")]}
    good = {"type": "json_schema", "json_schema": {"name": "c", "schema": CUT}}
    reply = node.invoke(state, response_format=good, **settings())["messages"][-1]
    assert json.loads(reply.text) == CUT["const"]
    bad = {"type": "json_schema", "json_schema": {"name": "t", "schema": TWICE}}
    with pytest.raises(AnswerMismatchError):
        node.invoke(state, response_format=bad, **settings())


def test_recursive_tools_keep_their_schema() -> None:
    def plant(tree: Tree) -> None:
        """Plant a tree."""

    class Plant(BaseModel):
        """Plant a tree."""

        tree: Tree

    for tool in (plant, Plant):
        [made] = to_tools([tool])
        assert "$ref" in json.dumps(made["function"]["parameters"]["$defs"]["Tree"])
