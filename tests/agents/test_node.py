"""`HogwildNode` in compiled graphs: state, streams, ids, shutting down and cancelling."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, cast

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import GraphDrained, NodeTimeoutError
from langgraph.graph import START, MessagesState, StateGraph, add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import RunControl

from hogwild_agents import ChatHogwild, HogwildNode
from hogwild_agents.langchain import errors
from hogwild_engine.api.request import Request

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

TASK = "Name three uses of a brick."
THREAD: Any = {"configurable": {"thread_id": "1"}}


def graph_of(
    node: HogwildNode, saver: BaseCheckpointSaver | None = None, **options: Any
) -> CompiledStateGraph:
    """An ordinary node, then the team."""

    def greet(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("Let us see.", name="greeter")]}

    graph = StateGraph(MessagesState)
    graph.add_node("greet", greet)
    graph.add_node("think", node, **options)
    graph.add_edge(START, "greet")
    graph.add_edge("greet", "think")
    return graph.compile(checkpointer=saver)


def ask(text: str = TASK) -> Any:
    return {"messages": [HumanMessage(text)]}


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest) -> Iterator[BaseCheckpointSaver]:
    if request.param == "memory":
        yield InMemorySaver()
        return
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    yield SqliteSaver(connection)
    connection.close()


@pytest.fixture
def requests(team_llm: ChatHogwild, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine is asked, as it is asked."""
    asked: list[Request] = []
    submit = team_llm.engine.submit

    def record(request: Request) -> Any:
        asked.append(request)
        return submit(request)

    monkeypatch.setattr(team_llm.engine, "submit", record)
    return asked


@pytest.fixture
def endless(team_llm: ChatHogwild) -> ChatHogwild:
    return team_llm.model_copy(update={"max_steps": 400, "max_tokens": 400})


def test_a_second_turn_on_a_thread_sees_the_first(
    team_llm: ChatHogwild, saver: BaseCheckpointSaver, requests: list[Request]
) -> None:
    graph = graph_of(HogwildNode(team_llm, output_mode="full_history"), saver)
    first = graph.invoke(ask(), THREAD)["messages"]
    second = graph.invoke(ask("And three more?"), THREAD)["messages"]
    assert second[: len(first)] == first
    assert [(turn["role"], turn["content"]) for turn in requests[1].messages] == [
        ("user", TASK),
        ("assistant", "Let us see."),
        ("assistant", first[-1].text),
        ("user", "And three more?"),
        ("user", "Let us see."),
    ]
    assert requests[1].history == ()


def test_full_history_names_workers_and_ends_with_the_answer(team_llm: ChatHogwild) -> None:
    update = HogwildNode(team_llm, output_mode="full_history").invoke(ask())
    *paragraphs, answer = cast(list[AIMessage], update["messages"])
    history = answer.response_metadata["paragraphs"]
    assert [(m.name, m.text) for m in paragraphs] == [(p["worker"], p["text"]) for p in history]
    assert not any(m.tool_calls for m in paragraphs)
    assert answer.name is None
    assert answer.text
    assert len({m.id for m in update["messages"]}) == len(update["messages"])
    assert [b.get("id") for b in answer.content_blocks[:-1]] == [m.id for m in paragraphs]


def test_the_last_message_alone_is_the_default(team_llm: ChatHogwild) -> None:
    (answer,) = HogwildNode(team_llm).invoke(ask())["messages"]
    assert answer.usage_metadata["output_tokens"] > 0


def test_a_node_that_runs_again_goes_on_with_its_history(
    team_llm: ChatHogwild, requests: list[Request]
) -> None:
    node = HogwildNode(team_llm, output_mode="full_history")
    *paragraphs, _ = node.invoke(ask())["messages"]
    node.invoke({"messages": [HumanMessage(TASK), *paragraphs]})
    assert [(p.worker, p.text) for p in requests[1].history] == [
        (m.name, m.text) for m in paragraphs
    ]


async def test_workers_can_be_told_apart_while_they_write(team_llm: ChatHogwild) -> None:
    graph = graph_of(HogwildNode(team_llm, output_mode="full_history"))
    order: list[str] = []
    texts: dict[str | None, str] = {}
    returned: list[AIMessage] = []
    async for mode, data in graph.astream(ask(), stream_mode=["messages", "updates"]):
        order.append(mode)
        if mode == "updates":
            returned = cast(dict[str, Any], data).get("think", {}).get("messages", [])
            continue
        message, about = cast(tuple[AIMessageChunk, dict[str, Any]], data)
        texts.setdefault(message.id, "")
        texts[message.id] += message.text
        if worker := about.get("hogwild_worker"):
            assert about["tags"] == [f"worker:{worker.lower()}"]
            assert about["lc_agent_name"] == message.name == worker
        assert about["langgraph_node"] in ("greet", "think")
    # Nothing comes twice: what was streamed is, id by id, what the node returned.
    assert {m.id: m.text for m in returned}.items() <= texts.items()
    assert len(texts) == len(returned) + 1
    assert order.index("updates") < order.index("messages", 2) < len(order) - 1
    assert order[-1] == "updates"


