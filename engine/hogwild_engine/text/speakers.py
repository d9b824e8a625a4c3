"""Names of speakers, written before their text for chat templates that do not render names.

Example: ``Hi.`` with ``"name": "Ann"`` becomes ``Ann: Hi.`` A name that could be read as anything
else (it has a line break, a colon or a quote) is written as a JSON string. A message without text,
such as a tool call, stays without a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hogwild_engine.api.errors import RequestError
from hogwild_engine.text.messages import Message

ROLES = ("user", "assistant", "system")
_PROBE = "probename"
_AMBIGUOUS = frozenset(':"\N{FULLWIDTH COLON}')


def speaker_label(name: str) -> str:
    """Return the text that stands for a name: the name itself, or a JSON string."""
    plain = name.isprintable() and name == name.strip() and _AMBIGUOUS.isdisjoint(name)
    return name if plain else json.dumps(name, ensure_ascii=not name.isprintable())


def with_speakers(messages: Sequence[Message], native: Collection[str] = ()) -> list[Message]:
    """Write the names of speakers into the messages' texts.

    Args:
        messages: in the chat format of transformers.
        native: roles whose names the chat template renders itself; these are left as they are.
    """
    return [
        _named(message) if message["role"] in ROLES and message["role"] not in native else message
        for message in messages
    ]


def roles_with_names(render: Callable[[Sequence[Any], Sequence[Any]], str]) -> frozenset[str]:
    """Return the roles whose names a chat template renders."""
    return frozenset(role for role in ROLES if _renders_name(render, role))


def _renders_name(render: Callable[[Sequence[Any], Sequence[Any]], str], role: str) -> bool:
    named = {"role": role, "name": _PROBE, "content": "."}
    user = {"role": "user", "content": "."}
    around = {"user": [named], "assistant": [user, named, user], "system": [named, user]}
    try:
        return _PROBE in render(around[role], ())
    except RequestError:  # the template refuses the role
        return False


def _named(message: Message) -> Message:
    name, content = message.get("name"), message.get("content")
    if not name or (not content and message.get("tool_calls")):
        return message
    rest = {key: value for key, value in message.items() if key != "name"}
    prefix = f"{speaker_label(str(name))}: "
    if not isinstance(content, list):
        return {**rest, "content": prefix + (content or "")}
    first, *others = content or [{"type": "text", "text": ""}]
    if isinstance(first, dict) and isinstance(first.get("text"), str):
        return {**rest, "content": [{**first, "text": prefix + first["text"]}, *others]}
    return {**rest, "content": [{"type": "text", "text": prefix}, *content]}
