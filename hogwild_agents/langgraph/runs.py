"""A session as nested chat-model runs: one per paragraph, tagged with its worker, and the answer's.

`Transcript` turns events into runs that begin, grow and end; `Runs` reports these to the callbacks.
So ``stream_mode="messages"`` and tracers show the workers separately while they write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
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

from hogwild_agents.langchain.chat_model import ChatHogwild
from hogwild_agents.langchain.replies import Reply
from hogwild_engine.api.events import (
    Event,
    Finished,
    Paragraph,
    ParagraphFinished,
    Token,
)

_NOTHING = LLMResult(generations=[])


class Begin(NamedTuple):
    """A run begins: a worker's, or the answer's with ``None``. ``run`` is its message's id."""

    run: str
    worker: str | None


class Grow(NamedTuple):
    """A run's message grows."""

    run: str
    chunk: AIMessageChunk


class End(NamedTuple):
    """A run ends with its whole message."""

    run: str
    message: AIMessage


class Transcript:
    """The messages of one session.

    Args:
        reply: builds the answer, and has its id.
    """

    def __init__(self, reply: Reply) -> None:
        self.paragraphs: list[AIMessage] = []
        self.answer = AIMessage("", id=reply.message_id)
        self._reply = reply
        self._drafts: dict[str, AIMessage] = {}
        self._ended: set[str] = set()

    def acts(self, event: Event) -> Iterator[Begin | Grow | End]:
        """Return what an event means for the runs."""
        if isinstance(event, Token):
            yield from self._write(event)
        elif isinstance(event, ParagraphFinished):
            self.paragraphs.append(self._paragraph(event.paragraph))
            yield from self._end(self.paragraphs[-1])
        elif isinstance(event, Finished):
            yield from self._finish(event)
        elif chunk := self._reply.chunk(event):
            yield from self._answer(chunk)

    def _write(self, token: Token) -> Iterator[Begin | Grow]:
        run = self._reply.paragraph_id(token.worker, token.paragraph)
        yield from self._begin(run, token.worker)
        self._drafts[run].content += token.text
        yield Grow(run, AIMessageChunk(content=token.text, id=run, name=token.worker))

    def _answer(self, chunk: AIMessageChunk) -> Iterator[Begin | Grow]:
        run = chunk.id = self._reply.message_id
        yield from self._begin(run, None)
        yield Grow(run, chunk)

    def _finish(self, finished: Finished) -> Iterator[Begin | Grow | End]:
        self.answer = self._reply.message(finished)
        self.answer.id = self._reply.message_id
        # A draft without content never enters the history.
        for run in self._drafts.keys() - self._ended - {self.answer.id}:
            yield from self._end(self._drafts[run])
        if last := self._reply.chunk(finished):
            yield from self._answer(last)
        yield from self._end(self.answer)

    def _begin(self, run: str, worker: str | None) -> Iterator[Begin]:
        if run not in self._drafts:
            self._drafts[run] = AIMessage("", id=run, name=worker)
            yield Begin(run, worker)

    def _end(self, message: AIMessage) -> Iterator[Begin | End]:
        run = str(message.id)
        yield from self._begin(run, message.name)
        self._ended.add(run)
        yield End(run, message)

    def _paragraph(self, paragraph: Paragraph) -> AIMessage:
        run = self._reply.paragraph_id(paragraph.worker, paragraph.number)
        return AIMessage(paragraph.text, id=run, name=paragraph.worker)


class Runs:
    """Reports runs to callbacks, from sync code or from a coroutine.

    Args:
        llm: the model of the runs.
        messages: its input.
        config: of the node that is their parent.
    """

    def __init__(
        self, llm: ChatHogwild, messages: Sequence[BaseMessage], config: RunnableConfig
    ) -> None:
        self._llm = llm
        self._config = config
        self._start: dict[str, Any] = {
            "serialized": dumpd(llm),
            "messages": [list(messages)],
            "invocation_params": llm._get_invocation_params(),
            "options": {},
            "batch_size": 1,
        }
        self._open: dict[str, CallbackManagerForLLMRun] = {}
        self._aopen: dict[str, AsyncCallbackManagerForLLMRun] = {}

    def do(self, act: Begin | Grow | End) -> None:
        """Report one change to the callbacks."""
        if isinstance(act, Begin):
            manager = CallbackManager.configure(**self._setup(act.worker))
            (self._open[act.run],) = manager.on_chat_model_start(**self._start, name=act.worker)
        elif isinstance(act, Grow):
            chunk = ChatGenerationChunk(message=act.chunk)
            self._open[act.run].on_llm_new_token(act.chunk.content, chunk=chunk)
        else:
            self._open.pop(act.run).on_llm_end(_result(act.message))

    async def ado(self, act: Begin | Grow | End) -> None:
        """Do as `do` for async callbacks."""
        if isinstance(act, Begin):
            manager = AsyncCallbackManager.configure(**self._setup(act.worker))
            starting = manager.on_chat_model_start(**self._start, name=act.worker)
            (self._aopen[act.run],) = await starting
        elif isinstance(act, Grow):
            chunk = ChatGenerationChunk(message=act.chunk)
            await self._aopen[act.run].on_llm_new_token(act.chunk.content, chunk=chunk)
        else:
            await self._aopen.pop(act.run).on_llm_end(_result(act.message))

    def fail(self, error: BaseException) -> None:
        """End all open runs with an error."""
        for run in self._open.values():
            run.on_llm_error(error, response=_NOTHING)
        self._open.clear()

    async def afail(self, error: BaseException) -> None:
        """Do as `fail` for async callbacks, even if the caller is cancelled again."""
        reports = [run.on_llm_error(error, response=_NOTHING) for run in self._aopen.values()]
        self._aopen.clear()
        await asyncio.shield(asyncio.gather(*reports))

    def _setup(self, worker: str | None) -> dict[str, Any]:
        """Return the arguments of ``configure`` that a call of the model itself would pass."""
        llm, config = self._llm, self._config
        tags = [f"worker:{worker.casefold()}"] if worker else []
        about = {"hogwild_worker": worker, "lc_agent_name": worker} if worker else {}
        return {
            "inheritable_callbacks": config.get("callbacks"),
            "local_callbacks": llm.callbacks,
            "verbose": llm.verbose,
            "inheritable_tags": config.get("tags"),
            "local_tags": [*(llm.tags or []), *tags],
            "inheritable_metadata": {
                **(config.get("metadata") or {}),
                **llm._get_ls_params_with_defaults(),
            },
            "local_metadata": {**(llm.metadata or {}), **about},
        }


def _result(message: AIMessage) -> LLMResult:
    return LLMResult(generations=[[ChatGeneration(message=message)]])
