"""How a model is told of tools and how it writes calls: read from its chat template, or our own
form where the template knows none. Knows text, no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any, Protocol

from hogwild_engine.api.errors import HogwildError

_NAMES = ("toolnameone", "toolnametwo")
_ARGUMENTS = {"argumentname": "argumentvalue"}
_CALL_ID = "callidone"
_QUESTION, _RESULT = "questiontext", "resulttext"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of calls in an answer: ``opening`` name ``between`` arguments ``closing``.

    Args:
        opening: from the start of the answer to the tool's name.
        between: from the name to the arguments, a JSON object.
        closing: what stands behind the arguments.
        joint: between two calls; ``None`` where an answer holds but one.
        native: whether the template itself renders tools, calls and results.
    """

    opening: str
    between: str
    closing: str
    joint: str | None
    native: bool

    def write(self, name: str, arguments: Any) -> str:
        """The text of one call."""
        return self.opening + name + self.between + json.dumps(arguments) + self.closing


OURS = ToolFormat(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", joint="\n", native=False
)

_INTRODUCTION = """\
You can call these tools, each described by a JSON schema:

{tools}

To call one, answer with nothing but its name and arguments, in this form:
<tool_call>
{{"name": "the tool's name", "arguments": {{…}}}}
</tool_call>"""


class Render(Protocol):
    """A chat template: messages and tools to text, the opening of an answer included."""

    def __call__(self, messages: Sequence[Any], tools: Sequence[Any]) -> str: ...


def read_format(render: Render) -> ToolFormat:
    """The form of calls that a chat template uses, ours where that cannot be told."""
    schema = {"type": "object", "properties": {}}
    function = {"name": _NAMES[0], "description": "d", "parameters": schema}
    question = {"role": "user", "content": _QUESTION}
    tools = [{"type": "function", "function": function}]
    try:
        start = render([question], tools)
        once = render([question, *_exchange(_NAMES[:1])], tools)
    except HogwildError:
        return OURS
    arguments = json.dumps(_ARGUMENTS)
    if _NAMES[0] not in start or arguments not in once or _RESULT not in once:
        return OURS
    try:
        twice = render([question, *_exchange(_NAMES)], tools)
    except HogwildError:  # it renders one call at most
        twice = ""
    return _read(start, once, twice) or replace(OURS, native=True)


def _read(start: str, once: str, twice: str) -> ToolFormat | None:
    """The form that shows in a question with a call and its result, and in one with two calls."""
    first, both = _cut(once, start), _cut(twice, start)
    if first is None or _CALL_ID in first[2].partition(_RESULT)[0]:
        return None
    opening, between, tail = first
    middle = both[2].partition(_NAMES[1])[0] if both and _NAMES[1] in both[2] else ""
    if middle.endswith(opening):
        middle = middle.removesuffix(opening)
        pairs = zip(middle, tail, strict=False)
        closing = "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return ToolFormat(opening, between, closing, middle.removeprefix(closing), native=True)
    closing = tail.partition(_RESULT)[0].partition("<|")[0].rstrip()
    return ToolFormat(opening, between, closing, None, native=True) if closing else None


def _exchange(names: Sequence[str]) -> list[dict[str, Any]]:
    """An answer with calls, and the result of the first."""
    calls = [
        {
            "type": "function",
            "id": _CALL_ID,
            "function": {"name": name, "arguments": _ARGUMENTS},
        }
        for name in names
    ]
    result = {"role": "tool", "content": _RESULT, "name": names[0], "tool_call_id": _CALL_ID}
    return [{"role": "assistant", "content": "", "tool_calls": calls}, result]


def _cut(rendered: str, start: str) -> tuple[str, str, str] | None:
    """What stands before the first name, before its arguments and behind them."""
    opening, found, rest = rendered.removeprefix(start).partition(_NAMES[0])
    between, told, tail = rest.partition(json.dumps(_ARGUMENTS))
    if not (rendered.startswith(start) and found and told and opening.strip()):
        return None
    return opening, between, tail


def adapt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages with tools, calls and results in our own form, for templates that know none."""
    told: list[Mapping[str, Any]] = []
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            told.append({"role": "user", "content": "\n".join(map(_result, run))})
        else:
            told += [_with_calls(m) if m.get("tool_calls") else m for m in run]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return introduce(told, _INTRODUCTION.format(tools=listed))
    return told


def introduce(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Put ``text`` into the system message."""
    if messages and messages[0]["role"] == "system":
        head, *rest = messages
        return [{**head, "content": f"{head['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [OURS.write(function["name"], function["arguments"]) for function in functions]
    text = "\n".join([message["content"], *calls]).lstrip("\n")
    return {"role": "assistant", "content": text}