def test_sync_graphs_stream_too(team_llm: ChatHogwild) -> None:
    graph = graph_of(HogwildNode(team_llm))
    seen = [about for _, about in graph.stream(ask(), stream_mode="messages")]
    workers = {cast(dict[str, Any], about).get("hogwild_worker") for about in seen}
    assert workers == {"Alice", "Bob", None}


async def test_custom_streams_carry_the_engines_events(team_llm: ChatHogwild) -> None:
    graph = graph_of(HogwildNode(team_llm))
    events = [event async for event in graph.astream(ask(), stream_mode="custom")]
    kinds = [cast(dict[str, Any], event)["type"] for event in events]
    assert {"step", "token", "paragraph", "worker_finished", "answer_token"} <= set(kinds)
    assert kinds[-1] == "answer"
    assert json.loads(json.dumps(events))[-1]["usage"]["steps"] == 6


async def test_cancelling_a_graph_frees_the_session(
    endless: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    failed: list[BaseException] = []

    class Watch(BaseCallbackHandler):
        def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
            failed.append(error)

    graph = graph_of(HogwildNode(endless))
    outer = StateGraph(MessagesState)
    outer.add_node("team", graph)
    outer.add_edge(START, "team")
    writing = asyncio.Event()

    async def read() -> None:
        config: Any = {"callbacks": [Watch()]}
        stream = outer.compile().astream(ask(), config, stream_mode="messages", subgraphs=True)
        seen = set()
        async for _, (message, _) in cast(Any, stream):
            seen.add(message.name)
            if {"Alice", "Bob"} <= seen:
                writing.set()

    reading = asyncio.create_task(read())
    await asyncio.wait_for(writing.wait(), 60)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await asyncio.to_thread(all_pages_free, endless.engine)
    assert {type(error) for error in failed} == {asyncio.CancelledError}
    assert len(failed) == 2


async def test_a_node_timeout_frees_the_session(
    endless: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    graph = graph_of(HogwildNode(endless), timeout=0.5)
    with pytest.raises(NodeTimeoutError):
        await graph.ainvoke(ask())
    assert await asyncio.to_thread(all_pages_free, endless.engine)


def test_a_drained_graph_stops_at_once_and_runs_the_node_when_resumed(
    team_llm: ChatHogwild, all_pages_free: Callable[[Engine], bool]
) -> None:
    control = RunControl()

    class Drain(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            control.request_drain("deploying")

    streaming = team_llm.model_copy()
    streaming.streaming = True
    graph = graph_of(HogwildNode(streaming), InMemorySaver())
    with pytest.raises(GraphDrained, match="deploying"):
        graph.invoke(ask(), cast(Any, THREAD | {"callbacks": [Drain()]}), control=control)
    assert all_pages_free(team_llm.engine)
    assert graph.get_state(THREAD).next == ("think",)
    assert graph.invoke(None, THREAD)["messages"][-1].text


def test_every_paragraph_is_a_run_of_the_model_for_tracers(team_llm: ChatHogwild) -> None:
    started: list[dict[str, Any]] = []
    ended: list[str] = []

    class Trace(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            started.append(kwargs)

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            ended.append(response.generations[0][0].message.id)

    node = HogwildNode(team_llm, output_mode="full_history")
    update = node.invoke(ask(), {"callbacks": [Trace()], "tags": ["mine"]})
    assert sorted(ended) == sorted(m.id for m in update["messages"])
    assert [run["name"] for run in started] == [None, "Alice", "Bob"]
    assert all("mine" in run["tags"] for run in started)
    assert {run["metadata"]["ls_provider"] for run in started} == {"hogwild"}


@dataclass
class Notes:
    notes: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)


def test_other_states_and_keys_serve(team_llm: ChatHogwild) -> None:
    node = HogwildNode(team_llm, messages_key="notes", name="team")
    graph = StateGraph(Notes)
    graph.add_node(node)
    graph.add_edge(START, "team")
    assert graph.compile().invoke(Notes([HumanMessage(TASK)]))["notes"][-1].text


def test_what_a_node_cannot_use_is_refused(team_llm: ChatHogwild) -> None:
    with pytest.raises(errors.ConfigError, match="output_mode: wanted 'last_message'"):
        HogwildNode(team_llm, output_mode=cast(Any, "first"))
    with pytest.raises(errors.ConfigError, match="llm: wanted a ChatHogwild"):
        HogwildNode(cast(Any, "smollm2"))
    with pytest.raises(errors.ConfigError, match="messages_key: wanted a state with messages"):
        HogwildNode(team_llm).invoke({"letters": []})
    with pytest.raises(errors.RequestError, match="at least one message"):
        HogwildNode(team_llm).invoke({"messages": []})
