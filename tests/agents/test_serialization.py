"""LangChain's ``dumps`` and ``loads``: a model, and what is bound to it, as text and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.load import dumps, loads

from hogwild_agents import ChatHogwild, ConfigError, Grammar, Protocol, Worker
from hogwild_engine.api.protocol import CODE, PAPER

pytestmark = pytest.mark.filterwarnings("ignore:The function `load.?` is in beta")

TRUSTED: dict[str, Any] = {"valid_namespaces": ["hogwild_agents"], "allowed_objects": "all"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"workers": 1, "seed": 0, "temperature": 0.0, "sync_interval": None, "stop": ["x"]},
    {"workers": ["Ann", Worker("Ben", "checks")], "protocol": PAPER, "prefix_cache": False},
    {"protocol": CODE, "worker_grammar": Grammar.regex("[a-z]+"), "layout": "interleaved"},
    {"grammar": Grammar.json({"type": "object", "properties": {"lc": {"type": "string"}}})},
    {"protocol": Protocol("mine", "Be brief, {names}.", first_prefixes=("a", "b {name}"))},
    {"timeout": 5, "max_tokens": 7, "quantization": "int8", "disable_streaming": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_model_comes_back_as_it_was(settings: dict[str, Any]) -> None:
    llm = ChatHogwild(**settings)
    text = dumps(llm)
    assert "not_implemented" not in text
    again = loads(text, **TRUSTED)
    listed = loads(text, valid_namespaces=["hogwild_agents"], allowed_objects=[ChatHogwild])
    for found in (again, listed):
        assert isinstance(found, ChatHogwild)
        assert found.asdict() == llm.asdict()
        assert found.timeout == llm.timeout
        assert found.protocol == llm.protocol
        assert found.grammar == llm.grammar
        assert found.worker_grammar == llm.worker_grammar
        assert found.disable_streaming == llm.disable_streaming
    assert dumps(again) == text


def test_bound_settings_come_back(lone_llm: ChatHogwild) -> None:
    bound: Any = lone_llm.bind(grammar=Grammar.choice("yes", "no"), workers=[Worker("A")])
    again = loads(dumps(bound), **TRUSTED)
    assert again.kwargs == bound.kwargs
    assert again.invoke("Is it?").text == bound.invoke("Is it?").text


def test_nobody_loads_a_model_unasked() -> None:
    with pytest.raises(ValueError, match="not allowed"):
        loads(dumps(ChatHogwild()), allowed_objects="core")
    with pytest.raises(ValueError, match="Invalid namespace"):
        loads(dumps(ChatHogwild()), allowed_objects="all")


@pytest.mark.parametrize(
    "broken", [{"workers": [{"title": "x"}]}, {"grammar": {"kind": "regex"}}, {"protocol": {}}]
)
def test_plain_data_of_other_fields_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(broken))}: wanted the fields"):
        ChatHogwild(**broken)


def test_the_cache_key_tells_settings_apart_and_equal_ones_alike(lone_llm: ChatHogwild) -> None:
    def key(**settings: Any) -> str:
        return lone_llm._get_llm_string(**settings)

    assert json.loads(key())
    assert key(workers=[Worker("A"), "B"]) == key(workers=({"name": "A"}, {"name": "B"}))
    keys = [
        key(),
        key(max_tokens=3),
        key(workers=3),
        key(stop=["x"]),
        key(grammar=Grammar.choice("a")),
        key(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        key(tool_choice="none"),
    ]
    assert len({*keys}) == len(keys)
