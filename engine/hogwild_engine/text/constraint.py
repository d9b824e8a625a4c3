"""Constrained decoding: one llguidance matcher for each sequence, one token mask for each batch.

llguidance is imported with the first grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hogwild_engine.api.errors import RequestError, error_text
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.text.schema import grammar_schema

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


class Constraint:
    """The state of one sequence under a grammar.

    Args:
        matcher: accepted the sequence so far.
        compiler: fills token masks for the tokenizer.
    """

    def __init__(self, matcher: LLMatcher, compiler: GrammarCompiler) -> None:
        self.matcher = matcher
        self.compiler = compiler

    def fresh(self) -> Constraint:
        """Return a constraint like this one that shares no state with it; nothing is compiled."""
        return Constraint(self.matcher.deep_copy(), self.compiler)

    @property
    def finished(self) -> bool:
        """Whether the sequence is complete and no token may follow."""
        return self.matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the sequence is complete; some more tokens may be allowed."""
        return self.matcher.is_accepting()

    def check_alive(self) -> None:
        """Check that the sequence is complete or that a token may follow.

        Raises:
            RequestError: neither, as in the grammar ``"a" (/b/ & /c/)`` after "a".
        """
        if self.matcher.is_error():
            reason = self.matcher.get_error().partition("\n")[0]
            wanted = "a grammar whose texts can be finished"
            raise RequestError(error_text("grammar", wanted, "no token that may come next", reason))

    def accept(self, token: int) -> None:
        """Advance the matcher by a token.

        Raises:
            RequestError: no token could come next.
            RuntimeError: the grammar forbids the token, or exceeds llguidance's limits.
        """
        self.check_alive()
        if not self.matcher.consume_token(token):
            raise RuntimeError(self.matcher.get_error().partition("\n")[0])

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        self.matcher.rollback(count)

    def forced_tokens(self) -> list[int]:
        """Return the tokens that the grammar leaves no choice about.

        Example: after ``{`` of an object with the one key "age", the tokens of ``"age": ``.
        """
        tokens = self.matcher.compute_ff_tokens()
        # Some vocabularies lack single bytes, so that not all forced text has tokens.
        return tokens[: self.matcher.validate_tokens(tokens)]


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer.
        eos_ids: ids of end-of-turn tokens, allowed once a sequence is complete.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, eos_token=self._eos_ids or None)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(num_threads=1)

    def is_special(self, token: int) -> bool:
        """Return whether grammars must name this token by its id instead of its text."""
        return self._vocabulary.is_special_token(token)

    def to_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return self._vocabulary.decode_bytes([token])

    def compile(self, grammar: Grammar) -> Constraint:
        """Return the constraint of an empty sequence.

        Raises:
            RequestError: llguidance refuses the grammar, or no text fits it.
        """
        from llguidance import LLMatcher

        wanted, text = "a grammar that llguidance understands", grammar.text[:200]
        try:
            matcher = LLMatcher(self._vocabulary, _source(grammar), log_level=0)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(error_text("grammar", wanted, text, str(error))) from error
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            raise RequestError(error_text("grammar", wanted, text, reason))
        constraint = Constraint(matcher, self)
        first = constraint.fresh()
        self.token_mask([first], self._vocabulary.vocab_size)
        if first.matcher.is_error():
            raise RequestError(error_text("grammar", "a grammar that some text fits", text))
        return constraint

    def token_mask(self, constraints: Sequence[Constraint], vocab_size: int) -> torch.Tensor:
        """Return which tokens may come next, one row for each constraint. Boolean ``[R, V]``."""
        from llguidance.numpy import fill_next_token_bitmask_par

        known = self._vocabulary.vocab_size
        words = torch.zeros(len(constraints), (known + 31) // 32, dtype=torch.int32)
        matchers = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, words.numpy())
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        # A model's vocabulary may be padded beyond the tokenizer's; padding is never allowed.
        mask = torch.zeros(len(constraints), vocab_size, dtype=torch.bool)
        mask[:, :known] = bits.flatten(1)[:, : min(known, vocab_size)].bool()
        return mask


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar_schema(grammar.text).source)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def apply_token_mask(logits: torch.Tensor, constraints: Sequence[Constraint | None]) -> None:
    """Set the logits of forbidden tokens to -inf, in place. ``[R, V]``, one constraint a row."""
    rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
    given = [constraint for constraint in constraints if constraint is not None]
    if given:
        mask = given[0].compiler.token_mask(given, logits.shape[1]).to(logits.device)
        logits[rows] = logits[rows].masked_fill(~mask, -torch.inf)
