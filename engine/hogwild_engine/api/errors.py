"""Every error that the engine raises for a caller to handle.

    HogwildError
    ├── ConfigError (ValueError)          a setting is out of range or unknown
    ├── RequestError (ValueError)         a request cannot be served as it stands
    │   ├── WorkerNameError               a worker's name is empty, taken or unusable in a header
    │   └── PromptTooLongError            the prompt does not fit the context or the page pool
    ├── ModelError                        the model cannot be used
    │   ├── ModelNotFoundError (LookupError)
    │   ├── ModelRefusedError             a check at load failed; ``check`` names it
    │   └── NoChatTemplateError
    ├── EngineClosedError                 the engine was closed
    ├── SessionCancelledError             the session was cancelled by its owner
    └── SessionFailedError                the engine failed while it served the session

Each message names the argument, what was wanted, what came and what to do.
"""


class HogwildError(Exception):
    """Base of all errors of hogwild-agents."""


class ConfigError(HogwildError, ValueError):
    """A setting is out of range or unknown."""


class RequestError(HogwildError, ValueError):
    """A request cannot be served as it stands."""


class WorkerNameError(RequestError):
    """A worker's name is empty, used twice, or would break the headers that carry it."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer in the model's context or in the page pool."""


class ModelError(HogwildError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError, LookupError):
    """No model answers to the name that was given."""


class ModelRefusedError(ModelError):
    """The model failed a check at load, so its output over a shared cache would be wrong.

    Args:
        check: the name of the check that failed.
        detail: what was measured and what was wanted.
    """

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"model refused by the {check!r} check: {detail}")
        self.check = check
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.check, self.detail)


class NoChatTemplateError(ModelError):
    """The model's tokenizer has no chat template, so messages cannot be rendered."""


class EngineClosedError(HogwildError):
    """The engine was closed; make a new one."""


class SessionCancelledError(HogwildError):
    """The session was cancelled before it finished."""


class SessionFailedError(HogwildError):
    """The engine failed while it served the session; the cause is chained."""


def require(holds: bool, name: str, wanted: str, came: object, todo: str = "") -> None:
    """Raise `ConfigError` naming the setting unless ``holds``."""
    if not holds:
        raise ConfigError(complaint(name, wanted, came, todo))


def complaint(name: str, wanted: str, came: object, todo: str = "") -> str:
    """One sentence: the argument, what was wanted, what came, and what to do."""
    return f"{name}: wanted {wanted}, got {came!r}" + (f"; {todo}" if todo else "")
