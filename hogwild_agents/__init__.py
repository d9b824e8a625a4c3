"""A LangChain chat model and a LangGraph node whose workers decode in parallel over one KV cache.

Importing this package loads neither torch nor transformers nor LangChain: each name is imported on
first access.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hogwild_agents.langchain.chat_model import ChatHogwild
    from hogwild_agents.langchain.errors import (
        AnswerMismatchError,
        ContentError,
        ModelTimeoutError,
    )
    from hogwild_agents.langgraph.node import HogwildNode
    from hogwild_engine.api.errors import (
        ConfigError,
        EngineClosedError,
        HogwildError,
        ModelError,
        ModelNotFoundError,
        ModelRefusedError,
        NoChatTemplateError,
        PromptTooLongError,
        RequestError,
        SessionCancelledError,
        SessionFailedError,
        WorkerNameError,
    )
    from hogwild_engine.api.grammar import Grammar
    from hogwild_engine.api.protocol import Protocol
    from hogwild_engine.api.request import Worker

    __version__: str

__all__ = [
    "AnswerMismatchError",
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
    "Protocol",
    "RequestError",
    "SessionCancelledError",
    "SessionFailedError",
    "Worker",
    "WorkerNameError",
    "__version__",
]

_ERRORS = "hogwild_engine.api.errors"
_MODULES = {
    "ChatHogwild": "hogwild_agents.langchain.chat_model",
    "AnswerMismatchError": "hogwild_agents.langchain.errors",
    "ContentError": "hogwild_agents.langchain.errors",
    "Grammar": "hogwild_engine.api.grammar",
    "HogwildNode": "hogwild_agents.langgraph.node",
    "ModelTimeoutError": "hogwild_agents.langchain.errors",
    "Protocol": "hogwild_engine.api.protocol",
    "Worker": "hogwild_engine.api.request",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any
    if name == "__version__":
        value = _version()
    else:
        value = getattr(importlib.import_module(_MODULES.get(name, _ERRORS)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    try:
        return version("hogwild-agents")
    except PackageNotFoundError:
        return "0+unknown"
