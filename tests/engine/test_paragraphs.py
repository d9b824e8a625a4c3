"""Paragraphs and stop strings: where text ends, repeats or must be held back, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hogwild_engine.api.protocol import CODE, INSTRUCT, PAPER, ParagraphEnd
from hogwild_engine.text.paragraphs import (
    boxed_answer,
    code_start,
    fence_is_open,
    has_content,
    header_starts,
    paragraph_end,
    prose_start,
    repeats_any,
    stub_end,
)
from hogwild_engine.text.stop_strings import find_first, held_back_len

ONCE = settings(deadline=None, derandomize=True, max_examples=200)


def end_of(text: str, rule: ParagraphEnd, min_chars: int = 0, pieces: int = 1) -> int | None:
    """Where the paragraph ends as ``text`` arrives, ``pieces`` characters at a time."""
    for stop in range(pieces, len(text) + pieces, pieces):
        fresh = stop - pieces
        end = paragraph_end(text[:stop], fresh, rule, min_chars)
        if end is not None:
            return end
    return None


@pytest.mark.parametrize("pieces", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        ("It is done.\n\nNext", "It is done."),
        ("Is it?\n\n", "Is it?"),
        ("It is!\n \t\nNext", "It is!"),
        ('He said "yes."\n\n', 'He said "yes."'),
        ("**It is done.**\n\n", "**It is done.**"),
        ("完成了。\n\n", "完成了。"),
        ("Ещё…\n\n", "Ещё…"),
        ("यह हो गया।\n\n", "यह हो गया।"),
        ("No end\n\nbut here.\n\n", "No end\n\nbut here."),
        ("Sum: $$a.\n\nb$$ done.\n\n", "Sum: $$a.\n\nb$$ done."),
        ("```\na.\n\nb\n```\nDone.\n\n", "```\na.\n\nb\n```\nDone."),
        ("\n\nStarts blank.\n\n", "\n\nStarts blank."),
    ],
)
def test_a_sentence_ends_at_a_blank_line_after_punctuation(
    text: str, paragraph: str, pieces: int
) -> None:
    assert end_of(text, "sentence", pieces=pieces) == len(paragraph)


@pytest.mark.parametrize(
    "text",
    [
        "It goes on",
        "It goes on,\n\n",
        "Done.\n",
        "$$x.\n\n",
        "```\nx.\n\n",
        "\n\n",
        ".\n",
        "```python\nx.\n```python\ny.\n\n",
    ],
)
def test_a_paragraph_goes_on_without_punctuation_or_blank_line(text: str) -> None:
    assert end_of(text, "sentence") is None
    assert end_of(text, "sentence", pieces=100) is None


@pytest.mark.parametrize("pieces", [1, 2, 50])
@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        ("A line, no punctuation\n\nNext", "A line, no punctuation"),
        ("short\n\nA line, no punctuation\n\n", "short\n\nA line, no punctuation"),
        ("```\ncode in here\n\nmore code\n```\n\n", "```\ncode in here\n\nmore code\n```"),
        ("  A line, no punctuation\n\n\n", "  A line, no punctuation"),
    ],
)
def test_a_blank_line_ends_prose_that_is_long_enough(
    text: str, paragraph: str, pieces: int
) -> None:
    assert end_of(text, "blank_line", 15, pieces) == len(paragraph)


def test_white_space_does_not_count_as_length() -> None:
    assert end_of(" " * 30 + "short\n\n", "blank_line", 15) is None


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        ("```python\nx = 1\n```\nNext", "```python\nx = 1\n```"),
        ("```python\nx = 1\n```\n", "```python\nx = 1\n```"),
        ("Text\n```\nx\n```\n", "Text\n```\nx\n```"),
        ("```python\na\n```python\nb\n```\n", "```python\na\n```python\nb\n```"),
        ("```python\nx = '```'\n```\n", "```python\nx = '```'\n```"),
        ("```python\nx\n  ```  \nNext", "```python\nx\n  ```  "),
    ],
)
def test_a_closed_fence_and_a_newline_end_code(text: str, paragraph: str, pieces: int) -> None:
    assert end_of(text, "fence", pieces=pieces) == len(paragraph)


@pytest.mark.parametrize(
    "text", ["x = 1\n\n\n", "```python\nx = 1\n", "```python\nx\n```", "``` a b\nx\n```python\n"]
)
def test_code_goes_on_while_its_fence_is_open(text: str) -> None:
    assert end_of(text, "fence") is None


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("", False),
        ("```", True),
        ("```python\nx", True),
        ("```\nx\n```\n", False),
        ("```python\nx\n```python\ny", True),
        ("```\nx\n```\n```\n", True),
        ("a ``` b", False),
        ("    ```", False),
    ],
)
def test_a_fence_opens_and_closes_on_a_line_of_its_own(text: str, is_open: bool) -> None:
    assert fence_is_open(text) == is_open


@ONCE
@given(
    st.lists(st.sampled_from(["word", ".", "\n", "\n\n", "```", "```python\n", "$$", " "])),
    st.sampled_from(["sentence", "blank_line", "fence"]),
    st.integers(1, 7),
)
def test_an_end_lies_in_the_text_and_is_found_for_any_tokenization(
    parts: list[str], rule: ParagraphEnd, pieces: int
) -> None:
    """The result does not depend on how tokens cut the text."""
    text = "".join(parts)
    end = end_of(text, rule, pieces=pieces)
    if end is not None:
        assert 0 < end <= len(text)
        assert text[:end].strip()
    if rule != "fence":
        assert (end_of(text, rule) is None) == (end is None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{}", None),
        ("\\boxed{ }", None),
        ("\\boxed{7} and \\boxed{}", "7"),
        ("\\boxed{7} and \\boxed{8", "7"),
        ("\\boxed{8", None),
        ("boxed{8}", None),
        ("none", None),
    ],
)
def test_a_boxed_answer_is_balanced_and_not_empty(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("```python\nimport os\n# a comment\n\n```", True, False),
        ("```python\n@cache\n```", True, False),
        ("```python\nx = 1\n```", True, True),
        ("```python\ndef sort(x):\n    pass\n```", True, False),
        ("```python\nasync def sort(x: int) -> int: ...\n```", True, False),
        ("```python\ndef sort(x):\n    # Sorts x\n    pass  # later\n```", True, False),
        ("```python\ndef sort(x):\n```", True, False),
        ('```python\ndef sort(x):\n    """Sorts x.\n\n    Soon.\n    """\n```', True, False),
        ('```python\ndef sort(x):\n    """Sorts x.', True, False),
        ("```python\ndef sort(x):\n    raise NotImplementedError('soon')\n```", True, False),
        ('```python\ndef sort(x):\n    """Sorts x."""\n    return x\n```', True, True),
        ("```python\nclass Refused(Exception):\n    pass\n```", True, True),
        ("```python\ndef sort(x):\n    pass\n    return x\n```", True, True),
        ("```python\ndef sort(x): return x\n```", True, True),
        ("...\n\n--", False, False),
        (" ", False, False),
        ("数", False, True),
    ],
)
def test_content_is_more_than_punctuation_and_empty_functions(
    text: str, code: bool, says: bool
) -> None:
    assert has_content(text, code=code) == says


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("def f(n):\n    # Counts\n    pass\n```", "def f(n):\n    # Counts\n    "),
        ("def f(n): ...\n```", "def f(n): "),
        ("def f(n):\n    pass\n\ndef g(n):\n    pass\n```", "def f(n):\n    "),
        ("import os\n\ndef f(n):\n\n```\n", "import os\n\ndef f(n):\n"),
        ('def f(n):\n    """Counts."""\n```', 'def f(n):\n    """Counts."""\n'),
        (
            'def f(n):\n    """Counts.\n    ...\n    """\n',
            'def f(n):\n    """Counts.\n    ...\n    """\n',
        ),
        ('def f(n):\n    """Counts.\n    pass\n', 'def f(n):\n    """Counts.\n    pass\n'),
        ("# def\nimport os\n```", None),
        ("pass\n```", None),
    ],
)
def test_stub_end_is_where_the_body_is_missing(text: str, before: str | None) -> None:
    place = stub_end(text)
    assert (None if place is None else text[:place]) == before


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("```python\ndef add(a, b):\n    return", "def add"),
        ("```python\nimport math\n\n# adds\n@cache\ndef  add(a", "def add"),
        ("```python\nclass Box:\n", "class Box"),
        ("```python\nx = 1\n", "x = 1"),
        ("```python\ndef ad", None),
        ("```python\n    return 1\n", ""),
        ("```python\n\n    ", None),
        ("```python\nimport math\n", None),
        ("```python\n", None),
    ],
)
def test_code_starts_with_its_first_line_after_imports(text: str, key: str | None) -> None:
    span = code_start(text)
    assert (span and span.key) == key
    if span is not None:
        assert span.start < span.stop
        assert " ".join(text[span.start : span.stop].split()) == key


