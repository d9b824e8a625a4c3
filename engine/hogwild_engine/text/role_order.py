"""Turns as strict chat templates want them: user and assistant in alternation, no system message
but the first, or none. What is said stays, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def stricter(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The same messages for templates that refuse them as they are, the mildest change first."""
    for keeps_system in (True, False):
        changed = _merged(_without_system(messages, keeps_first=keeps_system))
        if changed != list(messages):
            yield changed


def _without_system(messages: Sequence[Message], *, keeps_first: bool) -> list[Message]:
    """System messages as the user's; leading ones stay, as one, where ``keeps_first``."""
    made: list[Message] = []
    for turn in messages:
        leads = keeps_first and all(before["role"] == "system" for before in made)
        made.append(turn if turn["role"] != "system" or leads else {**turn, "role": "user"})
    return made


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one turn; calls and results of tools stay by themselves."""
    made: list[Message] = []
    for turn in messages:
        if made and _merge(made[-1], turn):
            content = f"{made[-1]['content']}\n\n{turn['content']}"
            made[-1] = {**made[-1], "content": content}
        else:
            made.append(turn)
    return made


def _merge(before: Message, turn: Message) -> bool:
    plain = all(isinstance(t["content"], str) and not t.get("tool_calls") for t in (before, turn))
    return plain and before["role"] == turn["role"] != "tool"
