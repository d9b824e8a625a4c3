"""The face: a LangChain chat model and a LangGraph node whose workers decode in parallel.

Importing this package loads neither torch nor transformers nor LangChain; its names load what they
need when they are first asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hogwild_agents.chat_model import ChatHogwild
    from hogwild_agents.errors import (
        ConfigError,
        ContentError,
        EngineClosedError,
        HogwildError,
        ModelError,
        ModelNotFoundError,
        ModelRefusedError,
        ModelTimeoutError,
        NoChatTemplateError,
        PromptTooLongError,
        RequestError,
        SessionCancelledError,
        SessionFailedError,
        WorkerNameError,
    )
    from hogwild_agents.grammar import Grammar
    from hogwild_agents.node import HogwildNode
    from hogwild_agents.worker import Worker

    __version__: str

__all__ = [
    "ChatHogwild",
    "ConfigError",
    "ContentError",
    "EngineClosedError",
    "Grammar",
    "HogwildError",
    "HogwildNode",
    "ModelError",
    "ModelNotFoundError",
    "ModelRefusedError",
    "ModelTimeoutError",
    "NoChatTemplateError",
    "PromptTooLongError",
    "RequestError",
    "SessionCancelledError",
    "SessionFailedError",
    "Worker",
    "WorkerNameError",
    "__version__",
]

_HOMES = {
    "ChatHogwild": "hogwild_agents.chat_model",
    "Grammar": "hogwild_agents.grammar",
    "HogwildNode": "hogwild_agents.node",
    "Worker": "hogwild_agents.worker",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any
    if name == "__version__":
        value = _version()
    else:
        value = getattr(importlib.import_module(_HOMES.get(name, "hogwild_agents.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    try:
        return version("hogwild-agents")
    except PackageNotFoundError:
        return "0+unknown"
