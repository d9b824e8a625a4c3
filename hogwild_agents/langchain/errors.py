"""Every error that the face raises: the engine's, each beside its kin in LangChain core's family.

    ours                                   core's
    HogwildError
    ├── ConfigError (ValueError)           ModelInvalidRequestError   a setting is wrong
    ├── RequestError (ValueError)          ModelInvalidRequestError   messages cannot be served
    │   ├── ContentError                                              … for a block in them
    │   ├── WorkerNameError                                           … for a worker's name
    │   └── PromptTooLongError             ContextOverflowError       … for their length
    ├── ModelError                         ModelError                 the model cannot be used
    │   ├── ModelNotFoundError (LookupError)  ModelNotFoundError
    │   ├── ModelRefusedError                                         … by a check at load
    │   └── NoChatTemplateError            ModelInvalidRequestError
    ├── ModelTimeoutError (TimeoutError)   ModelTimeoutError          retryable
    ├── EngineClosedError                  ModelAPIError              retryable, on a new engine
    ├── SessionCancelledError              ModelError                 cancelled from elsewhere
    └── SessionFailedError                 ModelAPIError              retryable

A class here bears the name of the engine's class that it is, so either import catches it;
``is_retryable`` is core's. (Core's ``ModelRefusalError``, a model that declines, is another thing.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_core import exceptions as core

from hogwild_engine.api import errors as engine
from hogwild_engine.api.errors import HogwildError, complaint

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


class EngineClosedError(engine.EngineClosedError, core.ModelAPIError):
    """The engine was closed while it was needed; the next call loads a new one."""


class SessionCancelledError(engine.SessionCancelledError, core.ModelError):
    """The session was cancelled before it finished."""


class SessionFailedError(engine.SessionFailedError, core.ModelAPIError):
    """The engine failed while it served the session; the cause is chained."""


_FACES: dict[type[HogwildError], type[HogwildError]] = {
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
    """The face's error for an engine's; an error of the face comes back as it is."""
    if isinstance(error, core.ModelError):
        return error
    face = next((_FACES[kind] for kind in type(error).__mro__ if kind in _FACES), None)
    if face is None:
        return error
    # What rebuilds an error is in its reduction: ModelRefusedError takes more than a message.
    _, args, *_ = error.__reduce__()
    return face(*args)


@contextmanager
def translated() -> Iterator[None]:
    """Raise the face's errors for the engine's, chained."""
    try:
        yield
    except HogwildError as error:
        face = translate(error)
        if face is error:
            raise
        raise face from error


def from_validation(error: ValidationError) -> HogwildError:
    """Our error for the first complaint of a failed pydantic validation."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, HogwildError):
        return translate(cause)
    name = ".".join(str(part) for part in first["loc"]) or "arguments"
    return ConfigError(
        complaint(name, first["msg"].removeprefix("Input should be "), first["input"])
    )
