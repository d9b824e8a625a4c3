"""Joined answers: Python that runs, and other text as it is."""

from __future__ import annotations

from typing import Any

import pytest

from hogwild_engine.text.joining import join_paragraphs


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def run(joined: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(joined.replace("```python", "").replace("```", ""), names)
    return names


GCD = "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)"


def test_text_is_joined_as_it_is() -> None:
    assert join_paragraphs([" a ", "x = y", fenced("x = y")], code=False) == (
        f" a \n\nx = y\n\n{fenced('x = y')}"
    )
    assert join_paragraphs(["Then:", fenced("x = 1")], code=True) == f"Then:\n\n{fenced('x = 1')}"


def test_code_that_runs_is_left_alone() -> None:
    texts = [fenced("import math\n\nX = math.pi"), fenced(GCD), fenced("print(gcd(4, 6), X)")]
    assert join_paragraphs(texts, code=True) == "\n\n".join(texts)


def test_a_call_comes_after_what_it_calls() -> None:
    joined = join_paragraphs([fenced("x = gcd(4, 6)"), "So:", fenced(GCD)], code=True)
    assert joined == f"So:\n\n{fenced(GCD)}\n\n{fenced('x = gcd(4, 6)')}"
    assert run(joined.removeprefix("So:"))["x"] == 2


@pytest.mark.parametrize(
    "broken",
    [
        "flatten(nested_list)",
        "return 3",
        "def add(a, b)",
        "x += 1",
        "x = x + 1",
        "@missing\ndef add(a):\n    return a",
        "class Box(Missing):\n    pass",
        "def add(a, b=missing):\n    return a",
        "print([y for y in missing])",
        "y = z\nz = y",
        "for item in values:\n    print(item)",
    ],
)
def test_code_that_cannot_run_is_left_out(broken: str) -> None:
    assert join_paragraphs([fenced(GCD), fenced(broken)], code=True) == fenced(GCD)


def test_only_the_lines_that_cannot_run_are_left_out() -> None:
    code = f"{GCD}\n\n# Example\ngcd(first,\n    second)\nprint(gcd(2, 4))"
    joined = join_paragraphs([fenced(code)], code=True)
    assert joined == fenced(f"{GCD}\n\n# Example\nprint(gcd(2, 4))")
    run(joined)


@pytest.mark.parametrize(
    "code",
    [
        "def add(a):\n    return later(a)",
        "if __name__ == '__main__':\n    print(1)",
        "class Node:\n    def next(self) -> 'Node':\n        return Node()",
        "from math import *\nx = 1",
        "print((y := 3), y)",
        "try:\n    import json\nexcept ImportError as error:\n    print(error)",
        "squares = {n: n * n for n in range(3)}\nprint(lambda: missing)",
        "with open(__file__) as file, open(file.name):\n    pass",
        "def f():\n    global g\n    g = 1",
        "a, *b = 1, 2\ndel a\nb.append(b[0])",
    ],
)
def test_names_of_every_kind_are_known(code: str) -> None:
    assert join_paragraphs([fenced(code)], code=True) == fenced(code)
