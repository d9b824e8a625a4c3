"""Parallel decoding over one shared KV cache. Knows nothing of LangChain.

Importing this package does not import torch: `Engine` is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hogwild_engine.api.config import EngineConfig, SamplingParams
from hogwild_engine.api.events import Paragraph, Usage
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request, Worker, make_workers

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

__all__ = [
    "Engine",
    "EngineConfig",
    "Grammar",
    "Paragraph",
    "Protocol",
    "Request",
    "SamplingParams",
    "Usage",
    "Worker",
    "make_workers",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from hogwild_engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