def test_prose_starts_with_twelve_words_once_the_next_one_begins() -> None:
    words = [f"w{i}" for i in range(12)]
    text = " ".join(words)
    assert prose_start(text) is None
    span = prose_start(f"{text} Next")
    assert span is not None
    assert span.key == text
    ended = prose_start("Two Words.", ended=True)
    assert ended is not None
    assert ended.key == "two words"
    assert prose_start("...", ended=True) is None


@pytest.mark.parametrize(
    ("key", "other", "same"),
    [
        ("sleep is very good for you", "Sleep is very good for you, they say.", True),
        ("sleep is very good for you", "Sleep is very good for all of us here.", True),
        ("sleep is very good for you", "Sleep is what most of us need more of.", False),
        ("sleep is very good for you", "Food is very good for you and for me.", False),
        ("sleep is very good for you", "", False),
    ],
)
def test_prose_repeats_if_two_words_and_half_of_the_trigrams_are_equal(
    key: str, other: str, same: bool
) -> None:
    assert repeats_any(key, ["Something else entirely.", other], code=False) == same


def test_code_repeats_if_the_keys_are_equal() -> None:
    others = ["```python\ndef add(a):\n    pass\n```"]
    assert repeats_any("def add", others, code=True)
    assert not repeats_any("def add_all", others, code=True)
    assert not repeats_any("def add", ["```python\nimport x"], code=True)


