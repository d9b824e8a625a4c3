"""Order of tool results: after their calls, in the order of the calls.

Most chat templates render no ids, so a reader takes the first result for the first call's. A result
that this order cannot place (a call of the same message has none, or two) is headed by its call::

    add({"a": 1}):
    2
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hogwild_engine.text.messages import Message, join_contents


@dataclass
class _Call:
    """A call and its results."""

    call_id: str | None
    name: str
    arguments: Any
    results: list[Message] = field(default_factory=list)

    @property
    def text(self) -> str:
        arguments = self.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return f"{self.name}({arguments}):"


def order_results(messages: Sequence[Message]) -> list[Message]:
    """Put each tool result after the message that called, in the order of the calls.

    A result belongs to the latest call before it with its id that has no result yet; without an id,
    to the latest such call of its name. A result without a call stays in its place, headed by its
    name or id. No content is dropped.
    """
    ordered: list[Message | list[_Call]] = []
    for message in messages:
        if message["role"] != "tool":
            ordered.append(message)
            if message.get("tool_calls"):
                ordered.append([_to_call(call) for call in message["tool_calls"]])
        elif (call := _call_of(message, ordered)) is not None:
            call.results.append(message)
        else:
            ordered.append(_headed(message, _origin(message)))
    return [message for item in ordered for message in _results(item)]


def _results(item: Message | list[_Call]) -> Iterable[Message]:
    if not isinstance(item, list):
        return [item]
    if all(len(call.results) == 1 for call in item):
        return [result for call in item for result in call.results]
    return [_headed(result, call.text) for call in item for result in call.results]


def _to_call(call: Message) -> _Call:
    function = call.get("function") or call
    return _Call(call.get("id"), str(function.get("name")), function.get("arguments"))


def _call_of(result: Message, ordered: Sequence[Message | list[_Call]]) -> _Call | None:
    """Return the call that a result answers: an open one, else one of that id with a result."""
    call_id, name = result.get("tool_call_id"), result.get("name")
    rounds = [item for item in reversed(ordered) if isinstance(item, list)]
    if call_id:
        known = [[call for call in calls if call.call_id == call_id] for calls in rounds]
    else:
        known = [[call for call in calls if not name or call.name == name] for calls in rounds]
    open_calls = [call for calls in known for call in calls if not call.results]
    answered = [call for calls in known for call in calls] if call_id else []
    return next(iter((*open_calls, *answered)), None)


def _origin(result: Message) -> str:
    origin = result.get("name") or result.get("tool_call_id")
    return f"{origin}:" if origin else ""


def _headed(result: Message, head: str) -> Message:
    content = result.get("content")
    if not head:
        return result
    if isinstance(content, str) or content is None:
        return {**result, "content": f"{head}\n{content or ''}"}
    return {**result, "content": join_contents(head, content)}
