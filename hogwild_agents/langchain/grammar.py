"""`Grammar` as users of the face build it: the engine's, with the face's errors."""

from __future__ import annotations

from dataclasses import dataclass

from hogwild_agents.langchain.errors import translated
from hogwild_engine.api import grammar


@dataclass(frozen=True, slots=True)
class Grammar(grammar.Grammar):
    """A language that text is bound to: ``Grammar.json(schema)``, ``Grammar.regex(pattern)``,
    ``Grammar.choice("yes", "no")`` or ``Grammar.lark(text)``.

    Args:
        kind: "json", "regex" or "lark"; see `hogwild_engine.api.grammar.Grammar`.
        text: the schema, expression or grammar.

    Raises:
        ConfigError: the kind is unknown, or the text is empty or no JSON.
    """

    def __post_init__(self) -> None:
        with translated():
            grammar.Grammar.__post_init__(self)