def test_code_that_continues_another_workers_code_repeats_it() -> None:
    assert repeats_any("", [], code=True)


def test_short_paragraphs_repeat_only_if_all_words_are_equal() -> None:
    assert repeats_any("use a brick", ["Use a brick."], code=False)
    assert not repeats_any("use a brick", ["Use a spoon."], code=False)


@pytest.mark.parametrize(
    ("protocol", "starts"),
    [
        (PAPER, ["**Alice [", "**Bob ["]),
        (INSTRUCT, ["**Alice [", "**Bob ["]),
        (CODE, ["**Alice [", "**Bob ["]),
        (replace(PAPER, header="{name}:"), ["Alice:", "Bob:"]),
    ],
)
def test_headers_start_with_the_name(protocol: Any, starts: list[str]) -> None:
    assert header_starts(protocol, ["Alice", "Bob"]) == starts


def test_find_first_searches_from_an_index_on() -> None:
    assert find_first("a STOP b END", ["END", "STOP"]) == 2
    assert find_first("a STOP b END", ["END", "STOP"], 3) == 9
    assert find_first("a STOP", ["END"]) is None
    assert find_first("a", []) is None


@ONCE
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_held_back_len_is_that_of_the_longest_end_that_may_become_a_string(
    text: str, strings: list[str]
) -> None:
    starts = {s[:length] for s in strings for length in range(1, len(s))}
    wanted = max((len(s) for s in starts if text.endswith(s)), default=0)
    assert held_back_len(text, strings) == wanted
