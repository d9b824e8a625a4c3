"""Random text of a grammar, byte by byte: a model of any ability, which needs no weights."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

MAX_BYTES = 3000


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def matcher_of(source: str) -> LLMatcher:
    """Return the matcher of a JSON schema in llguidance's form."""
    grammar = LLMatcher.grammar_from_json_schema(source)
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Return whether a grammar takes a text whole."""
    copy = matcher.deep_copy()
    return all(copy.consume_token(byte) for byte in text.encode()) and copy.is_accepting()


def write(matcher: LLMatcher, seed: int, eager: int = 40) -> str | None:
    """Return a random text of the grammar; ``None`` if it does not end.

    Args:
        matcher: the grammar.
        seed: of the choices.
        eager: bytes after which the text ends as soon as it can.
    """
    chance, matcher, written = random.Random(seed), matcher.deep_copy(), bytearray()
    end: Any = byte_tokenizer().eos_token
    while len(written) < MAX_BYTES:
        if matcher.is_stopped():
            return written.decode()
        allowed = _allowed(matcher)
        if end in allowed and (len(written) > eager or chance.random() < 0.5):
            return written.decode()
        plain = [token for token in allowed if 32 <= token < 127 and token != ord("\\")]
        closing = [token for token in plain if chr(token) in '"]}'] if len(written) > eager else []
        if not (plain or allowed):
            return None
        token = chance.choice(closing or plain or [t for t in allowed if t != end])
        written.append(token)
        assert matcher.consume_token(token), matcher.get_error()
    return None


def _allowed(matcher: LLMatcher) -> list[int]:
    size = byte_tokenizer().vocab_size
    words = np.zeros((1, (size + 31) // 32), dtype=np.int32)
    fill_next_token_bitmask(matcher, words, 0)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    return np.nonzero(bits)[0].tolist()
