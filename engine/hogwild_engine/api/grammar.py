"""Grammars for constrained decoding: JSON schemas, regular expressions, Lark. Plain data;
`text/constraint.py` applies them.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hogwild_engine.api.checks import require_choice
from hogwild_engine.api.errors import ConfigError, error_text, require

GrammarKind = Literal["json", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that generated text is constrained to.

    Example:
        >>> Grammar.choice("yes", "no")
        >>> Grammar.json({"type": "object", "properties": {"age": {"type": "integer"}}})

    Args:
        kind: "json": a JSON schema of draft 4 or later. An object that names properties takes no
            others unless the schema says so. "regex": a regular expression in the syntax of Rust's
            ``regex``. "lark": a grammar in llguidance's dialect of Lark.
        text: the schema, expression or grammar.

    Raises:
        ConfigError: the kind is unknown, or the text is empty or no JSON schema.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        require_choice("grammar", self.kind, get_args(GrammarKind))
        is_text = isinstance(self.text, str) and bool(self.text)
        require(is_text, "grammar", "a text that is not empty", self.text)
        if self.kind == "json":
            require(_is_schema(self.text), "grammar", "a JSON schema", self.text[:200])

    @classmethod
    def json(cls, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of JSON that fits ``schema``, with one space after ``,`` and ``:``."""
        try:
            return cls("json", json.dumps(schema))
        except (TypeError, RecursionError) as error:
            got = reprlib.repr(schema)
            raise ConfigError(error_text("grammar", "a JSON schema", got, str(error))) from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of text that ``pattern`` matches from start to end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return a grammar in llguidance's dialect of Lark; its first rule is ``start``."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, *texts: str) -> Grammar:
        """Return the grammar of exactly one of ``texts``."""
        fix = "pass the texts one by one: choice(*texts)"
        require(all(isinstance(text, str) for text in texts), "grammar", "texts", texts, fix)
        return cls.regex("|".join("".join(map(_escaped, text)) for text in texts))


def _escaped(char: str) -> str:
    """Return an expression for one character, in printable characters."""
    return re.escape(char) if char.isprintable() else f"\\x{{{ord(char):x}}}"


def _is_schema(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
