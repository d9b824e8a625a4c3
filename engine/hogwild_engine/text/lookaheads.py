"""Lookaheads at the start of a pattern, which llguidance lacks, as patterns of their own.

Example: ``^(?=.*[A-Z])(?=.*[0-9]).{8,}$`` is ``^.*[A-Z]`` and ``^.*[0-9]`` and ``^.{8,}$``.
"""

from __future__ import annotations

# How pydantic says that a decimal number has a digit.
_HAS_DIGIT = "(?!^[-+.]*$)"


def without_lookaheads(pattern: str) -> tuple[list[str], bool]:
    """Return patterns that match all texts that ``pattern`` matches, and whether only these.

    A negative lookahead cannot be written as a pattern: it is left out.
    """
    if not pattern.startswith("^"):
        return [pattern], True
    rest, found, is_exact = pattern[1:], [], True
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        if end is None:
            return [pattern], True
        group, rest = rest[: end + 1], rest[end + 1 :]
        if group == _HAS_DIGIT:
            found.append("[0-9]")
        elif group.startswith("(?="):
            found.append(f"^(?:{group[3:-1]})")
        else:
            is_exact = False
    return ([*found, "^" + rest], is_exact) if _is_one_branch(rest) else ([pattern], True)


def _closing(pattern: str) -> int | None:
    """Return where the group that starts a pattern ends."""
    depth, place, in_class = 0, 0, False
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            place += pattern[place + 1 : place + 2] in ("]", "^")
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return place
        place += 1
    return None


def _is_one_branch(pattern: str) -> bool:
    """Return whether a pattern has no ``|`` outside of groups, where a lookahead would not bind."""
    end = _closing(f"({pattern})")
    return end == len(pattern) + 1 and not _has_bare_bar(pattern)


def _has_bare_bar(pattern: str) -> bool:
    rest = pattern
    while rest:
        if rest[0] == "|":
            return True
        step = 2 if rest[0] == "\\" else 1
        if rest[0] in "([":
            end = _closing(rest) if rest[0] == "(" else rest.find("]", 2)
            step = len(rest) if end is None or end < 0 else end + 1
        rest = rest[step:]
    return False
