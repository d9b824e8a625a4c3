"""Checks of single settings, each raising `ConfigError` that names the setting, and of messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hogwild_engine.api.errors import RequestError, error_text, require


def require_int(
    name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    """Require an integer from ``low`` to ``high``, or ``None`` if ``optional``."""
    wanted = f"a whole number of at least {low}" + (f" and at most {high}" if high else "")
    valid = type(value) is int and value >= low and (high is None or value <= high)
    _require(valid, name, value, wanted, optional=optional)


def require_number(
    name: str,
    value: Any,
    low: float,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    optional: bool = False,
) -> None:
    """Require a finite number in ``[low, high]``, or in ``(low, high]`` if ``open_low``."""
    wanted = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Not math.isfinite, which overflows for huge integers.
    finite = is_number and abs(value) < sys.float_info.max
    valid = finite and low <= value <= high and not (open_low and value == low)
    _require(valid, name, value, wanted, optional=optional)


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Require one of ``choices``."""
    require(value in choices, name, f"one of {choices}", value)


def check_messages(messages: Sequence[Any]) -> None:
    """Check that messages have what every chat template reads. Errors quote no content.

    Raises:
        RequestError: there is none, or one has no role, no content, or content of another type.
    """
    if not messages:
        raise RequestError(error_text("messages", "at least one message", messages))
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise RequestError(error_text(name, "a dict with role and content", type(message)))
        if not isinstance(message.get("role"), str):
            wanted = "a role such as 'user' or 'assistant'"
            raise RequestError(error_text(name, wanted, sorted(map(str, message))))
        content = message.get("content")
        may_lack = content is None and bool(message.get("tool_calls"))
        if not (may_lack or isinstance(content, str | list | tuple)):
            raise RequestError(
                error_text(name, "content: a text or a list of parts", type(content))
            )


def _require(valid: bool, name: str, value: Any, wanted: str, *, optional: bool) -> None:
    wanted += ", or None" if optional else ""
    require(valid or (optional and value is None), name, wanted, value)
