"""Holds writers to grammars: one llguidance matcher a writer, masks for all rows of a pass at once.

llguidance is imported with the first grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hogwild_engine.api.errors import RequestError, complaint
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.text.schema import bounded

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# As transformers' templates print JSON, so that forced text is what the model has seen.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """The state of one text under a grammar.

    Args:
        matcher: stands where the text ends.
        compiler: knows the tokenizer, and fills masks.
    """

    def __init__(self, matcher: LLMatcher, compiler: GrammarCompiler) -> None:
        self.matcher = matcher
        self.compiler = compiler

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self.matcher.is_stopped()

    def take(self, token: int) -> None:
        """Move on by a token.

        Raises:
            RuntimeError: the grammar forbids it, or has become too complex.
        """
        if not self.matcher.consume_token(token):
            raise RuntimeError(self.matcher.get_error().partition("\n")[0])

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        self.matcher.rollback(count)

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model says."""
        tokens = self.matcher.compute_ff_tokens()
        # A vocabulary that lacks some bytes cannot spell all that is forced.
        return tokens[: self.matcher.validate_tokens(tokens)]


class GrammarCompiler:
    """Makes constraints for one tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer.
        ends: ids that end a turn, allowed where the text is complete.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(ends)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, eos_token=self._ends or None)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(num_threads=1)

    def is_special(self, token: int) -> bool:
        """Whether grammars name this token by its id, never by its text."""
        return self._vocabulary.is_special_token(token)

    def compile(self, grammar: Grammar, budget: int) -> Constraint:
        """The constraint of a text that begins.

        Args:
            grammar: the language.
            budget: tokens that the text may take.

        Raises:
            RequestError: the grammar is not understood.
        """
        from llguidance import LLMatcher

        wanted, text = "a grammar that llguidance understands", grammar.text[:200]
        try:
            matcher = LLMatcher(self._vocabulary, _source(grammar, budget), log_level=0)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(complaint("grammar", wanted, text, str(error))) from error
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            raise RequestError(complaint("grammar", wanted, text, reason))
        return Constraint(matcher, self)

    def allowed(self, constraints: Sequence[Constraint], vocabulary: int) -> torch.Tensor:
        """Which tokens may come next, a row a constraint. Boolean ``[R, V]``."""
        from llguidance.numpy import fill_next_token_bitmask_par

        known = self._vocabulary.vocab_size
        words = torch.zeros(len(constraints), (known + 31) // 32, dtype=torch.int32)
        matchers = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, words.numpy())
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        # Models round the size of their vocabulary up.
        allowed = torch.zeros(len(constraints), vocabulary, dtype=torch.bool)
        allowed[:, :known] = bits.flatten(1)[:, : min(known, vocabulary)].bool()
        return allowed


def _source(grammar: Grammar, budget: int) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(json_source(json.loads(grammar.text), budget))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def json_source(schema: dict[str, Any], budget: int) -> str:
    """A schema as llguidance reads it, closed and bounded."""
    return json.dumps({**bounded(schema, budget), "x-guidance": JSON_STYLE})


def forbid(logits: torch.Tensor, constraints: Sequence[Constraint | None]) -> None:
    """Put -inf, in place, wherever a row's constraint forbids a token. ``[R, V]``."""
    bound = [(row, held) for row, held in enumerate(constraints) if held is not None]
    if bound:
        rows, held = [row for row, _ in bound], [constraint for _, constraint in bound]
        allowed = held[0].compiler.allowed(held, logits.shape[1]).to(logits.device)
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
