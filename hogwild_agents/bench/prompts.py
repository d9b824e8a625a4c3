"""Benchmark prompts of a given length: real text, never the same twice."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

CHARS_PER_TOKEN = 8
"""More than English prose has."""
STRIDE = 9973
"""Characters from the start of one window to the next."""


class Prompts:
    """Windows of the Python language reference, a new one per request, so that none is cached.

    Args:
        engine: counts tokens and cuts the text at them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._text = "\n\n".join(topics[name] for name in sorted(topics))
        self._frame = engine.count_tokens([{"role": "user", "content": "."}])

    def tasks(self, tokens: int, count: int, number: int) -> list[str]:
        """Return ``count`` tasks, from window ``number`` on, of about ``tokens`` prompt tokens."""
        return [self._task(tokens - self._frame, place) for place in range(number, number + count)]

    def _task(self, tokens: int, place: int) -> str:
        width = CHARS_PER_TOKEN * tokens
        text = self._text * (1 + width // len(self._text))
        start = place * STRIDE % (len(text) - width)
        ids = self._engine.chat.encode(text[start : start + width])
        return self._engine.chat.decode(ids[:tokens])
