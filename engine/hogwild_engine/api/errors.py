"""Errors that the engine raises for a caller to handle.

    HogwildError
    ├── ConfigError (ValueError)          a setting is out of range or unknown
    ├── RequestError (ValueError)         a request cannot be served
    │   ├── WorkerNameError               a worker's name is invalid or used twice
    │   └── PromptTooLongError            the prompt does not fit the context or the KV cache
    ├── ModelError                        the model cannot be used
    │   ├── ModelNotFoundError (LookupError)
    │   ├── ModelRefusedError             a check at load failed; ``check`` names it
    │   └── NoChatTemplateError           the tokenizer has no chat template
    ├── EngineClosedError                 the engine is closed
    ├── SessionCancelledError             the session was cancelled by its owner
    └── SessionFailedError                the engine failed while it served the session

Messages have the form "name: wanted X, got Y; do Z", where ``name`` is the argument.
"""


class HogwildError(Exception):
    """Base class of all errors of hogwild-agents."""


class ConfigError(HogwildError, ValueError):
    """A setting is out of range or unknown."""


class RequestError(HogwildError, ValueError):
    """A request cannot be served."""


class WorkerNameError(RequestError):
    """A worker's name is empty, used twice, or would break the headers of paragraphs."""


class PromptTooLongError(RequestError):
    """The prompt leaves no space for an answer in the model's context or in the KV cache."""


class ModelError(HogwildError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError, LookupError):
    """There is no model of the given name."""


class ModelRefusedError(ModelError):
    """The model failed a check at load: its output over a shared KV cache would be wrong.

    Args:
        check: the name of the check that failed.
        detail: what was measured and what was wanted.
    """

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"model refused by the {check!r} check: {detail}")
        self.check = check
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        # By default, an exception is unpickled from its message alone.
        return type(self), (self.check, self.detail)


class NoChatTemplateError(ModelError):
    """The model's tokenizer has no chat template, so messages cannot be rendered."""


class EngineClosedError(HogwildError):
    """The engine is closed; make a new one."""


class SessionCancelledError(HogwildError):
    """The session was cancelled before it finished."""


class SessionFailedError(HogwildError):
    """The engine failed while it served the session; the cause is chained."""


def require(condition: bool, name: str, wanted: str, got: object, fix: str = "") -> None:
    """Raise `ConfigError` unless ``condition`` holds; for the arguments see `error_text`."""
    if not condition:
        raise ConfigError(error_text(name, wanted, got, fix))


def error_text(name: str, wanted: str, got: object, fix: str = "") -> str:
    """Return an error's text, for example ``top_p: wanted a number in (0, 1], got 2``.

    Args:
        name: the argument.
        wanted: the values it may have.
        got: the value it has.
        fix: what the caller can do, as an imperative.
    """
    return f"{name}: wanted {wanted}, got {got!r}" + (f"; {fix}" if fix else "")
