"""LangChain's side of every error: what `ChatHogwild` raises is also an error of LangChain core.

    hogwild_agents                         langchain_core.exceptions
    HogwildError
    ├── ConfigError (ValueError)           ModelInvalidRequestError   a setting is wrong
    ├── RequestError (ValueError)          ModelInvalidRequestError   the messages are wrong
    │   ├── ContentError                                              … a block in them
    │   ├── WorkerNameError                                           … a worker's name
    │   └── PromptTooLongError             ContextOverflowError       … their length
    ├── ModelError                         ModelError                 the model cannot be used
    │   ├── ModelNotFoundError (LookupError)  ModelNotFoundError
    │   ├── ModelRefusedError                                         … it failed a check at load
    │   └── NoChatTemplateError            ModelInvalidRequestError
    ├── AnswerMismatchError (ValueError)   OutputParserException      the answer breaks its schema
    ├── ModelTimeoutError (TimeoutError)   ModelTimeoutError          retryable
    ├── EngineClosedError                  ModelAPIError              retryable, on a new engine
    ├── SessionCancelledError              ModelError                 cancelled from elsewhere
    └── SessionFailedError                 ModelAPIError              retryable

The names in `hogwild_agents` are the engine's classes: they also catch what `Worker` and `Grammar`
raise when they are built. The classes here are subclasses of these and of LangChain's; their
``is_retryable`` is LangChain's. (Its ``ModelRefusalError``, a model that declines to answer, is
unrelated to `ModelRefusedError`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_core import exceptions as core

from hogwild_engine.api import errors as engine
from hogwild_engine.api.errors import HogwildError, error_text

if TYPE_CHECKING:
    from pydantic import ValidationError


class ConfigError(engine.ConfigError, core.ModelInvalidRequestError):
    """A setting is out of range or unknown."""


class RequestError(engine.RequestError, core.ModelInvalidRequestError):
    """The messages cannot be served as they stand."""


class ContentError(RequestError):
    """A message holds something that a text model cannot read."""


class WorkerNameError(RequestError, engine.WorkerNameError):
    """A worker's name is empty, used twice, or would break the headers that carry it."""


class PromptTooLongError(RequestError, engine.PromptTooLongError, core.ContextOverflowError):
    """The prompt leaves no room for an answer in the model's context or in the page pool."""


class ModelError(engine.ModelError, core.ModelError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError, engine.ModelNotFoundError, core.ModelNotFoundError):
    """No model answers to the name that was given."""


class ModelRefusedError(ModelError, engine.ModelRefusedError):
    """The model failed a check at load; ``check`` names it, ``detail`` says what was measured."""


class NoChatTemplateError(ModelError, engine.NoChatTemplateError, core.ModelInvalidRequestError):
    """The model's tokenizer has no chat template, so messages cannot be rendered."""


class ModelTimeoutError(HogwildError, core.ModelTimeoutError, TimeoutError):
    """The answer did not come within ``timeout`` seconds; its session was cancelled."""


class AnswerMismatchError(HogwildError, core.OutputParserException):
    """The answer does not fit the JSON schema that it was asked for; ``llm_output`` is its text."""

    def __init__(self, problem: str, text: str) -> None:
        message = f"answer: wanted JSON that fits its schema; {problem}"
        core.OutputParserException.__init__(self, message, llm_output=text)
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.problem, self.llm_output or "")


class EngineClosedError(engine.EngineClosedError, core.ModelAPIError):
    """The engine was closed while it was needed; the next call loads a new one."""


class SessionCancelledError(engine.SessionCancelledError, core.ModelError):
    """The session was cancelled before it finished."""


class SessionFailedError(engine.SessionFailedError, core.ModelAPIError):
    """The engine failed while it served the session; the cause is chained."""


_CLASSES: dict[type[HogwildError], type[HogwildError]] = {
    engine.ConfigError: ConfigError,
    engine.RequestError: RequestError,
    engine.WorkerNameError: WorkerNameError,
    engine.PromptTooLongError: PromptTooLongError,
    engine.ModelError: ModelError,
    engine.ModelNotFoundError: ModelNotFoundError,
    engine.ModelRefusedError: ModelRefusedError,
    engine.NoChatTemplateError: NoChatTemplateError,
    engine.EngineClosedError: EngineClosedError,
    engine.SessionCancelledError: SessionCancelledError,
    engine.SessionFailedError: SessionFailedError,
}


def translate(error: HogwildError) -> HogwildError:
    """Return the error of this module for an engine's error; any other error as it is."""
    if isinstance(error, core.ModelError):
        return error
    kind = next((_CLASSES[base] for base in type(error).__mro__ if base in _CLASSES), None)
    if kind is None:
        return error
    # ModelRefusedError takes more than a message: its reduction knows its arguments.
    _, args, *_ = error.__reduce__()
    return kind(*args)


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of this module for the engine's, with these as their causes."""
    try:
        yield
    except HogwildError as error:
        translation = translate(error)
        if translation is error:
            raise
        raise translation from error


def from_validation(error: ValidationError) -> HogwildError:
    """Return the error for the first problem that pydantic found."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, HogwildError):
        return translate(cause)
    name = ".".join(str(part) for part in first["loc"]) or "arguments"
    return ConfigError(
        error_text(name, first["msg"].removeprefix("Input should be "), first["input"])
    )
