"""A session's paragraphs as nested chat-model runs, one each, tagged with its worker.

`HogwildNode` calls the model's own ``invoke``, whose run is the answer's. `Runs` observes the
events of that call and reports paragraphs to the same callbacks, as LangChain core would report a
run of the model: tokens, protocol events or whole messages, as handlers and ``disable_streaming``
want. So ``stream_mode="messages"`` and tracers show the workers separately while they write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphDrained
from langgraph.runtime import Runtime, get_runtime

from hogwild_agents.langchain.chat_model import ChatHogwild
from hogwild_agents.langchain.replies import Reply
from hogwild_engine.api.events import Event, Finished, ParagraphFinished, Token

_NOTHING = LLMResult(generations=[])


class Begin(NamedTuple):
    """A worker's run begins. ``run`` is its message's id."""

    run: str
    worker: str


class Grow(NamedTuple):
    """A run's message grows."""

    run: str
    worker: str
    text: str


class End(NamedTuple):
    """A run ends with its whole message."""

    run: str
    message: AIMessage


Act = Begin | Grow | End


class Runs:
    """Reports the paragraphs of one call to callbacks, from sync code or from a coroutine.

    Args:
        llm: the model of the runs.
        messages: its input.
        config: of the node that is their parent.
        settings: those of this call.
    """

    def __init__(
        self,
        llm: ChatHogwild,
        messages: Sequence[BaseMessage],
        config: RunnableConfig,
        settings: Mapping[str, Any],
    ) -> None:
        self._llm = llm
        self._config = config
        self._settings = dict(settings)
        self._runtime = _runtime()
        self._start: dict[str, Any] = {
            "serialized": dumpd(llm),
            "messages": [list(messages)],
            "invocation_params": llm._get_invocation_params(**settings),
            "options": {},
            "batch_size": 1,
        }
        self._drafts: dict[str, AIMessage] = {}
        self._open: dict[str, _Run] = {}
        self._aopen: dict[str, _Run] = {}

    def see(self, event: Event, reply: Reply) -> None:
        """Show an event to the graph and report what it means for the runs."""
        _show(event, self._runtime)
        for act in self._acts(event, reply):
            if isinstance(act, Begin):
                manager = CallbackManager.configure(**self._setup(act.worker))
                (run,) = manager.on_chat_model_start(**self._start, name=act.worker)
                self._open[act.run] = _Run(run, self._form(run, async_api=False))
                continue
            run, form = self._open[act.run]
            for protocol_event in _protocol_events(act, form):
                run.on_stream_event(protocol_event)
            if isinstance(act, End):
                self._open.pop(act.run).manager.on_llm_end(_result(act.message))
            elif form.tokens:
                run.on_llm_new_token(act.text, chunk=_chunk(act))

    async def asee(self, event: Event, reply: Reply) -> None:
        """Do as `see` for async callbacks."""
        _show(event, self._runtime)
        for act in self._acts(event, reply):
            if isinstance(act, Begin):
                manager = AsyncCallbackManager.configure(**self._setup(act.worker))
                (run,) = await manager.on_chat_model_start(**self._start, name=act.worker)
                self._aopen[act.run] = _Run(run, self._form(run, async_api=True))
                continue
            run, form = self._aopen[act.run]
            for protocol_event in _protocol_events(act, form):
                await run.on_stream_event(protocol_event)
            if isinstance(act, End):
                await self._aopen.pop(act.run).manager.on_llm_end(_result(act.message))
            elif form.tokens:
                await run.on_llm_new_token(act.text, chunk=_chunk(act))

    def fail(self, error: BaseException) -> None:
        """End all open runs with an error."""
        for run, _ in self._open.values():
            run.on_llm_error(error, response=_NOTHING)
        self._open.clear()

    async def afail(self, error: BaseException) -> None:
        """Do as `fail` for async callbacks, even if the caller is cancelled again."""
        reports = [run.on_llm_error(error, response=_NOTHING) for run, _ in self._aopen.values()]
        self._aopen.clear()
        await asyncio.shield(asyncio.gather(*reports))

    def _acts(self, event: Event, reply: Reply) -> Iterator[Act]:
        """Yield what an event means for the runs."""
        if isinstance(event, Token):
            run = reply.paragraph_id(event.worker, event.paragraph)
            yield from self._begin(run, event.worker)
            self._drafts[run].content += event.text
            yield Grow(run, event.worker, event.text)
        elif isinstance(event, ParagraphFinished):
            worker, number = event.paragraph.worker, event.paragraph.number
            run = reply.paragraph_id(worker, number)
            yield from self._begin(run, worker)
            del self._drafts[run]
            about = paragraph_metadata(event.paragraph.complete)
            message = AIMessage(event.paragraph.text, id=run, name=worker, response_metadata=about)
            yield End(run, message)
        elif isinstance(event, Finished):
            # A draft without content never enters the history.
            for run, draft in self._drafts.items():
                yield End(run, draft)
            self._drafts = {}

    def _begin(self, run: str, worker: str) -> Iterator[Begin]:
        if run not in self._drafts:
            self._drafts[run] = AIMessage("", id=run, name=worker)
            yield Begin(run, worker)

    def _form(
        self, run: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun, *, async_api: bool
    ) -> _Form:
        """Return the form in which LangChain core would stream a run to these handlers."""
        options = {"async_api": async_api, "run_manager": run, **self._settings}
        events = self._llm._should_use_protocol_streaming(**options)
        return _Form(events, not events and self._llm._should_stream(**options))

    def _setup(self, worker: str) -> dict[str, Any]:
        """Return the arguments of ``configure`` that a call of the model itself would pass."""
        llm, config = self._llm, self._config
        return {
            "inheritable_callbacks": config.get("callbacks"),
            "local_callbacks": llm.callbacks,
            "verbose": llm.verbose,
            "inheritable_tags": config.get("tags"),
            "local_tags": [*(llm.tags or []), f"worker:{worker.casefold()}"],
            "inheritable_metadata": {
                **(config.get("metadata") or {}),
                **llm._get_ls_params_with_defaults(**self._settings),
            },
            "local_metadata": {
                **(llm.metadata or {}),
                "hogwild_worker": worker,
                "lc_agent_name": worker,
            },
        }


