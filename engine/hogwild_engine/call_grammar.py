"""The grammar of an answer that may or must call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hogwild_engine.constraint import json_source
from hogwild_engine.grammar import Grammar
from hogwild_engine.tools import ToolFormat

MAX_CALLS = 16

Spell = Callable[[str], str]


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    form: ToolFormat,
    spell: Spell,
    budget: int,
    *,
    parallel: bool,
) -> Grammar:
    """What the answer may look like.

    With "auto" the answer's first tokens decide: text goes on freely, a call is held to its tool's
    schema. Models that were trained on one form of calls use others now and then; with "auto" these
    count as calls too.

    Args:
        tools: in OpenAI's form.
        choice: "auto", "any", "none", or the name of a tool.
        form: how calls are written.
        spell: a text of structure as an expression of Lark.
        budget: tokens that the answer may take.
        parallel: whether several calls may stand in one answer.
    """
    if choice == "none":
        return Grammar.lark("\n".join(["start: TEXT", _text(form)]))
    functions = [tool["function"] for tool in tools]
    if choice not in ("auto", "any"):
        functions = [function for function in functions if function["name"] == choice]
    rules = [f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
    for number, function in enumerate(functions):
        head = spell(json.dumps(function["name"])[1:-1] + form.between)
        schema = json_source(arguments_of(function), budget)
        rules += [f"call{number}: {head} arguments{number}", f"arguments{number}: %json {schema}"]
    calls = f"{spell(form.opening)} call {spell(form.closing)}"
    if parallel and form.joint is not None:
        more = f"{spell(form.joint)} {calls}" if form.joint else calls
        calls += f" ({more}){{0,{MAX_CALLS - 1}}}"
    rules.append(f"calls: {calls}")
    if choice != "auto":
        return Grammar.lark("\n".join(["start: calls", *rules]))
    begins_special = spell(form.opening).startswith("<[")
    starts = ["TEXT", "TEXT? calls" if begins_special else "calls"]
    for opening, closing in bare_forms(form):
        starts.append(f"{spell(opening)} call {spell(closing)}")
    return Grammar.lark("\n".join([f"start: {' | '.join(starts)}", _text(form), *rules]))


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, always an object's."""
    schema = dict(function.get("parameters") or {})
    if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.update(type="object", properties=schema.get("properties") or {})
    return schema


def bare_forms(form: ToolFormat) -> list[tuple[str, str]]:
    """Opening and closing of calls that lack the form's tags: as they are, and in a code fence."""
    tag, found, rest = form.opening.partition("{")
    if not found or not form.closing.startswith("}"):
        return []
    fenced = (f"```json\n{{{rest}", "}\n```")
    return [fenced, *([(f"{{{rest}", "}")] if tag.strip() else [])]


def tag_of(form: ToolFormat) -> str:
    """What opens calls and never stands in text; may be empty."""
    return form.opening.partition("{")[0].strip()


def _text(form: ToolFormat) -> str:
    """A terminal: text that no part of a call opens."""
    starts = [form.opening, *(opening for opening, _ in bare_forms(form))]
    # A quote less: the text must not begin to look like a call either.
    alternatives = "|".join(_escaped(start.rstrip(' ":')) for start in starts)
    text = rf"TEXT: /(?s:.+)/ & ~/(?s:({alternatives}).*)/"
    if tag := tag_of(form):
        text += rf" & ~/(?s:.*{_escaped(tag)}.*)/"
    return text


def _escaped(text: str) -> str:
    return "".join("\\n" if c == "\n" else "\\/" if c == "/" else re.escape(c) for c in text)
