"""Counting tokens, trimming by the count, and the context that a profile states."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)

from hogwild_agents import ChatHogwild
from hogwild_agents.langchain.errors import RequestError
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.loading.stated_context import stated_context

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
)
CALL = {"name": "look", "args": {"place": "Rome"}, "id": "1"}
TALK: list[BaseMessage] = [
    SystemMessage("Be brief."),
    HumanMessage("I am from Seattle.\nAnd you?\nWhere are you from?", name="Barnaby"),
    AIMessage("", tool_calls=[CALL]),
    ToolMessage("Sunny.", tool_call_id="1"),
    AIMessage("It is sunny.\nIn Rome.\nToday."),
    HumanMessage("And tomorrow?\nAnd then?"),
    AIMessage([{"type": "text", "text": "Rain.\nMuch rain."}], name="critic"),
]


def test_no_messages_have_no_tokens(lone_llm: ChatHogwild, team_llm: ChatHogwild) -> None:
    assert lone_llm.get_num_tokens_from_messages([]) == 0
    assert team_llm.get_num_tokens_from_messages([]) == 0


def test_half_a_surrogate_pair_is_a_typed_error(lone_llm: ChatHogwild) -> None:
    for count in (
        lambda: lone_llm.get_token_ids("a\ud800"),
        lambda: lone_llm.get_num_tokens("a\ud800"),
        lambda: lone_llm.get_num_tokens_from_messages([HumanMessage("a\ud800")]),
        lambda: lone_llm.get_num_tokens_from_messages([AIMessage("a\ud800")]),
        lambda: lone_llm.invoke("a\ud800"),
    ):
        with pytest.raises(RequestError, match="UTF-8"):
            count()


@pytest.mark.parametrize("strategy", ["first", "last"])
@pytest.mark.parametrize("allow_partial", [False, True])
@pytest.mark.parametrize("template", ["its own", "strict"])
def test_messages_are_trimmed_to_any_count(
    lone_llm: ChatHogwild,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Literal["first", "last"],
    template: str,
    allow_partial: bool,
) -> None:
    if template == "strict":
        strict = copy.deepcopy(lone_llm.engine.tokenizer)
        strict.chat_template = STRICT
        chat = type(lone_llm.engine.chat)(strict, "strict", [2])
        monkeypatch.setattr(lone_llm.engine, "chat", chat)
    whole = lone_llm.get_num_tokens_from_messages(TALK)
    options: list[dict[str, Any]] = [{}]
    if strategy == "last":
        options += [{"include_system": True, "start_on": "human"}, {"end_on": ("human", "tool")}]
    for option in options:
        for limit in (0, 9, 30, whole // 2, whole):
            kept = trim_messages(
                TALK,
                max_tokens=limit,
                token_counter=lone_llm,
                strategy=strategy,
                allow_partial=allow_partial,
                **option,
            )
            # Core counts "last" in reverse, and keeps the system message in any case.
            slack = 24 if strategy == "last" else 0
            if not option.get("include_system"):
                assert lone_llm.get_num_tokens_from_messages(kept) <= limit + slack
    if not allow_partial and strategy == "first":
        assert trim_messages(
            TALK, max_tokens=whole, token_counter=lone_llm, strategy=strategy
        ) == list(TALK)


def test_a_part_of_the_newest_message_is_kept(lone_llm: ChatHogwild) -> None:
    newest = HumanMessage("\n".join(f"line {number}" for number in range(20)))
    (kept,) = trim_messages(
        [newest], max_tokens=60, token_counter=lone_llm, strategy="last", allow_partial=True
    )
    assert str(newest.content).endswith(str(kept.content))
    assert 0 < len(kept.content) < len(newest.content)


def test_names_and_tools_count(lone_llm: ChatHogwild) -> None:
    def look(place: str) -> str:
        """Look at a place."""
        return place

    count = lone_llm.get_num_tokens_from_messages
    plain = count([HumanMessage("hi")])
    assert plain < count([HumanMessage("hi", name="Barnaby")]) < count([HumanMessage("hi")], [look])


def test_the_profile_states_the_context(lone_llm: ChatHogwild, embedded: dict[str, Any]) -> None:
    assert profile(num_pages=100_000)["max_input_tokens"] == lone_llm.engine.context_len
    assert profile(**{**embedded, "num_pages": 6})["max_input_tokens"] == 6 * 32
    loaded = profile(**embedded)
    assert loaded["max_input_tokens"] == lone_llm.engine.max_tokens
    known = {"tool_calling", "tool_choice", "structured_output", "text_inputs", "temperature"}
    assert {name for name in known if loaded[name]} == known
    assert profile(profile={"max_input_tokens": 77}, **embedded) == {"max_input_tokens": 77}


def profile(**settings: Any) -> dict[str, Any]:
    return cast(dict[str, Any], ChatHogwild(**settings).profile)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 512},
            },
            512,
        ),
        ({}, None),
        ([], None),
    ],
)
def test_the_configuration_alone_states_the_context(
    tmp_path: Path, config: Any, length: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stated_context(EngineConfig(model=str(tmp_path))) == length
    assert ("max_input_tokens" in (ChatHogwild(model=str(tmp_path)).profile or {})) == bool(length)


def test_files_that_say_nothing_state_nothing(tmp_path: Path) -> None:
    assert stated_context(EngineConfig(model="some-owner/not-downloaded")) is None
    for name, content in (("a.gguf", b"GGUF"), ("b.gguf", b"no model"), ("c.gguf", b"GGUF" * 9)):
        (tmp_path / name).write_bytes(content)
        assert stated_context(EngineConfig(model=str(tmp_path / name))) is None


def test_an_agent_summarizes_at_a_fraction_of_the_context(lone_llm: ChatHogwild) -> None:
    llm = lone_llm.model_copy(update={"profile": {"max_input_tokens": 400}})
    middleware = SummarizationMiddleware(
        llm, trigger=("fraction", 0.5), keep=("fraction", 0.2), token_counter=llm_count(llm)
    )
    assert SummarizationMiddleware(ChatHogwild(), trigger=("fraction", 0.8))
    long: list[Any] = []
    for _ in range(3):
        long += [HumanMessage("word " * 60), AIMessage("yes " * 60)]
    agent = create_agent(llm, [], middleware=[middleware])
    messages = agent.invoke({"messages": [*long, HumanMessage("Say hello.")]})["messages"]
    assert "summary" in messages[0].text
    assert len(messages) < len(long)


def llm_count(llm: ChatHogwild) -> Any:
    return lambda messages: llm.get_num_tokens_from_messages(list(messages))
