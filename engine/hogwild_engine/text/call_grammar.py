"""The grammar of an answer that may or must call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hogwild_engine.api.errors import require
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.text.constraint import json_source
from hogwild_engine.text.tool_format import ToolFormat

MAX_CALLS = 16
_SLASH = "\\/"
_GAP = "[ \\n]{0,9}"
_FENCE = "```(json)?[ \\n]{0,9}|\\*\\*"
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
        starts.append("bare")
        rules += loose.rules()
    return Grammar.lark("\n".join([f"start: {' | '.join(starts)}", _text(form, loose), *rules]))


def _rule(answer: Grammar, budget: int) -> str:
    if answer.kind == "json":
        return f"answer: %json {json_source(json.loads(answer.text), budget)}"
    todo = "leave the tools out, or ask for JSON"
    require(answer.kind == "regex", "grammar", "JSON or a regex beside tools", answer.kind, todo)
    slashed = re.sub(r"\\.|/", lambda found: _SLASH if found[0] == "/" else found[0], answer.text)
    return f"answer: /{slashed}/"


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, always an object's."""
    schema = dict(function.get("parameters") or {})
    if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.update(type="object", properties=schema.get("properties") or {})
    return schema


class LooseForm(NamedTuple):
    """Calls that lack the form's tags, plain, in a code fence or in bold, with any white space, and
    in two pairs of braces, as Qwen2.5-Coder's template shows them: regular expressions in the
    syntax of both Lark and Python.

    Args:
        starts: all to the arguments, an expression a tool.
        closing: what stands behind them, but for the end of a code fence.
    """

    starts: tuple[str, ...]
    closing: str

    @classmethod
    def of(cls, form: ToolFormat, names: Sequence[str]) -> LooseForm | None:
        """The loose form of a form that writes JSON; ``names`` as they stand in JSON."""
        _, found, rest = form.opening.partition("{")
        if not found or not form.closing.startswith("}"):
            return None
        opening, between = _loosened("{" + rest), _loosened(form.between)
        brace = f"(\\{{{_GAP})?"
        starts = (f"({_FENCE})?{brace}{opening}{_escaped(name)}{between}" for name in names)
        return cls(tuple(starts), _GAP + "\\}\\}?")

    def rules(self) -> list[str]:
        """Rules for ``bare``. What leads to the arguments is one lexeme: it must not end while
        free text could go on.
        """
        numbers = range(len(self.starts))
        calls = " | ".join(f"START{number} arguments{number}" for number in numbers)
        return [
            f"bare: ({calls}) CLOSING FENCE?",
            f"CLOSING: /{self.closing}/",
            f"FENCE: /{_GAP}(```|\\*\\*)/",
            *(f"START{number}: /{start}/" for number, start in enumerate(self.starts)),
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
    return text + (rf" & ~/(?s:({'|'.join(loose.starts)}).*)/" if loose else "")


def _escaped(text: str) -> str:
    return "".join("\\n" if c == "\n" else "\\/" if c == "/" else re.escape(c) for c in text)
