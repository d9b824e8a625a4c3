"""LangChain's standard suite as this model runs it: what it supports, which details it tells."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from hogwild_agents import ChatHogwild

Detail = Literal[
    "audio_input",
    "audio_output",
    "reasoning_output",
    "cache_read_input",
    "cache_creation_input",
]


# Tests whose answers are JSON need more tokens than those that take any answer.
LONG = ("tool", "structured", "json", "runnables", "agent_loop")


class Lone(ChatModelIntegrationTests):
    """One worker, the plain model."""

    long_answer: int
    """Tokens that a call or an object may take."""

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        settings: dict[str, Any] = {**self.chat_model_params, **getattr(request, "param", {})}
        if any(word in request.node.name for word in LONG):
            settings["max_tokens"] = self.long_answer
        if "structured_output" in request.node.name:
            # A small model repeats the texts of an object without end: nothing bounds them.
            settings |= {"repetition_penalty": 1.1, "max_tokens": 2 * self.long_answer}
        return ChatHogwild(**settings)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # a second engine to load


class Team(Lone):
    """Two workers that think before one of them answers."""

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Detail]]:
        details: list[Detail] = ["reasoning_output", "cache_read_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self._say_hello(stream=stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._say_hello(stream=stream)

    def _say_hello(self, *, stream: bool) -> AIMessage:
        settings: dict[str, Any] = self.chat_model_params
        llm = ChatHogwild(**settings)
        if not stream:
            return llm.invoke("Hello")
        first, *others = llm.stream("Hello")
        return cast(AIMessage, first + others)
