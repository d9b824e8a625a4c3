"""Format of tool calls: that of the model's chat template, or our own if it has none. Knows no
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any, Protocol

from hogwild_engine.api.errors import HogwildError
from hogwild_engine.text.messages import Message, add_to_system

# Placeholders: their places in a rendered conversation show the template's format.
_NAMES = ("toolnameone", "toolnametwo")
_ARGUMENTS = {"argumentname": "argumentvalue"}
_CALL_ID = "callidone"
_QUESTION, _RESULT = "questiontext", "resulttext"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of a call: ``opening``, tool name, ``between``, arguments, ``closing``.

    Example, Qwen's format::

        <tool_call>\\n{"name": "  add  ", "arguments":   {"a": 1}  }\\n</tool_call>
        opening                   name   between         arguments  closing

    Args:
        opening: text before the tool's name.
        between: text between the name and the arguments, a JSON object.
        closing: text after the arguments.
        separator: text between two calls; ``None`` if an answer can hold only one.
        native: the chat template itself renders tools, calls and results.
    """

    opening: str
    between: str
    closing: str
    separator: str | None
    native: bool

    @property
    def tag(self) -> str:
        """The start of a call that never occurs in text, such as ``<tool_call>``; may be empty."""
        return self.opening.partition("{")[0].strip()

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of one call."""
        return (
            self.opening + json_escaped(name) + self.between + json.dumps(arguments) + self.closing
        )


OURS = ToolFormat(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    separator="\n",
    native=False,
)

_INTRODUCTION = """\
You can call these tools, each described by a JSON schema:

{tools}

To call one, answer with nothing but its name and arguments, in this form:
<tool_call>
{{"name": "the tool's name", "arguments": {{…}}}}
</tool_call>"""


def json_escaped(name: str) -> str:
    """Return a name as it stands between the quotes of a JSON string."""
    return json.dumps(name)[1:-1]


class Render(Protocol):
    """A chat template: messages and tools to text, up to where the answer begins."""

    def __call__(self, messages: Sequence[Any], tools: Sequence[Any]) -> str: ...


def read_format(render: Render) -> ToolFormat:
    """Return the format of a chat template; ours if the template renders no tools.

    Renders conversations with one call and with two, whose names and arguments are placeholders.
    """
    schema = {"type": "object", "properties": {}}
    function = {"name": _NAMES[0], "description": "d", "parameters": schema}
    question = {"role": "user", "content": _QUESTION}
    tools = [{"type": "function", "function": function}]
    try:
        start = render([question], tools)
        one_call = render([question, *_exchange(_NAMES[:1])], tools)
    except HogwildError:
        return OURS
    arguments = json.dumps(_ARGUMENTS)
    if _NAMES[0] not in start or arguments not in one_call or _RESULT not in one_call:
        return OURS
    try:
        two_calls = render([question, *_exchange(_NAMES)], tools)
    except HogwildError:  # the template renders one call at most
        two_calls = ""
    return _read(start, one_call, two_calls) or replace(OURS, native=True)


def _read(start: str, one_call: str, two_calls: str) -> ToolFormat | None:
    """Return the format of rendered conversations: the question, with a call, with two calls."""
    one, two = _split(one_call, start), _split(two_calls, start)
    if one is None or _CALL_ID in one[2].partition(_RESULT)[0]:
        return None
    opening, between, tail = one
    # Between two names and arguments: the closing of the first call, a separator, an opening.
    middle = two[2].partition(_NAMES[1])[0] if two and _NAMES[1] in two[2] else ""
    if middle.endswith(opening):
        middle = middle.removesuffix(opening)
        pairs = zip(middle, tail, strict=False)
        closing = "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return ToolFormat(opening, between, closing, middle.removeprefix(closing), native=True)
    closing = tail.partition(_RESULT)[0].partition("<|")[0].rstrip()
    return ToolFormat(opening, between, closing, None, native=True) if closing else None


def _exchange(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return an answer that calls these tools, and the result of the first call."""
    calls = [
        {"type": "function", "id": _CALL_ID, "function": {"name": name, "arguments": _ARGUMENTS}}
        for name in names
    ]
    result = {"role": "tool", "content": _RESULT, "name": names[0], "tool_call_id": _CALL_ID}
    return [{"role": "assistant", "content": "", "tool_calls": calls}, result]


def _split(rendered: str, start: str) -> tuple[str, str, str] | None:
    """Return the text before the first call's name, between name and arguments, and the rest."""
    opening, has_name, rest = rendered.removeprefix(start).partition(_NAMES[0])
    between, has_arguments, tail = rest.partition(json.dumps(_ARGUMENTS))
    if not (rendered.startswith(start) and has_name and has_arguments and opening.strip()):
        return None
    return opening, between, tail


def tools_as_text(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Write tools, calls and results into the messages' text, in our own format."""
    plain: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            plain.append({"role": "user", "content": "\n".join(map(_result_text, run))})
        else:
            plain += [_with_calls_as_text(m) if m.get("tool_calls") else m for m in run]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return add_to_system(plain, _INTRODUCTION.format(tools=listed))
    return plain


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_calls_as_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [OURS.write(function["name"], function["arguments"]) for function in functions]
    text = "\n".join([message["content"] or "", *calls]).lstrip("\n")
    return {"role": "assistant", "content": text}
