"""The judge of the forty short tasks: what it counts as a fault of a team's reply."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage

from recipes.first_tasks import FUNCTIONS, PROSE, judge, table_of, task_of

GOOD = "```python\ndef is_even(n):\n    return n % 2 == 0\n```"
ODD = "```python\ndef is_odd(n):\n    return n % 2\n```"
ASKED = "is_even(n), is_odd(n)"


def reply(text: str, *paragraphs: tuple[str, str, bool]) -> AIMessage:
    about: dict[str, Any] = {
        "workers": {"Alice": {}, "Bob": {}},
        "paragraphs": [{"worker": w, "text": t, "complete": c} for w, t, c in paragraphs],
    }
    return AIMessage(text, response_metadata=about)


def test_code_that_both_wrote_and_that_runs_has_no_fault() -> None:
    good = reply(f"{GOOD}\n\n{ODD}", ("Alice", GOOD, True), ("Bob", ODD, True))
    outcome = judge(task_of(ASKED), ASKED, good)
    assert outcome._asdict() == {
        "is_code": True,
        "all_wrote": True,
        "runs": True,
        "repeats": False,
        "echoes": False,
        "ragged": False,
    }


def test_what_is_missing_twice_there_or_cut_is_a_fault() -> None:
    lacking = judge(task_of(ASKED), ASKED, reply(GOOD, ("Alice", GOOD, True)))
    assert (lacking.all_wrote, lacking.runs) == (False, False)
    assert judge(task_of(ASKED), ASKED, reply(f"{GOOD}\n\n{GOOD}")).repeats
    assert judge(task_of(ASKED), ASKED, reply(f"{GOOD}\n\n**Bob")).ragged
    assert judge(task_of(ASKED), ASKED, reply(GOOD, ("Alice", GOOD, False))).ragged
    echo = reply(PROSE[0], ("Alice", PROSE[0], True))
    assert judge(PROSE[0], None, echo).echoes
    twice = "- See the Forum\n- See the Forum"
    assert judge(PROSE[0], None, reply(twice)).repeats


def test_there_are_forty_tasks_and_their_table_keeps_code_and_prose_apart() -> None:
    assert len(FUNCTIONS) + len(PROSE) == 40
    outcomes = [judge(task_of(ASKED), ASKED, reply(GOOD)), judge(PROSE[0], None, reply("Rome."))]
    assert table_of(outcomes).row_count == 2
