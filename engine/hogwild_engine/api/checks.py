"""Checks of single settings. Each raises `ConfigError` that names the setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hogwild_engine.api.errors import require


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


def _require(valid: bool, name: str, value: Any, wanted: str, *, optional: bool) -> None:
    wanted += ", or None" if optional else ""
    require(valid or (optional and value is None), name, wanted, value)
