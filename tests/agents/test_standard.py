"""LangChain's standard suite on the embedded model: the plain model, and a team."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from hogwild_agents import ChatHogwild
from hogwild_engine.loading.source import locate
from standard import Lone, Team

# The engine of shared_fixtures.py: equal settings share it.
EMBEDDED = {
    "model": "smollm2-135m",
    "dtype": "float32",
    "num_pages": 192,
    "temperature": 0,
    "seed": 0,
}


class Unit(ChatModelUnitTests):
    """What the environment says, for both."""

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        settings = {"HOGWILD_MODEL": "some-owner/some-model", "HOGWILD_DEVICE": "cpu"}
        return settings, {}, {"model": "some-owner/some-model", "device": "cpu"}


class TestLoneUnit(Unit):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"workers": 1}


class TestTeamUnit(Unit):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"workers": ["Ann", "Ben"], "layout": "interleaved"}


class TestLone(Lone):
    long_answer = 72

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**EMBEDDED, "workers": 1, "max_tokens": 4}

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        source = locate("smollm2-135m")
        return f"{source.place}/{source.gguf_file}"

    @pytest.mark.xfail(reason="greedy SmolLM2-135M answers in words where it may call a tool")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="greedy SmolLM2-135M does not end a free JSON object in 128 tokens")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)


class TestTeam(Team):
    long_answer = 72

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**EMBEDDED, "workers": 2, "max_steps": 3, "max_tokens": 3}

    @pytest.mark.xfail(reason="greedy SmolLM2-135M answers in words where it may call a tool")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="SmolLM2-135M copies 'Hello Group', not the name before it")
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **choice: Any) -> None:
        super().test_unicode_tool_call_integration(model, **choice)
