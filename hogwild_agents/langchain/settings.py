"""Settings of `ChatHogwild`: its fields, their checks, and their forms as plain data."""

from __future__ import annotations

import difflib
import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from langchain_core.language_models import BaseChatModel, LangSmithParams, ModelProfile
from pydantic import AliasChoices, Field, SkipValidation, ValidationError, model_validator

from hogwild_agents.langchain import engines
from hogwild_agents.langchain.errors import from_validation, translated
from hogwild_agents.langchain.plain import from_plain, to_plain
from hogwild_agents.langchain.replies import PROVIDER
from hogwild_engine.api.config import (
    EMBEDDED_MODEL,
    AttentionName,
    DtypeName,
    EngineConfig,
    PrefillName,
    QuantizationName,
    SamplingParams,
)
from hogwild_engine.api.errors import require
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.api.layout import LayoutName
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request, Worker, check_settings, make_workers
from hogwild_engine.loading.source import locate
from hogwild_engine.loading.stated_context import stated_context

# Code that serves any provider passes these; a model in this process does not need them.
_FOR_REMOTE_MODELS = frozenset({"api_key", "max_retries"})
# What LangChain core and `with_structured_output` pass along with a call.
FROM_CORE = frozenset({"stream", "ls_structured_output_format", "include_raw"})
BINDINGS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "strict", "response_format"})
_NO_SETTINGS = {"messages", "history", "tools", "tool_choice", "parallel_tool_calls", "ignore_eos"}

# The engine's dataclasses define each setting and its default once.
_ENGINE: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_SAMPLING: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
_REQUEST: dict[str, Any] = {
    field.name: field.default
    for field in fields(Request)
    if field.name not in {*_NO_SETTINGS, "workers", "sampling", "stop"}
}
SETTINGS = (*_ENGINE, "workers", *_REQUEST, *_SAMPLING, "stop", "timeout")


class ModelSettings(BaseChatModel):
    """The settings of `ChatHogwild`, which explains them, and what follows from them alone."""

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

    # Hidden from type checkers, which would otherwise not see the fields as arguments.
    if not TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None:
            warn_of_unknown(settings, {*type(self).model_fields, "model_name"}, "ChatHogwild")
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
        _ = self._sampling, self._config  # their dataclasses check them
        check_timeout(self.timeout)
        locate(self.model)
        return self

    @property
    def _config(self) -> EngineConfig:
        """The engine that the settings ask for."""
        return EngineConfig(**self._pick(_ENGINE))

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams(**self._pick(_SAMPLING))

    def _request_settings(self) -> dict[str, Any]:
        """Return the fields of a request that the settings decide."""
        check_timeout(self.timeout)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {**self._pick(_REQUEST), "sampling": self._sampling, "stop": stop}

    def _pick(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def _llm_type(self) -> str:
        return "chat-hogwild"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Every setting that can change an output, as plain data. LangChain's caches key by it."""
        names = [name for name in SETTINGS if name != "timeout"]
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

    def _complete_profile(self) -> None:
        """Take the loaded engine's context, which may be below the one that the files state."""
        limit = self._max_input_tokens()
        if self.profile is not None and limit is not None:
            stated = self.profile.get("max_input_tokens")
            self.profile["max_input_tokens"] = min(stated or limit, limit)

    def _max_input_tokens(self) -> int | None:
        config = self._config
        engine = engines.REGISTRY.loaded(config)
        return engine.max_tokens if engine is not None else stated_context(config)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=to_plain("stop", stop or self.stop), **kwargs)
        params["ls_provider"] = PROVIDER
        return params


def check_timeout(timeout: object) -> None:
    number = isinstance(timeout, int | float) and 0 < timeout <= threading.TIMEOUT_MAX
    require(timeout is None or number, "timeout", "seconds above 0, or None", timeout)


def warn_of_unknown(given: dict[str, Any], known: set[str], where: str) -> None:
    for name in given.keys() - known - _FOR_REMOTE_MODELS:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        warnings.warn(f"{where} ignores the unknown argument {name!r}{hint}", stacklevel=3)