@dataclass
class _Form:
    """How a run is streamed: by protocol events, by tokens, or not."""

    events: bool
    tokens: bool
    text: str = ""


class _Run(NamedTuple):
    """An open run. The manager is an async one in a coroutine."""

    manager: Any
    form: _Form


def _protocol_events(act: Grow | End, form: _Form) -> Iterator[Any]:
    """Yield the protocol's events for a message of one text block."""
    if not form.events:
        return
    begins = not form.text
    if begins and (isinstance(act, Grow) or act.message.text):
        yield {"event": "message-start", "role": "ai", "id": act.run}
        block = {"type": "text", "text": ""}
        yield {"event": "content-block-start", "index": 0, "content": block}
    if isinstance(act, Grow):
        form.text += act.text
        delta = {"type": "text-delta", "text": act.text}
        yield {"event": "content-block-delta", "index": 0, "delta": delta}
    elif act.message.text:
        block = {"type": "text", "text": act.message.text}
        yield {"event": "content-block-finish", "index": 0, "content": block}
        yield {"event": "message-finish"}


def _chunk(act: Grow) -> ChatGenerationChunk:
    message = AIMessageChunk(content=act.text, id=act.run, name=act.worker)
    return ChatGenerationChunk(message=message)


def _result(message: AIMessage) -> LLMResult:
    return LLMResult(generations=[[ChatGeneration(message=message)]])


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


def paragraph_metadata(complete: bool) -> dict[str, str]:
    """Return the metadata of a paragraph's message: "length" if the end of the steps cut it."""
    return {"finish_reason": "stop" if complete else "length"}
