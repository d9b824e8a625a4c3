"""What an answer may look like: a JSON schema, a regular expression or a Lark grammar. Plain data;
`constraint.py` holds a writer to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hogwild_engine.api.errors import require

GrammarKind = Literal["json", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that text is bound to.

    Args:
        kind: "json": ``text`` is a JSON schema; objects are closed unless the schema says otherwise
            and lengths are bounded by the token budget. "regex": a regular expression in the syntax
            of Rust's ``regex``. "lark": a grammar in llguidance's dialect of Lark.
        text: the schema, expression or grammar.

    Raises:
        ConfigError: the kind is unknown, or the text is empty or no JSON.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        known = self.kind in ("json", "regex", "lark")
        require(known, "grammar", "the kind 'json', 'regex' or 'lark'", self.kind)
        plain = isinstance(self.text, str) and bool(self.text)
        require(plain, "grammar", "a text that is not empty", self.text)
        if self.kind == "json":
            require(_is_schema(self.text), "grammar", "a JSON schema", self.text)

    @classmethod
    def json(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON by a schema, without white space but one space behind ``,`` and ``:``."""
        try:
            return cls("json", json.dumps(schema))
        except (TypeError, RecursionError):
            return cls("json", repr(schema)[:200])  # which is refused

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches ``pattern`` from its start to its end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text that llguidance's dialect of Lark derives from ``start``."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, *texts: str) -> Grammar:
        """One of these texts, at least one."""
        return cls.regex("|".join(map(re.escape, texts)))


def _is_schema(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
