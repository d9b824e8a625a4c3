"""The LangGraph node: a session of a team as one step of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config

from hogwild_agents.langchain.chat_model import ChatHogwild
from hogwild_agents.langchain.errors import translated
from hogwild_agents.langchain.messages import to_messages
from hogwild_agents.langgraph.runs import Runs, paragraph_metadata
from hogwild_engine.api.errors import require

OutputMode = Literal["last_message", "full_history", "last"]


class HogwildNode(Runnable[Any, dict[str, Any]]):
    """Node whose workers write at the same time: messages in, messages out.

    It calls the model's own ``invoke`` or ``ainvoke``, so cache, rate limiter, callbacks,
    ``disable_streaming`` and ``output_version`` hold as they do for the model. It runs in sync and
    async graphs; in an async graph, cancelling the node cancels the session within a step. While
    workers write, ``stream_mode="messages"`` shows each paragraph as a chat-model run with the tag
    ``worker:alice`` and ``hogwild_worker`` in its metadata. The answer's message holds them as
    reasoning blocks. ``stream_mode="custom"`` shows the engine's events as dicts.

    Args:
        llm: the model, with the settings of the session.
        output_mode: "last_message" (or "last") returns the answer. "full_history" returns each
            paragraph as a message with its worker's name, then the answer. Until the next human
            message these paragraphs are history of the task when the node runs again.
        messages_key: the state's key of the messages.
        name: the node's name unless ``add_node`` gets one.

    Raises:
        ConfigError: an argument is not what it must be.
    """

    def __init__(
        self,
        llm: ChatHogwild,
        *,
        output_mode: OutputMode = "last_message",
        messages_key: str = "messages",
        name: str | None = None,
    ) -> None:
        with translated():
            todo = "give settings to the model itself, and retries to add_node(retry_policy=…)"
            plain = isinstance(llm, ChatHogwild)
            require(plain, "llm", "a ChatHogwild", type(llm).__name__, todo)
            known = output_mode in get_args(OutputMode)
            require(known, "output_mode", "'last_message' or 'full_history'", output_mode)
        self.llm = llm
        self.output_mode = output_mode
        self.messages_key = messages_key
        self.name = name

    def invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Run a session on the state's messages and return the update of the state."""
        messages, config = self._messages(input), _of_the_model(config)
        runs = Runs(self.llm, messages, config, kwargs)
        try:
            answer = self.llm.observed_by(runs).invoke(messages, config, **kwargs)
        except BaseException as error:
            runs.fail(error)
            raise
        return self._update(answer)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Do as `invoke` in async graphs; cancelling it cancels the session."""
        messages, config = self._messages(input), _of_the_model(config)
        runs = Runs(self.llm, messages, config, kwargs)
        try:
            answer = await self.llm.observed_by(runs).ainvoke(messages, config, **kwargs)
        except BaseException as error:
            await runs.afail(error)
            raise
        return self._update(answer)

    def _messages(self, state: Any) -> list[BaseMessage]:
        key = self.messages_key
        found = state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
        with translated():
            keys = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            came = keys if found is None else f"{type(found).__name__} there"
            wanted = f"a state with messages, a list, under {key!r}"
            require(isinstance(found, list), "messages_key", wanted, came)
        return to_messages(found or [])

    def _update(self, answer: AIMessage) -> dict[str, Any]:
        if self.output_mode != "full_history":
            return {self.messages_key: [answer]}
        return {self.messages_key: [*_paragraphs(answer), answer]}


def _of_the_model(config: RunnableConfig | None) -> RunnableConfig:
    """Return the node's config without what names and identifies the node's own run."""
    config = ensure_config(config)
    config.pop("run_name", None)
    config.pop("run_id", None)
    return config


def _paragraphs(answer: AIMessage) -> list[AIMessage]:
    """Return the paragraphs that an answer holds as reasoning blocks, as messages."""
    blocks = [block for block in answer.content if isinstance(block, dict)]
    return [
        AIMessage(
            block.get("reasoning", ""),
            id=block.get("id"),
            name=block["extras"]["worker"],
            response_metadata=paragraph_metadata(block["extras"].get("complete", True)),
        )
        for block in blocks
        if block.get("type") == "reasoning" and "worker" in block.get("extras", {})
    ]
