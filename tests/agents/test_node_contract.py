"""What holds for the chat model holds in `HogwildNode`: streaming, cache, rate limiter, formats."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models._compat_bridge import chunks_to_events
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import BaseModel

from hogwild_agents import ChatHogwild, Grammar, HogwildNode, Worker
from hogwild_agents.langgraph.runs import End, Grow, _Form, _protocol_events
from hogwild_engine.api.protocol import INSTRUCT

TASK = "Name three uses of a brick."


def graph_of(node: HogwildNode) -> CompiledStateGraph:
    graph = StateGraph(MessagesState)
    graph.add_node("think", node)
    graph.add_edge(START, "think")
    return graph.compile()


def ask() -> Any:
    return {"messages": [HumanMessage(TASK)]}


@pytest.fixture
def llm(team_llm: ChatHogwild) -> ChatHogwild:
    return team_llm.model_copy()


class Limiter(BaseRateLimiter):
    def __init__(self) -> None:
        self.calls = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.calls += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        self.calls += 1
        return True


class Trace(BaseCallbackHandler):
    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.started.append({"serialized": args[0], **kwargs})


def streamed(graph: CompiledStateGraph) -> dict[str, list[AnyMessage]]:
    pieces: dict[str, list[AnyMessage]] = {}
    for message, _ in cast(Any, graph.stream(ask(), stream_mode="messages")):
        pieces.setdefault(str(message.id), []).append(message)
    return pieces


def test_what_is_streamed_adds_up_to_what_is_returned(llm: ChatHogwild) -> None:
    graph = graph_of(HogwildNode(llm, output_mode="full_history"))
    pieces = streamed(graph)
    assert any(len(part) > 2 for part in pieces.values())
    *paragraphs, answer = HogwildNode(llm, output_mode="full_history").invoke(ask())["messages"]
    *shown, last = pieces.values()
    assert [part[0].name for part in shown] == [message.name for message in paragraphs]
    first, *others = [piece for piece in last if isinstance(piece, AIMessageChunk)]
    merged = first + others
    assert merged.text == answer.text
    kinds = [block["type"] for block in merged.content_blocks]
    assert kinds == [block["type"] for block in answer.content_blocks]


async def test_disabled_streaming_shows_whole_messages(llm: ChatHogwild) -> None:
    llm.disable_streaming = True
    graph = graph_of(HogwildNode(llm, output_mode="full_history"))
    assert {len(part) for part in streamed(graph).values()} == {1}
    stream: Any = graph.astream(ask(), stream_mode="messages")
    seen = [message.id async for message, _ in stream]
    assert len(seen) == len({*seen})


async def test_the_rate_limiter_is_asked_once_a_call(llm: ChatHogwild) -> None:
    llm.rate_limiter = limiter = Limiter()
    node = HogwildNode(llm)
    node.invoke(ask())
    await node.ainvoke(ask())
    node.batch([ask(), ask()])
    assert limiter.calls == 4


async def test_a_cached_answer_brings_its_paragraphs(
    llm: ChatHogwild, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (False, True):
        llm.cache = InMemoryCache()
        graph = graph_of(HogwildNode(llm, output_mode="full_history"))
        if stream:
            streamed(graph)
        first = graph.invoke(ask())["messages"]
        with monkeypatch.context() as without_engine:
            without_engine.setattr(llm.engine, "submit", None)
            again = [graph.invoke(ask()), await graph.ainvoke(ask())]
            other = HogwildNode(llm, output_mode="last").invoke(ask())["messages"]
        for found in again:
            assert [(m.name, m.text) for m in found["messages"]] == [
                (m.name, m.text) for m in first
            ]
        assert [m.text for m in other] == [first[-1].text]
    assert len(first) > 2


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_the_output_version_is_the_models(llm: ChatHogwild, version: str) -> None:
    llm.output_version = version
    (answer,) = HogwildNode(llm).invoke(ask())["messages"]
    said = llm.invoke(TASK)
    assert answer.content_blocks[-1] == said.content_blocks[-1]
    assert type(answer.content) is type(said.content)


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
async def test_events_of_version_3_come_token_by_token(llm: ChatHogwild) -> None:
    graph = graph_of(HogwildNode(llm, output_mode="full_history"))
    chunks = sum(map(len, streamed(graph).values()))
    run = await graph.astream_events(ask(), version="v3")
    texts: dict[str, list[str]] = {}
    async for message in run.messages:
        texts[str(message.message_id)] = [piece async for piece in message.text]
    *paragraphs, answer = cast(Any, await run.output())["messages"][1:]
    assert {m.id: m.text for m in paragraphs}.items() <= {
        run: "".join(pieces) for run, pieces in texts.items()
    }.items()
    deltas = sum(map(len, texts.values()))
    assert deltas >= 0.6 * chunks
    assert paragraphs
    assert answer.text == HogwildNode(llm).invoke(ask())["messages"][0].text


def test_a_paragraphs_protocol_events_are_those_of_the_library() -> None:
    acts = [Grow("run", "Alice", "one"), Grow("run", "Alice", " two")]
    end = End("run", AIMessage("one two", id="run", name="Alice"))
    form = _Form(events=True, tokens=False)
    events = [event for act in (*acts, end) for event in _protocol_events(act, form)]
    chunks = [
        ChatGenerationChunk(message=AIMessageChunk(content=act.text, id="run")) for act in acts
    ]
    assert events == list(chunks_to_events(iter(chunks), message_id="run"))


def test_tags_metadata_and_callbacks_of_model_and_node_reach_every_run(llm: ChatHogwild) -> None:
    own, nodes = Trace(), Trace()
    llm.callbacks, llm.tags, llm.metadata = [own], ["own"], {"team": 1}
    config: RunnableConfig = {
        "callbacks": [nodes],
        "tags": ["mine"],
        "metadata": {"user": 2},
        "run_name": "node",
    }
    HogwildNode(llm).invoke(ask(), config)
    assert [run["name"] for run in nodes.started] == [run["name"] for run in own.started]
    assert [run["name"] for run in own.started] == [None, "Alice", "Bob"]
    for run in nodes.started:
        assert {"mine", "own"} <= set(run["tags"])
        assert {"user": 2, "team": 1}.items() <= run["metadata"].items()


class City(BaseModel):
    """A city."""

    name: str


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


async def test_tracers_get_plain_data(llm: ChatHogwild) -> None:
    """Settings of the model and of one call, in the model, the node and bound models."""
    trace = Trace()
    config: RunnableConfig = {"callbacks": [trace]}
    rich = llm.model_copy(update={"workers": [Worker("Ann", "plans"), "Ben"]})
    settings: dict[str, Any] = {
        "workers": (Worker("Cid"), Worker("Dan")),
        "protocol": INSTRUCT,
        "worker_grammar": Grammar.regex("[a-z]{3}"),
        "stop": ("zzz",),
    }
    rich.invoke(TASK, config, **settings, tools=[look, City], tool_choice=None)
    list(rich.stream(TASK, config, **settings, grammar=Grammar.choice("a", "b")))
    await rich.ainvoke(TASK, config, **settings, response_format=City, max_tokens=40)
    rich.bind_tools([look]).batch([TASK], config)
    rich.with_structured_output(City, include_raw=True).invoke(TASK, config)
    HogwildNode(rich).invoke(ask(), config, **settings)
    assert len(trace.started) >= 7
    for run in trace.started:
        for part in ("serialized", "invocation_params", "options", "metadata"):
            assert json.loads(json.dumps(run[part])) == _lists(run[part])
    params = trace.started[0]["invocation_params"]
    assert params["workers"] == [{"name": "Cid", "role": None}, {"name": "Dan", "role": None}]
    assert [made["function"]["name"] for made in params["tools"]] == ["look", "City"]
    assert params["worker_grammar"] == {"kind": "regex", "text": "[a-z]{3}"}
    assert params["stop"] == ["zzz"]


def _lists(value: Any) -> Any:
    """Return plain data with lists for tuples, as JSON has them."""
    return json.loads(json.dumps(value, default=lambda found: pytest.fail(repr(found))))


def test_a_wrong_setting_is_still_the_models_own_error(llm: ChatHogwild) -> None:
    with pytest.raises(ValueError, match="workers: wanted"):
        llm.invoke(TASK, workers=0)
    with pytest.raises(ValueError, match="tools: wanted"):
        HogwildNode(llm).invoke(ask(), tools=[5])
