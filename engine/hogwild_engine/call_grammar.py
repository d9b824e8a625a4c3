"""The grammar of an answer that may or must call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hogwild_engine.constraint import json_source
from hogwild_engine.errors import require
from hogwild_engine.grammar import Grammar
from hogwild_engine.tools import ToolFormat

MAX_CALLS = 16
_SLASH = "\\/"
_GAP = "[ \\n]{0,9}"
_FENCE = "```(json)?[ \\n]{0,9}"
_SPACED = ("\\{", ":", ",")

Spell = Callable[[str], str]


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    form: ToolFormat,
    spell: Spell,
    budget: int,
    *,
    parallel: bool,
    answer: Grammar | None = None,
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
        answer: what an answer without calls must look like.
    """
    if choice == "none":
        return answer or Grammar.lark("\n".join(["start: TEXT", _text(form)]))
    functions = [tool["function"] for tool in tools]
    if choice not in ("auto", "any"):
        functions = [function for function in functions if function["name"] == choice]
    named = {function["name"]: json.dumps(function["name"])[1:-1] for function in functions}
    rules = [f"call: {' | '.join(f'call{number}' for number in range(len(named)))}"]
    for number, (function, name) in enumerate(zip(functions, named.values(), strict=True)):
        rules += [
            f"call{number}: {spell(name + form.between)} arguments{number}",
            f"arguments{number}: %json {json_source(arguments_of(function), budget)}",
        ]
    calls = f"{spell(form.opening)} call {spell(form.closing)}"
    if parallel and form.joint is not None:
        more = f"{spell(form.joint)} {calls}" if form.joint else calls
        calls += f" ({more}){{0,{MAX_CALLS - 1}}}"
    rules.append(f"calls: {calls}")
    if choice != "auto":
        return Grammar.lark("\n".join(["start: calls", *rules]))
    if answer is not None:
        return Grammar.lark("\n".join(["start: calls | answer", _rule(answer, budget), *rules]))
    begins_special = spell(form.opening).startswith("<[")
    starts = ["TEXT", "TEXT? calls" if begins_special else "calls"]
    if loose := LooseForm.of(form, list(named.values())):
        starts.append("bare | fenced")
        rules += loose.rules(list(named.values()))
    return Grammar.lark("\n".join([f"start: {' | '.join(starts)}", _text(form, loose), *rules]))


def _rule(answer: Grammar, budget: int) -> str:
    if answer.kind == "json":
        return f"answer: %json {json_source(json.loads(answer.text), budget)}"
    todo = "leave the tools out, or ask for JSON"
    require(answer.kind == "regex", "grammar", "JSON or a regex beside tools", answer.kind, todo)
    return f"answer: /{answer.text.replace('/', _SLASH)}/"


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, always an object's."""
    schema = dict(function.get("parameters") or {})
    if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.update(type="object", properties=schema.get("properties") or {})
    return schema


class LooseForm(NamedTuple):
    """Calls that lack the form's tags, in a code fence or not, with any white space: regular
    expressions in the syntax of both Lark and Python.

    Args:
        opening: to the name.
        between: from the name to the arguments.
        closing: behind them.
        start: all to the arguments, for any of the tools; its last group is the name.
    """

    opening: str
    between: str
    closing: str
    start: str

    @classmethod
    def of(cls, form: ToolFormat, names: Sequence[str]) -> LooseForm | None:
        """The loose form of a form that writes JSON."""
        _, found, rest = form.opening.partition("{")
        if not found or not form.closing.startswith("}"):
            return None
        opening, between = _loosened("{" + rest), _loosened(form.between)
        named = "|".join(map(_escaped, names))
        start = f"({_FENCE})?{opening}({named}){between}"
        return cls(opening, between, _GAP + "\\}", start)

    def rules(self, names: Sequence[str]) -> list[str]:
        """Rules ``bare`` and ``fenced``."""
        calls = (f'"{name}" BETWEEN arguments{number}' for number, name in enumerate(names))
        return [
            f"bare: OPENING ({' | '.join(calls)}) CLOSING",
            f"fenced: /{_FENCE}/ bare /{_GAP}```/",
            f"OPENING: /{self.opening}/",
            f"BETWEEN: /{self.between}/",
            f"CLOSING: /{self.closing}/",
        ]


def _loosened(text: str) -> str:
    """JSON's text with any white space between its tokens."""
    parts = (_escaped(char) for char in text if not char.isspace())
    return "".join(part + _GAP if part in _SPACED else part for part in parts)


def tag_of(form: ToolFormat) -> str:
    """What opens calls and never stands in text; may be empty."""
    return form.opening.partition("{")[0].strip()


def _text(form: ToolFormat, loose: LooseForm | None = None) -> str:
    """A terminal: text that is no call and holds no opening of one."""
    tag = tag_of(form)
    text = "TEXT: /(?s:.+)/"
    text += rf" & ~/(?s:.*{_escaped(tag)}.*)/" if tag else rf" & ~/(?s:{_escaped(form.opening)}.*)/"
    return text + (rf" & ~/(?s:{loose.start}.*)/" if loose else "")


def _escaped(text: str) -> str:
    return "".join("\\n" if c == "\n" else "\\/" if c == "/" else re.escape(c) for c in text)
