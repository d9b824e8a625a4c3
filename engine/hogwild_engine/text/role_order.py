"""Turns as strict chat templates want them: user and assistant in alternation, no system message
but the first, or none. What is said stays, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Turn = Mapping[str, Any]


def stricter(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The same turns for templates that refuse them as they are, the mildest change first."""
    for keeps_system in (True, False):
        changed = _merged(_without_system(turns, keeps_first=keeps_system))
        if changed != list(turns):
            yield changed


def _without_system(turns: Sequence[Turn], *, keeps_first: bool) -> list[Turn]:
    """System messages as the user's; leading ones stay, as one, where ``keeps_first``."""
    made: list[Turn] = []
    for turn in turns:
        leads = keeps_first and all(before["role"] == "system" for before in made)
        made.append(turn if turn["role"] != "system" or leads else {**turn, "role": "user"})
    return made


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbours of one role as one turn; calls and results of tools stay by themselves."""
    made: list[Turn] = []
    for turn in turns:
        if made and _merge(made[-1], turn):
            content = f"{made[-1]['content']}\n\n{turn['content']}"
            made[-1] = {**made[-1], "content": content}
        else:
            made.append(turn)
    return made


def _merge(before: Turn, turn: Turn) -> bool:
    plain = all(isinstance(t["content"], str) and not t.get("tool_calls") for t in (before, turn))
    return plain and before["role"] == turn["role"] != "tool"
