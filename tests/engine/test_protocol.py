"""The parallel phase with scripted tokens: ends and moves of paragraphs, stops, interventions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Paragraph, make_workers
from hogwild_engine.api.events import Intervention, ParagraphFinished, Step
from hogwild_engine.api.layout import LAYOUTS
from hogwild_engine.api.protocol import CODE, PAPER
from session_harness import (
    END,
    PROSE,
    SessionHarness,
    common_text,
    done,
    ends,
    history,
    own_text,
    steps,
)
from streams import check_streams

# Paragraphs


def test_a_finished_paragraph_moves_to_the_history_and_the_next_one_opens(
    sessions: SessionHarness,
) -> None:
    script = sessions.script({"Alice": [" One two.\n\n"], "Bob": [" Three four five six"]})
    assert own_text(script, 0) == "**Alice [1]:**"
    steps(script, 4)
    assert history(script) == [("Alice", 1, "One two.", True)]
    assert common_text(script) == "**Alice [1]:** One two.\n\n"
    assert own_text(script, 0) == "**Alice [2]:**"
    assert own_text(script, 1) == "**Bob [1]:** Three four five six"
    [event] = script.of(ParagraphFinished)
    assert (event.step, event.index, event.paragraph.step) == (4, 0, 4)


def test_the_ending_token_may_open_the_next_block_as_in_the_paper(sessions: SessionHarness) -> None:
    script = sessions.script(
        {"Alice": [" One two.\n\n"]}, protocol=replace(PROSE, ending_token="opens")
    )
    steps(script, 4)
    assert common_text(script) == "**Alice [1]:** One two."
    assert own_text(script, 0) == "\n\n**Alice [2]:**"


def test_a_blank_line_of_two_tokens_ends_a_paragraph_at_its_second(
    sessions: SessionHarness,
) -> None:
    newline = sessions.chat.encode("\n")
    texts: dict[str, list[str | int]] = {"Alice": [" One two.", *newline, *newline]}
    script = sessions.script(texts)
    steps(script, 4)
    assert not history(script)
    steps(script, 1)
    assert history(script) == [("Alice", 1, "One two.", True)]
    assert common_text(script) == "**Alice [1]:** One two.\n\n"


def test_paragraphs_of_one_step_move_in_worker_order(sessions: SessionHarness) -> None:
    script = sessions.script(
        {"Bob": [" b.\n\n"], "Alice": [" a.\n\n"], "Carol": [" c.\n\n"]}, workers=make_workers(3)
    )
    steps(script, 3)
    assert [p[0] for p in history(script)] == ["Alice", "Bob", "Carol"]
    assert common_text(script) == "".join(
        f"**{name} [1]:** {name[0].lower()}.\n\n" for name in ("Alice", "Bob", "Carol")
    )


@pytest.mark.parametrize("layout", ["contiguous", "arrival"])
def test_without_a_history_paragraphs_stay_where_they_were_written(
    sessions: SessionHarness, layout: Any
) -> None:
    script = sessions.script({"Alice": [" One.\n\n", " Two"]}, layout=layout)
    steps(script, 4)
    assert not common_text(script)
    if layout == "contiguous":
        assert own_text(script, 0) == "**Alice [1]:** One.\n\n**Alice [2]:** Two"
        assert history(script) == [("Alice", 1, "One.", True)]


def test_unsynchronized_workers_keep_their_paragraphs_until_the_end(
    sessions: SessionHarness,
) -> None:
    script = sessions.script(
        {"Alice": [" One.\n\n", " Two", END, END]}, sync_interval=None, max_steps=8
    )
    script.run()
    assert not common_text(script)
    assert own_text(script, 0).startswith("**Alice [1]:** One.\n\n**Alice [2]:** Two")
    assert [p[2] for p in history(script) if p[0] == "Alice"] == ["One.", "Two"]


def test_paragraph_numbers_go_on_from_the_history_of_the_request(sessions: SessionHarness) -> None:
    earlier = (Paragraph("Bob", 1, "Before."), Paragraph("Bob", 2, "And then."))
    script = sessions.script(
        {"Bob": [" Now.\n\n"]}, history=earlier, protocol=replace(PROSE, first_prefixes=(" Hi",))
    )
    assert own_text(script, 0) == "**Alice [1]:**"
    assert own_text(script, 1) == "**Bob [3]:**"
    prompt = script.chat.decode(script.parallel.shared.common.tokens)
    assert prompt.endswith("\n\n**Bob [1]:** Before.\n\n**Bob [2]:** And then.\n\n")
    steps(script, 3)
    assert history(script) == [("Bob", 3, "Now.", True)]


def test_code_ends_at_its_closing_fence(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": ["x = 1\n```\n"]}, protocol=replace(CODE, stagger=0))
    assert own_text(script, 0) == "**Alice [1]:**\n\n```python\n"
    while not script.parallel.history:
        script.step()
    assert history(script) == [("Alice", 1, "```python\nx = 1\n```", True)]
    assert common_text(script) == "**Alice [1]:**\n\n```python\nx = 1\n```\n\n"
    assert own_text(script, 0) == "**Alice [2]:**\n\n```python\n"


def test_a_fence_that_is_cut_is_closed_for_the_others(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": ["x = 1\n", END]}, protocol=replace(CODE, stagger=0))
    while not script.parallel.history:
        script.step()
    assert common_text(script) == "**Alice [1]:**\n\n```python\nx = 1\n```\n\n"


def test_forced_prefixes_start_the_paragraphs(sessions: SessionHarness) -> None:
    protocol = replace(
        PROSE, forced_prefix=" Well:", first_prefixes=(" I'm {name}.", " And I {name}.")
    )
    script = sessions.script({"Alice": [" One.\n\n"]}, protocol=protocol, workers=make_workers(3))
    assert [own_text(script, i) for i in range(3)] == [
        "**Alice [1]:** Well: I'm Alice.",
        "**Bob [1]:** Well: And I Bob.",
        "**Carol [1]:** Well: And I Carol.",
    ]
    steps(script, 3)
    assert history(script) == [("Alice", 1, "Well: I'm Alice. One.", True)]
    assert own_text(script, 0) == "**Alice [2]:** Well:"


# Turns and stops


def test_an_end_of_turn_after_text_ends_the_paragraph_and_then_the_worker(
    sessions: SessionHarness,
) -> None:
    script = sessions.script({"Alice": [" One", END, END], "Bob": [" Two three four five"]})
    steps(script, 2)
    assert history(script) == [("Alice", 1, "One", True)]
    assert common_text(script) == "**Alice [1]:** One\n\n"
    assert not ends(script)
    steps(script, 1)
    assert ends(script) == {"Alice": "end_of_turn"}
    assert not script.writers[0].block.tokens
    steps(script, 2)
    assert script.of(Step)[-1].active == ("Bob",)


def test_an_end_of_turn_may_end_the_session(sessions: SessionHarness) -> None:
    protocol = replace(PROSE, end_of_turn="ends_session")
    script = sessions.script(
        {"Alice": [" One", END], "Bob": [" Two three four"]}, protocol=protocol
    )
    script.run()
    assert history(script) == [("Alice", 1, "One", True), ("Bob", 1, "Two three", False)]
    assert ends(script) == {"Alice": "end_of_turn", "Bob": "stop"}
    assert done(script).usage.steps == 2


def test_all_workers_done_ends_the_parallel_phase(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": [END], "Bob": [" x", END, END], "": [" fine", END]})
    script.run()
    assert ends(script) == {"Alice": "end_of_turn", "Bob": "end_of_turn"}
    assert (done(script).text, done(script).finish_reason) == ("fine", "stop")
    assert done(script).usage.steps == 3


def test_workers_start_stagger_steps_after_each_other(sessions: SessionHarness) -> None:
    script = sessions.script(
        workers=make_workers(3), protocol=replace(PROSE, stagger=2), max_steps=6
    )
    script.run()
    assert [event.active for event in script.of(Step)] == [
        *[("Alice",)] * 2,
        *[("Alice", "Bob")] * 2,
        *[("Alice", "Bob", "Carol")] * 2,
    ]


@pytest.mark.parametrize("first", [[END], [" x", END, END]])
def test_a_worker_starts_at_once_if_all_before_it_are_done(
    sessions: SessionHarness, first: list[Any]
) -> None:
    """No step would run while it waited for its stagger."""
    script = sessions.script({"Alice": first}, protocol=replace(PROSE, stagger=10), max_steps=8)
    script.run(60)
    assert any(event.active == ("Bob",) for event in script.of(Step))


def test_a_boxed_answer_in_a_finished_paragraph_ends_the_phase(sessions: SessionHarness) -> None:
    protocol = replace(PAPER, first_prefixes=())
    texts: dict[str, list[str | int]] = {
        "Alice": [" It is \\boxed{}.\n\n", " So \\boxed{4}.\n\n"],
        "Bob": [" Thinking \\boxed{5} on and on and on and on and on"],
    }
    script = sessions.script(texts, protocol=protocol, max_steps=60)
    script.run()
    complete = [p for p in history(script) if p[3]]
    assert complete == [
        ("Alice", 1, "It is \\boxed{}.", True),
        ("Alice", 2, "So \\boxed{4}.", True),
    ]
    assert ends(script) == {"Alice": "stop", "Bob": "stop"}
    assert done(script).usage.steps < 60


def test_a_stop_string_ends_only_its_worker(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": [" One two ST", "OP three"],
        "Bob": [" Four five"],
    }
    script = sessions.script(texts, stop=("STOP",), max_steps=10)
    script.run()
    assert ends(script) == {"Alice": "stop", "Bob": "length"}
    assert history(script)[0] == ("Alice", 1, "One two", True)
    assert "ST" not in common_text(script)
    check_streams(script.events)


def test_a_worker_that_stops_with_a_paragraph_opens_no_other(sessions: SessionHarness) -> None:
    protocol = replace(PROSE, intervention="Am I useful?", intervention_tokens=1)
    texts: dict[str, list[str | int]] = {"Alice": [" One two STOP"]}
    script = sessions.script(
        texts, stop=("STOP",), max_steps=10, protocol=protocol, workers=make_workers(2)
    )
    while not ends(script):
        script.step()
    assert ends(script) == {"Alice": "stop"}
    assert history(script) == [("Alice", 1, "One two", True)]
    assert script.parallel.writers[0].paragraph == 1
    assert not [event for event in script.of(Intervention) if event.worker == "Alice"]


def test_contiguous_keeps_the_token_that_ended_a_paragraph(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {"Alice": [" One.\n\n", "STOP"]}
    script = sessions.script(texts, layout="contiguous", stop=("STOP",), max_steps=10)
    while not ends(script):
        script.step()
    assert own_text(script, 0) == "**Alice [1]:** One.\n\n"
    assert history(script) == [("Alice", 1, "One.", True)]


def test_contiguous_keeps_what_ended_a_paragraph_in_the_last_step(
    sessions: SessionHarness,
) -> None:
    script = sessions.script({"Alice": [" One.\n\n"]}, layout="contiguous", max_steps=3)
    script.run()
    assert own_text(script, 0) == "**Alice [1]:** One.\n\n"
    script = sessions.script({"Alice": [" One STOP"]}, layout="contiguous", stop=("STOP",))
    while not ends(script):
        script.step()
    assert own_text(script, 0) == "**Alice [1]:** One\n\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_string_at_the_start_leaves_no_paragraph(
    sessions: SessionHarness, layout: Any
) -> None:
    script = sessions.script(
        {"Alice": ["STOP"]}, stop=("STOP",), max_steps=6, protocol=replace(PROSE, max_repeats=1)
    )
    script.run()
    assert ends(script)["Alice"] == "stop"
    assert [p[0] for p in history(script)] == ["Bob"]


def test_max_steps_bounds_the_phase(sessions: SessionHarness) -> None:
    script = sessions.script(max_steps=7)
    script.run()
    assert [event.step for event in script.of(Step)] == list(range(1, 8))
    assert ends(script) == {"Alice": "length", "Bob": "length"}
    assert [p[3] for p in history(script)] == [False, False]
    assert done(script).usage.worker_tokens == {"Alice": 7, "Bob": 7}


# Interventions


def test_the_first_worker_to_end_a_paragraph_after_enough_tokens_gets_the_intervention(
    sessions: SessionHarness,
) -> None:
    """One counter counts all workers' tokens; an intervention resets it."""
    protocol = replace(PROSE, intervention="Am I useful?", intervention_tokens=13)
    texts: dict[str, list[str | int]] = {
        "Alice": [" a.\n\n", " a b c d e f.\n\n", " a.\n\n", " a.\n\n"],
        "Bob": [" b c d e f g h.\n\n", " b.\n\n"],
    }
    script = sessions.script(texts, protocol=protocol, max_steps=24)
    script.run()
    interventions = script.of(Intervention)
    assert [(event.worker, event.step, event.text) for event in interventions] == [
        ("Bob", 9, "Am I useful?"),
        ("Alice", 17, "Am I useful?"),
    ]
    by_paragraph = {(p[0], p[1]): p[2] for p in history(script)}
    assert by_paragraph["Bob", 2] == "Am I useful? b."
    assert "**Bob [2]:** Am I useful? b." in common_text(script)
    check_streams(script.events)


def test_a_protocol_without_interventions_has_none(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": [" a.\n\n"] * 6}, max_steps=20)
    script.run()
    assert not script.of(Intervention)
