"""Chat messages: adding text to the system message or to a user message; tool calls as objects.

The content of a message is a string, or a list of parts such as ``{"type": "text", "text": …}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def plain_calls(message: Message) -> Message:
    """Return the message with its tool calls as templates expect them.

    Arguments that are JSON text, as OpenAI's API sends them, become the object: templates would
    quote the text once more, or fail. An empty list of calls is left out: some templates refuse it.
    """
    if "tool_calls" not in message:
        return message
    calls = [_plain_call(call) for call in message["tool_calls"] or ()]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "tool_calls": calls} if calls else rest


def _plain_call(call: Message) -> Message:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return call
    whole = isinstance(parsed, dict)
    return {**call, "function": {**function, "arguments": parsed}} if whole else call


def add_to_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Add ``text`` to the end of the system message, or as one before all others."""
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    head, *rest = messages
    return [{**head, "content": join_contents(head["content"], text)}, *rest]


def add_to_user(messages: Sequence[Message], text: str, *, first: bool) -> list[Message]:
    """Add ``text`` before the first user message's content, or after the last one's."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return [*messages, {"role": "user", "content": text}]
    place = places[0] if first else places[-1]
    content = messages[place]["content"]
    joined = join_contents(text, content) if first else join_contents(content, text)
    return [*messages[:place], {**messages[place], "content": joined}, *messages[place + 1 :]]


def join_contents(before: Any, after: Any) -> Any:
    """Join two contents with a blank line between them."""
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        for content in (before, after)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
