"""Grammar of an answer that may, or must, call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hogwild_engine.api.errors import RequestError, error_text, require
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.text.schema import GrammarSchema, grammar_schema
from hogwild_engine.text.tool_format import ToolFormat, json_escaped

MAX_CALLS = 16
# Regular expressions in the syntax of both Lark and Python, in which a slash is escaped.
_SLASH = "\\/"
_GAP = "[ \\n]{0,9}"
_FENCE = "```(json)?[ \\n]{0,9}|\\*\\*"
_JSON_PUNCTUATION = ("\\{", ":", ",")


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    form: ToolFormat,
    to_lark: Callable[[str], str],
    *,
    parallel: bool,
    answer: Grammar | None = None,
) -> Grammar:
    """Return the grammar of an answer.

    With "auto", the first tokens decide: text stays free, and a call must fit its tool's schema.
    Models sometimes write a call without the tags of their format; with "auto" that is a call too.
    Example for one tool "add" in our own format::

        start: TEXT | calls | bare
        calls: "<tool_call>\\n{\\"name\\": \\"" call "}\\n</tool_call>"
        call: call0
        call0: "add\\", \\"arguments\\": " arguments0
        arguments0: %json {"type": "object", …}

    Args:
        tools: the tools in OpenAI's format.
        choice: "auto", "any", "none", or the name of a tool.
        form: the format of calls.
        to_lark: makes a Lark expression of literal text; see `ChatTemplate.to_lark`.
        parallel: allow several calls.
        answer: constrains an answer without calls.
    """
    if choice == "none":
        return answer or Grammar.lark("\n".join(["start: TEXT", _text_rule(form)]))
    functions = callable_functions(tools, choice)
    if not functions:
        return answer or Grammar.lark("\n".join(["start: TEXT", _text_rule(form)]))
    rules = [f"call: {' | '.join(f'call{number}' for number in range(len(functions)))}"]
    for number, function in enumerate(functions):
        name = json_escaped(function["name"])
        rules += [
            f"call{number}: {to_lark(name + form.between)} arguments{number}",
            f"arguments{number}: %json {arguments_schema(function).source}",
        ]
    calls = f"{to_lark(form.opening)} call {to_lark(form.closing)}"
    if parallel and form.separator is not None:
        more = f"{to_lark(form.separator)} {calls}" if form.separator else calls
        calls += f" ({more}){{0,{MAX_CALLS - 1}}}"
    rules.append(f"calls: {calls}")
    if choice != "auto":
        return Grammar.lark("\n".join(["start: calls", *rules]))
    if answer is not None:
        return Grammar.lark("\n".join(["start: calls | answer", _rule(answer), *rules]))
    # Text may come before a call only if the call starts with a special token, written <[id]>:
    # a lexer cannot tell where free text would end otherwise.
    starts = ["TEXT", "TEXT? calls" if to_lark(form.opening).startswith("<[") else "calls"]
    untagged = UntaggedCalls.of(form, [function["name"] for function in functions])
    if untagged:
        starts.append("bare")
        rules += untagged.rules()
    return Grammar.lark(
        "\n".join([f"start: {' | '.join(starts)}", _text_rule(form, untagged), *rules])
    )


def callable_functions(tools: Sequence[Mapping[str, Any]], choice: str) -> list[Mapping[str, Any]]:
    """Return the functions that may be called. One that no arguments fit is left out.

    Args:
        tools: the tools in OpenAI's format.
        choice: see `call_grammar`.

    Raises:
        RequestError: a call is forced, and no arguments fit.
    """
    functions = [tool["function"] for tool in tools]
    if choice not in ("auto", "any"):
        functions = [function for function in functions if function["name"] == choice]
    usable, refusals = [], []
    for function in functions:
        try:
            arguments_schema(function)
        except RequestError as error:
            refusals.append(error)
        else:
            usable.append(function)
    if refusals and not usable and choice != "auto":
        raise refusals[0]
    return usable


def arguments_schema(function: Mapping[str, Any]) -> GrammarSchema:
    """Return the schema of a tool's arguments, which is always that of an object.

    Raises:
        RequestError: the schema is invalid, or nothing fits it.
    """
    schema = dict(function.get("parameters") or {})
    if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.update(type="object", properties=schema.get("properties") or {})
    try:
        return grammar_schema(json.dumps(schema))
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        wanted = f"a schema for the arguments of {function['name']!r}"
        raise RequestError(error_text("tools", wanted, function, str(error))) from error


def _rule(answer: Grammar) -> str:
    if answer.kind == "json":
        return f"answer: %json {grammar_schema(answer.text).source}"
    fix = "leave the tools out, or ask for JSON"
    require(answer.kind == "regex", "grammar", "JSON or a regex beside tools", answer.kind, fix)
    # A regular expression of Lark stands on one line between two slashes.
    pattern = re.sub(r"\\.|[/\r\n]", _on_one_line, answer.text, flags=re.DOTALL)
    return f"answer: /{pattern}/"


def _on_one_line(found: re.Match[str]) -> str:
    return {"/": _SLASH, "\r": "\\r", "\n": "\\n"}.get(found[0][-1], found[0])


class UntaggedCalls(NamedTuple):
    """Calls without the tags of their format: plain JSON, in a code fence or in bold, with any
    white space, and in single or double braces, as Qwen2.5-Coder's template shows them.

    Args:
        starts: a regular expression for each tool name, up to the call's arguments.
        closing: a regular expression for what follows the arguments, without a closing fence.
    """

    starts: dict[str, str]
    closing: str

    @classmethod
    def of(cls, form: ToolFormat, names: Iterable[str]) -> UntaggedCalls | None:
        """Return the untagged calls of a format; ``None`` unless its calls are JSON."""
        _, brace, rest = form.opening.partition("{")
        if not brace or not form.closing.startswith("}"):
            return None
        prefix = f"({_FENCE})?(\\{{{_GAP})?" + _with_gaps("{" + rest)
        between = _with_gaps(form.between)
        starts = {name: prefix + _escaped(json_escaped(name)) + between for name in names}
        return cls(starts, _GAP + "\\}\\}?")

    def rules(self) -> list[str]:
        """Return Lark rules for ``bare``.

        All text before the arguments is one terminal, START: a lexer that took it in pieces would
        have to decide between a piece and free text too early.
        """
        numbered = list(enumerate(self.starts.values()))
        calls = " | ".join(f"START{number} arguments{number}" for number, _ in numbered)
        return [
            f"bare: ({calls}) CLOSING FENCE?",
            f"CLOSING: /{self.closing}/",
            f"FENCE: /{_GAP}(```|\\*\\*)/",
            *(f"START{number}: /{start}/" for number, start in numbered),
        ]


def _with_gaps(text: str) -> str:
    """Return an expression of JSON text with any white space between its tokens."""
    parts = (_escaped(char) for char in text if not char.isspace())
    return "".join(part + _GAP if part in _JSON_PUNCTUATION else part for part in parts)


def _text_rule(form: ToolFormat, untagged: UntaggedCalls | None = None) -> str:
    """Return the terminal TEXT: text that is no call and does not contain a call's tag."""
    tag = form.tag
    text = "TEXT: /(?s:.+)/"
    text += rf" & ~/(?s:.*{_escaped(tag)}.*)/" if tag else rf" & ~/(?s:{_escaped(form.opening)}.*)/"
    return text + (rf" & ~/(?s:({'|'.join(untagged.starts.values())}).*)/" if untagged else "")


def _escaped(text: str) -> str:
    return "".join("\\n" if c == "\n" else _SLASH if c == "/" else re.escape(c) for c in text)
