"""LangChain's standard suite on the embedded model: the plain model, and a team by its defaults."""

from __future__ import annotations

from typing import Any, Literal, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from hogwild_agents import ChatHogwild
from hogwild_engine.weights import locate

# The engine of conftest.py: equal settings share it.
EMBEDDED = {"model": "smollm2-135m", "dtype": "float32", "num_pages": 192}
LONE = {**EMBEDDED, "workers": 1, "max_tokens": 4}
TEAM = {**EMBEDDED, "workers": 2, "max_steps": 4, "max_tokens": 3, "seed": 0}

Detail = Literal[
    "audio_input",
    "audio_output",
    "reasoning_output",
    "cache_read_input",
    "cache_creation_input",
]


class TestLoneUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"workers": 1}


class TestTeamUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"workers": ["Ann", "Ben"], "layout": "interleaved"}


class TestLone(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return LONE

    @property
    def model_override_value(self) -> str:
        source = locate("smollm2-135m")
        return f"{source.place}/{source.gguf_file}"


class TestTeam(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHogwild

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return TEAM

    @property
    def supports_model_override(self) -> bool:
        return False  # the same code as for one worker, and a second engine to load

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Detail]]:
        details: list[Detail] = ["reasoning_output", "cache_read_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return _say_hello(stream=stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return _say_hello(stream=stream)


def _say_hello(*, stream: bool) -> AIMessage:
    llm = ChatHogwild(**TEAM)
    if not stream:
        return llm.invoke("Hello")
    first, *others = llm.stream("Hello")
    return cast(AIMessage, first + others)
