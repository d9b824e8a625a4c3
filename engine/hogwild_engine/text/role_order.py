"""Order of roles: rewrites messages for chat templates that refuse some orders.

Strict templates want user and assistant in alternation, and system messages only at the start or
not at all. No content is dropped or moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hogwild_engine.text.messages import Message, join_contents


def alternating_roles(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield versions of ``messages`` that stricter templates accept, the smallest change first.

    Example: system, user, user, system becomes system, user; then, for templates without system
    messages, one user message.
    """
    for keeps_system in (True, False):
        changed = _merge_neighbours(_system_as_user(messages, keeps_first=keeps_system))
        if changed != list(messages):
            yield changed


def _system_as_user(messages: Sequence[Message], *, keeps_first: bool) -> list[Message]:
    """Change system messages to user messages; ``keeps_first`` keeps those at the start."""
    changed: list[Message] = []
    for message in messages:
        leads = keeps_first and all(before["role"] == "system" for before in changed)
        is_kept = message["role"] != "system" or leads
        changed.append(message if is_kept else {**message, "role": "user"})
    return changed


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and _can_merge(merged[-1], message):
            content = join_contents(merged[-1]["content"], message["content"])
            merged[-1] = {**merged[-1], "content": content}
        else:
            merged.append(message)
    return merged


def _can_merge(before: Message, after: Message) -> bool:
    """Tool calls and tool results stay messages of their own."""
    plain = all(isinstance(m["content"], str) and not m.get("tool_calls") for m in (before, after))
    return plain and before["role"] == after["role"] != "tool"
