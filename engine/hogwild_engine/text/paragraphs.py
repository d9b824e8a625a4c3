"""Where a worker's text ends, repeats or oversteps. Pure functions of text; knows no tokens.

Text here is what one worker wrote in one paragraph, never anybody's input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hogwild_engine.api.protocol import ParagraphEnd, Protocol

_SENTENCE_ENDS = tuple(".?!…。？！．؟۔।॥‽։።။។")
_QUOTES = "\"'”’»)]*_`"
_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)
_THREE_BLANK_LINES = re.compile(r"(?:\n[ \t]*){4}$")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_PLAIN_CODE = re.compile(r"^\s*(?:#.*|@.*|import\b.*|from\b.*|```.*)?$")
_DOCSTRING = re.compile(r"^[ \t]*[rR]?(\"\"\"|\'\'\').*?(?:\1|\Z)", re.MULTILINE | re.DOTALL)
_NOTHING = r"(?P<nothing>pass|\.\.\.|raise NotImplementedError\b.*?)?\s*(?:#.*)?$"
_STUB_LINE = re.compile(rf"^\s*(?P<head>(?:async )?def\b.*:\s*)?{_NOTHING}")
_COMPARED_WORDS = 12
_SHINGLE = 3


class Span(NamedTuple):
    """Characters ``start … stop - 1`` of a paragraph, and what they are compared by."""

    start: int
    stop: int
    key: str


def fence_is_open(text: str) -> bool:
    """Whether ``text`` ends inside a code fence. A fence line with a language always opens one."""
    is_open = False
    for found in _FENCE.finditer(text):
        is_open = bool(found.group(1)) or not is_open
    return is_open


def paragraph_end(text: str, fresh: int, rule: ParagraphEnd, min_chars: int) -> int | None:
    """How much of ``text`` is the finished paragraph, or ``None`` while it goes on.

    Args:
        text: the paragraph so far.
        fresh: length of the text before the newest token.
        rule: which of the rules of `Protocol.paragraph_end`.
        min_chars: characters before a blank line ends a paragraph.
    """
    if rule == "fence":
        return _fence_end(text)
    breaks = [found for found in _BLANK_LINE.finditer(text) if found.end() > fresh]
    for found in breaks:
        before = text[: found.start()]
        if not before.strip() or fence_is_open(before):
            continue
        if rule == "blank_line" and len(before.strip()) >= min_chars:
            return found.start()
        closed = before.rstrip().rstrip(_QUOTES).endswith(_SENTENCE_ENDS)
        if rule == "sentence" and closed and before.count("$$") % 2 == 0:
            return found.start()
    return None


def _fence_end(text: str) -> int | None:
    stalled = _THREE_BLANK_LINES.search(text)
    if stalled and text[: stalled.start()].strip():
        return stalled.start()
    is_open = False
    for found in _FENCE.finditer(text):
        closes = is_open and not found.group(1)
        if closes and found.end() < len(text):
            return found.end()
        is_open = not closes
    return None


def has_content(text: str, *, code: bool) -> bool:
    """Whether a paragraph says anything: in code, a line beside fences, imports, comments,
    docstrings and functions that do nothing.
    """
    if not code:
        return any(char.isalnum() for char in _FENCE.sub("", text))
    lines = _DOCSTRING.sub("", text).splitlines()
    return any(not _PLAIN_CODE.match(line) and not _STUB_LINE.match(line) for line in lines)


def stub_end(text: str) -> int | None:
    """Where the first function of code without content should have gone on: at its ``pass``, or
    behind its last line. ``None`` where no function begins.
    """
    start = end = 0
    begun = False
    without_docstrings = _DOCSTRING.sub(lambda found: re.sub(r"\S", "x", found.group()), text)
    for line in without_docstrings.splitlines(keepends=True):
        found = _STUB_LINE.match(line.rstrip())
        begun = begun or bool(found and found["head"])
        if begun and found and found["nothing"]:
            return start + found.start("nothing")
        start += len(line)
        if line.strip() and not _FENCE.match(line):
            end = start
    return end if begun else None


def code_opening(text: str) -> Span | None:
    """The first line of a paragraph's code up to ``(`` or ``:``, imports and comments skipped.

    A line that is indented goes on with somebody else's code; its key is empty.
    """
    start = 0
    for line in text.splitlines(keepends=True):
        if not _PLAIN_CODE.match(line):
            indent = len(line) - len(line.lstrip())
            if indent:
                return Span(start, start + indent, "")
            found = re.search(r"[(:]|\n", line)
            if found is None:
                return None
            key = " ".join(line[: found.start()].split())
            return Span(start, start + found.start(), key)
        start += len(line)
    return None


def prose_opening(text: str, *, ended: bool = False) -> Span | None:
    """The first dozen words of a paragraph, once the word behind them has begun or the paragraph
    has ended.
    """
    words = list(re.finditer(r"\w+", text))
    if not words or (len(words) <= _COMPARED_WORDS and not ended):
        return None
    kept = words[:_COMPARED_WORDS]
    return Span(kept[0].start(), kept[-1].end(), " ".join(word.group().lower() for word in kept))


def opening(text: str, *, code: bool, ended: bool = False) -> Span | None:
    """What a paragraph is compared with others by, or ``None`` while that is not written yet."""
    return code_opening(text) if code else prose_opening(text, ended=ended)


def repeats(key: str, others: Iterable[str], *, code: bool) -> bool:
    """Whether a paragraph that opens with ``key`` does what another one does or did.

    Args:
        key: of this paragraph's `opening`; an empty one continues what another wrote.
        others: the other paragraphs' texts.
        code: compare whole openings; else the first two words, and half of the runs of three words.
    """
    if code:
        return not key or any((span := code_opening(text)) and span.key == key for text in others)
    words = key.split()
    ours = _shingles(words)
    for text in others:
        theirs = re.findall(r"\w+", text.lower())
        if theirs[:2] == words[:2] and 2 * len(ours & _shingles(theirs)) >= len(ours):
            return True
    return False


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + _SHINGLE]) for i in range(len(words) - _SHINGLE + 1)}


def header_starts(protocol: Protocol, names: Iterable[str]) -> list[str]:
    """The texts that open a header of any of the workers, up to the paragraph's number."""
    start = protocol.header.partition("{number}")[0]
    return [start.format(name=name) for name in names]


def first_of(text: str, strings: Iterable[str], since: int = 0) -> int | None:
    """Where the first of ``strings`` begins in ``text``, looking from ``since`` on."""
    places = [place for s in strings if (place := text.find(s, since)) >= 0]
    return min(places, default=None)


def held_back(text: str, strings: Iterable[str]) -> int:
    """Length of the end of ``text`` that may yet grow into one of ``strings``."""
    held = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), held, -1):
            if text.endswith(string[:length]):
                held = length
                break
    return held


def boxed_answer(text: str) -> str | None:
    r"""The last non-empty ``\boxed{…}`` with balanced braces, or ``None``."""
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                if text[start:place].strip():
                    return text[start:place]
                break
    return None
