"""The LangGraph node: a session of a team as one step of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, closing
from typing import Any, Literal

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langgraph.errors import GraphDrained
from langgraph.runtime import Runtime, get_runtime

from hogwild_agents.langchain import calls
from hogwild_agents.langchain.chat_model import ChatHogwild
from hogwild_agents.langchain.errors import translated
from hogwild_agents.langchain.messages import to_messages
from hogwild_agents.langchain.replies import Reply
from hogwild_agents.langgraph.runs import Runs, Transcript
from hogwild_engine.api.errors import require
from hogwild_engine.api.events import Event

OutputMode = Literal["last", "full_history"]


class HogwildNode(Runnable[Any, dict[str, Any]]):
    """Node whose workers write at the same time: messages in, messages out.

    It runs in sync and async graphs; in an async graph, cancelling the node cancels the session
    within a step. While workers write, ``stream_mode="messages"`` shows each paragraph as a
    chat-model run with the tag ``worker:alice`` and ``hogwild_worker`` in its metadata, and
    ``stream_mode="custom"`` shows the engine's events as dicts.

    Args:
        llm: the model, with the settings of the session.
        output_mode: "last" returns the answer. "full_history" returns each paragraph as a message
            with its worker's name, then the answer. Until the next human message these paragraphs
            are history of the task when the node runs again.
        messages_key: the state's key of the messages.
        name: the node's name unless ``add_node`` gets one.

    Raises:
        ConfigError: an argument is not what it must be.
    """

    def __init__(
        self,
        llm: ChatHogwild,
        *,
        output_mode: OutputMode = "last",
        messages_key: str = "messages",
        name: str | None = None,
    ) -> None:
        with translated():
            todo = "give settings to the model itself, and retries to add_node(retry_policy=…)"
            plain = isinstance(llm, ChatHogwild)
            require(plain, "llm", "a ChatHogwild", type(llm).__name__, todo)
            known = output_mode in ("last", "full_history")
            require(known, "output_mode", "'last' or 'full_history'", output_mode)
        self.llm = llm
        self.output_mode = output_mode
        self.messages_key = messages_key
        self.name = name

    def invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Run a session on the state's messages and return the update of the state."""
        messages = self._messages(input)
        call = self.llm.make_call(messages, **kwargs)
        transcript = Transcript(Reply.to(call))
        runs, runtime = Runs(self.llm, messages, ensure_config(config)), _runtime()
        try:
            with closing(calls.events(call)) as events:
                for event in events:
                    _show(event, runtime)
                    for act in transcript.acts(event):
                        runs.do(act)
        except BaseException as error:
            runs.fail(error)
            raise
        return self._update(transcript)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Do as `invoke` in async graphs; cancelling it cancels the session."""
        messages = self._messages(input)
        call = self.llm.make_call(messages, **kwargs)
        transcript = Transcript(Reply.to(call))
        runs, runtime = Runs(self.llm, messages, ensure_config(config)), _runtime()
        try:
            async with aclosing(calls.aevents(call)) as events:
                async for event in events:
                    _show(event, runtime)
                    for act in transcript.acts(event):
                        await runs.ado(act)
        except BaseException as error:
            await runs.afail(error)
            raise
        return self._update(transcript)

    def _messages(self, state: Any) -> list[BaseMessage]:
        key = self.messages_key
        found = state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
        with translated():
            keys = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            came = keys if found is None else f"{type(found).__name__} there"
            wanted = f"a state with messages, a list, under {key!r}"
            require(isinstance(found, list), "messages_key", wanted, came)
        return to_messages(found or [])

    def _update(self, transcript: Transcript) -> dict[str, Any]:
        if self.output_mode == "last":
            return {self.messages_key: [transcript.answer]}
        return {self.messages_key: [*transcript.paragraphs, transcript.answer]}


def _runtime() -> Runtime | None:
    """Return the graph's runtime; ``None`` outside of a graph."""
    try:
        return get_runtime()
    except (RuntimeError, KeyError):
        return None


def _show(event: Event, runtime: Runtime | None) -> None:
    """Stream an event to the graph; stop if the graph is draining, to run again when resumed."""
    if runtime is None:
        return
    if runtime.drain_requested:
        raise GraphDrained(runtime.drain_reason or "shutdown")
    runtime.heartbeat()
    runtime.stream_writer(event.as_dict())
