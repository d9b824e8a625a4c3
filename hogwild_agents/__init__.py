"""The face: a LangChain chat model and a LangGraph node whose workers decode in parallel.

Importing this package loads neither torch nor transformers nor LangChain; its names load what they
need when they are first asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hogwild_agents.langchain.chat_model import ChatHogwild
    from hogwild_agents.langchain.errors import (
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
    from hogwild_agents.langchain.grammar import Grammar
    from hogwild_agents.langchain.worker import Worker
    from hogwild_agents.langgraph.node import HogwildNode

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

_ERRORS = "hogwild_agents.langchain.errors"
_HOMES = {
    "ChatHogwild": "hogwild_agents.langchain.chat_model",
    "Grammar": "hogwild_agents.langchain.grammar",
    "HogwildNode": "hogwild_agents.langgraph.node",
    "Worker": "hogwild_agents.langchain.worker",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any
    if name == "__version__":
        value = _version()
    else:
        value = getattr(
            importlib.import_module(_HOMES.get(name, "hogwild_agents.langchain.errors")), name
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    try:
        return version("hogwild-agents")
    except PackageNotFoundError:
        return "0+unknown"
