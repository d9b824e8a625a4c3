"""The state machine of a session, on tokens that the test picks: what ends, moves and repeats."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rig import Rig, Script
from test_engine_text import check_streams
from tiny import tiny_model

from hogwild_engine import Paragraph, Protocol, Request, Worker, make_workers
from hogwild_engine.chat import ChatFormat
from hogwild_engine.events import Finished, Intervention, ParagraphFinished, Step, WorkerFinished
from hogwild_engine.layout import LAYOUTS
from hogwild_engine.protocol import BOXED_FINISHER, CODE, INSTRUCT, PAPER

END = 2
PROSE = Protocol(name="prose", rules="Be quick.", stagger=0, min_chars=0, max_repeats=None)
TASK = ({"role": "user", "content": "Do it."},)


class Stage:
    """Makes scripted sessions on one small cache and takes their pages back."""

    def __init__(self, chat: ChatFormat) -> None:
        self.rig = Rig(tiny_model("llama"), num_pages=600)
        self.chat = chat
        self.scripts: list[Script] = []

    def script(
        self,
        texts: dict[str, list[str | int]] | None = None,
        *,
        chat: ChatFormat | None = None,
        **options: Any,
    ) -> Script:
        settings = {"workers": make_workers(2), "protocol": PROSE, "max_steps": 30, "max_tokens": 4}
        request = Request(options.pop("messages", TASK), **{**settings, **options})
        script = Script(self.rig, chat or self.chat, request, texts or {})
        self.scripts.append(script)
        return script

    def clear(self) -> None:
        for script in self.scripts:
            script.session.release()
        self.scripts.clear()
        assert self.rig.all_free


@pytest.fixture(scope="module")
def shared_stage(chat: ChatFormat) -> Stage:
    return Stage(chat)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    yield shared_stage
    shared_stage.clear()


def steps(script: Script, count: int) -> None:
    """The prefill pass draws first, so ``count`` passes are ``count`` steps."""
    for _ in range(count):
        script.step()


def history(script: Script) -> list[tuple[str, int, str, bool]]:
    return [(p.worker, p.number, p.text, p.complete) for p in script.parallel.history]


def ends(script: Script) -> dict[str, str]:
    """Why each worker ended; each ends once."""
    finished = script.of(WorkerFinished)
    assert len({event.worker for event in finished}) == len(finished)
    reasons = {event.worker: event.reason for event in finished}
    assert script.parallel.ends == reasons
    return reasons


def common_text(script: Script) -> str:
    """What was added to the common block behind the prompt."""
    prompt = script.session.usage().prompt_tokens
    return script.chat.decode(script.parallel._parts.common.tokens[prompt:])


def own_text(script: Script, number: int) -> str:
    return script.chat.decode(script.writers[number].block.tokens)


def done(script: Script) -> Finished:
    assert script.session.finished is not None
    return script.session.finished


# Paragraphs


def test_a_finished_paragraph_moves_to_the_history_and_the_next_one_opens(stage: Stage) -> None:
    script = stage.script({"Alice": [" One two.\n\n"], "Bob": [" Three four five six"]})
    assert own_text(script, 0) == "**Alice [1]:**"
    steps(script, 4)
    assert history(script) == [("Alice", 1, "One two.", True)]
    assert common_text(script) == "**Alice [1]:** One two.\n\n"
    assert own_text(script, 0) == "**Alice [2]:**"
    assert own_text(script, 1) == "**Bob [1]:** Three four five six"
    [event] = script.of(ParagraphFinished)
    assert (event.step, event.index, event.paragraph.step) == (4, 0, 4)


def test_the_ending_token_may_open_the_next_block_as_published(stage: Stage) -> None:
    script = stage.script(
        {"Alice": [" One two.\n\n"]}, protocol=replace(PROSE, ending_token="opens")
    )
    steps(script, 4)
    assert common_text(script) == "**Alice [1]:** One two."
    assert own_text(script, 0) == "\n\n**Alice [2]:**"


def test_a_blank_line_of_two_tokens_ends_a_paragraph_at_its_second(stage: Stage) -> None:
    newline = stage.chat.encode("\n")
    texts: dict[str, list[str | int]] = {"Alice": [" One two.", *newline, *newline]}
    script = stage.script(texts)
    steps(script, 4)
    assert not history(script)
    steps(script, 1)
    assert history(script) == [("Alice", 1, "One two.", True)]
    assert common_text(script) == "**Alice [1]:** One two.\n\n"


def test_paragraphs_of_one_step_move_in_worker_order(stage: Stage) -> None:
    script = stage.script(
        {"Bob": [" b.\n\n"], "Alice": [" a.\n\n"], "Carol": [" c.\n\n"]}, workers=make_workers(3)
    )
    steps(script, 3)
    assert [p[0] for p in history(script)] == ["Alice", "Bob", "Carol"]
    assert common_text(script) == "".join(
        f"**{name} [1]:** {name[0].lower()}.\n\n" for name in ("Alice", "Bob", "Carol")
    )


@pytest.mark.parametrize("layout", ["contiguous", "arrival"])
def test_without_a_history_paragraphs_stay_where_they_were_written(
    stage: Stage, layout: Any
) -> None:
    script = stage.script({"Alice": [" One.\n\n", " Two"]}, layout=layout)
    steps(script, 4)
    assert not common_text(script)
    if layout == "contiguous":
        assert own_text(script, 0) == "**Alice [1]:** One.\n\n**Alice [2]:** Two"
        assert history(script) == [("Alice", 1, "One.", True)]


def test_unsynchronised_workers_keep_their_paragraphs_to_the_end(stage: Stage) -> None:
    script = stage.script(
        {"Alice": [" One.\n\n", " Two", END, END]}, sync_interval=None, max_steps=8
    )
    script.run()
    assert not common_text(script)
    assert own_text(script, 0).startswith("**Alice [1]:** One.\n\n**Alice [2]:** Two")
    assert [p[2] for p in history(script) if p[0] == "Alice"] == ["One.", "Two"]


def test_paragraph_numbers_go_on_from_the_history_of_the_request(stage: Stage) -> None:
    told = (Paragraph("Bob", 1, "Before."), Paragraph("Bob", 2, "And then."))
    script = stage.script(
        {"Bob": [" Now.\n\n"]}, history=told, protocol=replace(PROSE, first_words=(" Hi",))
    )
    assert own_text(script, 0) == "**Alice [1]:**"
    assert own_text(script, 1) == "**Bob [3]:**"
    prompt = script.chat.decode(script.parallel._parts.common.tokens)
    assert prompt.endswith("\n\n**Bob [1]:** Before.\n\n**Bob [2]:** And then.\n\n")
    steps(script, 3)
    assert history(script) == [("Bob", 3, "Now.", True)]


def test_code_ends_at_its_closing_fence(stage: Stage) -> None:
    script = stage.script({"Alice": ["x = 1\n```\n"]}, protocol=replace(CODE, stagger=0))
    assert own_text(script, 0) == "**Alice [1]:**\n\n```python\n"
    while not script.parallel.history:
        script.step()
    assert history(script) == [("Alice", 1, "```python\nx = 1\n```", True)]
    assert common_text(script) == "**Alice [1]:**\n\n```python\nx = 1\n```\n\n"
    assert own_text(script, 0) == "**Alice [2]:**\n\n```python\n"


def test_a_fence_that_is_cut_is_closed_for_the_others(stage: Stage) -> None:
    script = stage.script({"Alice": ["x = 1\n", END]}, protocol=replace(CODE, stagger=0))
    while not script.parallel.history:
        script.step()
    assert common_text(script) == "**Alice [1]:**\n\n```python\nx = 1\n```\n\n"


def test_openings_and_first_words_are_put_in_workers_mouths(stage: Stage) -> None:
    protocol = replace(PROSE, opening=" Well:", first_words=(" I'm {name}.", " And I {name}."))
    script = stage.script({"Alice": [" One.\n\n"]}, protocol=protocol, workers=make_workers(3))
    assert [own_text(script, i) for i in range(3)] == [
        "**Alice [1]:** Well: I'm Alice.",
        "**Bob [1]:** Well: And I Bob.",
        "**Carol [1]:** Well: And I Carol.",
    ]
    steps(script, 3)
    assert history(script) == [("Alice", 1, "Well: I'm Alice. One.", True)]
    assert own_text(script, 0) == "**Alice [2]:** Well:"


# Turns and stops


def test_an_end_of_turn_after_text_ends_the_paragraph_and_then_the_worker(stage: Stage) -> None:
    script = stage.script({"Alice": [" One", END, END], "Bob": [" Two three four five"]})
    steps(script, 2)
    assert history(script) == [("Alice", 1, "One", True)]
    assert common_text(script) == "**Alice [1]:** One\n\n"
    assert not ends(script)
    steps(script, 1)
    assert ends(script) == {"Alice": "end_of_turn"}
    assert not script.writers[0].block.tokens
    steps(script, 2)
    assert script.of(Step)[-1].active == ("Bob",)


def test_an_end_of_turn_may_end_the_session(stage: Stage) -> None:
    protocol = replace(PROSE, end_of_turn="ends_session")
    script = stage.script({"Alice": [" One", END], "Bob": [" Two three four"]}, protocol=protocol)
    script.run()
    assert history(script) == [("Alice", 1, "One", True), ("Bob", 1, "Two three", False)]
    assert ends(script) == {"Alice": "end_of_turn", "Bob": "stop"}
    assert done(script).usage.steps == 2


def test_all_workers_done_ends_the_parallel_phase(stage: Stage) -> None:
    script = stage.script({"Alice": [END], "Bob": [" x", END, END], "": [" fine", END]})
    script.run()
    assert ends(script) == {"Alice": "end_of_turn", "Bob": "end_of_turn"}
    assert (done(script).text, done(script).finish_reason) == ("fine", "stop")
    assert done(script).usage.steps == 3


def test_workers_start_their_stagger_apart(stage: Stage) -> None:
    script = stage.script(workers=make_workers(3), protocol=replace(PROSE, stagger=2), max_steps=6)
    script.run()
    assert [event.active for event in script.of(Step)] == [
        *[("Alice",)] * 2,
        *[("Alice", "Bob")] * 2,
        *[("Alice", "Bob", "Carol")] * 2,
    ]


@pytest.mark.parametrize("first", [[END], [" x", END, END]])
def test_workers_start_although_those_before_them_are_done_early(
    stage: Stage, first: list[Any]
) -> None:
    """Nobody writes in between, so no pass would come if the stagger were waited for."""
    script = stage.script({"Alice": first}, protocol=replace(PROSE, stagger=10), max_steps=8)
    script.run(60)
    assert any(event.active == ("Bob",) for event in script.of(Step))


def test_a_boxed_answer_in_a_finished_paragraph_stops_all(stage: Stage) -> None:
    protocol = replace(PAPER, first_words=())
    texts: dict[str, list[str | int]] = {
        "Alice": [" It is \\boxed{}.\n\n", " So \\boxed{4}.\n\n"],
        "Bob": [" Thinking \\boxed{5} on and on and on and on and on"],
    }
    script = stage.script(texts, protocol=protocol, max_steps=60)
    script.run()
    complete = [p for p in history(script) if p[3]]
    assert complete == [
        ("Alice", 1, "It is \\boxed{}.", True),
        ("Alice", 2, "So \\boxed{4}.", True),
    ]
    assert ends(script) == {"Alice": "stop", "Bob": "stop"}
    assert done(script).usage.steps < 60


def test_a_stop_string_ends_its_worker_only(stage: Stage) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": [" One two ST", "OP three"],
        "Bob": [" Four five"],
    }
    script = stage.script(texts, stop=("STOP",), max_steps=10)
    script.run()
    assert ends(script) == {"Alice": "stop", "Bob": "length"}
    assert history(script)[0] == ("Alice", 1, "One two", True)
    assert "ST" not in common_text(script)
    check_streams(script.events)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_string_at_once_leaves_no_paragraph(stage: Stage, layout: Any) -> None:
    script = stage.script(
        {"Alice": ["STOP"]}, stop=("STOP",), max_steps=6, protocol=replace(PROSE, max_repeats=1)
    )
    script.run()
    assert ends(script)["Alice"] == "stop"
    assert [p[0] for p in history(script)] == ["Bob"]


def test_the_budget_of_steps_is_kept(stage: Stage) -> None:
    script = stage.script(max_steps=7)
    script.run()
    assert [event.step for event in script.of(Step)] == list(range(1, 8))
    assert ends(script) == {"Alice": "length", "Bob": "length"}
    assert [p[3] for p in history(script)] == [False, False]
    assert done(script).usage.worker_tokens == {"Alice": 7, "Bob": 7}


# Interventions


def test_the_first_to_end_a_paragraph_after_enough_tokens_is_intervened(stage: Stage) -> None:
    """One counter over all workers' tokens, which starts again behind an intervention."""
    protocol = replace(PROSE, intervention="Am I useful?", intervention_tokens=13)
    texts: dict[str, list[str | int]] = {
        "Alice": [" a.\n\n", " a b c d e f.\n\n", " a.\n\n", " a.\n\n"],
        "Bob": [" b c d e f g h.\n\n", " b.\n\n"],
    }
    script = stage.script(texts, protocol=protocol, max_steps=24)
    script.run()
    told = script.of(Intervention)
    assert [(event.worker, event.step, event.text) for event in told] == [
        ("Bob", 9, "Am I useful?"),
        ("Alice", 17, "Am I useful?"),
    ]
    said = {(p[0], p[1]): p[2] for p in history(script)}
    assert said["Bob", 2] == "Am I useful? b."
    assert "**Bob [2]:** Am I useful? b." in common_text(script)
    check_streams(script.events)


def test_no_intervention_comes_where_the_protocol_has_none(stage: Stage) -> None:
    script = stage.script({"Alice": [" a.\n\n"] * 6}, max_steps=20)
    script.run()
    assert not script.of(Intervention)


# Repeats, headers, junk


def test_prose_that_repeats_is_rewound_and_its_weakest_token_banned(stage: Stage) -> None:
    words = " sleep is good for you and for me and all who live here too. "
    texts: dict[str, list[str | int]] = {
        "Alice": [words, "\n\n"],
        "Bob": [words, " but then"],
    }
    script = stage.script(texts, protocol=replace(PROSE, max_repeats=1), max_steps=60)
    while not script.writers[1].draft or not script.writers[1].draft.attempts:
        script.step()
    draft = script.writers[1].draft
    assert len(draft.drawn) < 12
    first_banned = {place for place, banned in draft.bans.items() if banned}
    assert first_banned == {len(draft.drawn)}
    assert own_text(script, 1) == "**Bob [1]:**" + script.chat.decode(
        [d.token for d in draft.drawn]
    )
    shown = [e for e in script.events if e.type == "token" and getattr(e, "worker", "") == "Bob"]
    assert not shown


def test_a_banned_token_is_not_drawn_again_at_its_place(stage: Stage) -> None:
    words = " sleep is good for you and for me and all who live here too. "
    script = stage.script(
        {"Alice": [words], "Bob": [words]}, protocol=replace(PROSE, max_repeats=2)
    )
    banned: list[set[int]] = []

    def check(turn: Any) -> None:
        for draw in turn.draws:
            if draw.writer == 1:
                banned.append(set(draw.banned) - script.chat.structural)

    while not script.writers[1].draft or not script.writers[1].draft.attempts:
        script.step(check=check)
    draft = script.writers[1].draft
    script.step(check=check)
    assert banned[-1] == draft.bans[len(draft.drawn) - 1]
    assert not any(banned[:-1])


def test_a_worker_that_repeats_on_and_on_is_done_and_leaves_nothing(stage: Stage) -> None:
    words = " sleep is good for you and for me and all who live here too. "
    script = stage.script({"Alice": [words]}, protocol=replace(PROSE, max_repeats=1), max_steps=60)
    script.loop("Bob", words)
    while "Bob" not in ends(script):
        script.step()
    assert ends(script) == {"Bob": "repeats"}
    assert not script.writers[1].block.tokens
    assert "Bob" not in common_text(script)


def test_code_that_opens_like_another_is_rewound_and_done_at_last(stage: Stage) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n    return a\n```\n"],
        "Bob": ["def add(", "def add(", "def sub(a):\n    return -a\n```\n"],
    }
    script = stage.script(texts, protocol=replace(CODE, stagger=0), max_steps=60)
    while not any(p[0] == "Bob" for p in history(script)):
        script.step()
        assert script.turns < 60
    assert [p[2] for p in history(script)] == [
        "```python\ndef add(a):\n    return a\n```",
        "```python\ndef sub(a):\n    return -a\n```",
    ]
    assert common_text(script).count("def add") == 1


def test_the_fourth_repeat_of_code_ends_its_worker(stage: Stage) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n    return a\n```\n", *["def add("] * 8],
        "Bob": ["def sub(a):\n    return a\n    # and so on, on and on"],
    }
    script = stage.script(texts, protocol=replace(CODE, stagger=0), max_steps=80)
    rewound = 0
    while "Alice" not in ends(script):
        script.step()
        draft = script.writers[0].draft
        if draft is not None and script.writers[0].paragraph == 2:
            rewound = draft.attempts
        assert script.turns < 80
    assert rewound == 3
    assert ends(script)["Alice"] == "repeats"


def test_the_header_of_another_worker_is_cut_and_ends_the_paragraph(stage: Stage) -> None:
    script = stage.script({"Alice": [" My part.", " **Bob [7]:** And his"]})
    while not script.parallel.history:
        script.step()
    assert history(script) == [("Alice", 1, "My part.", True)]
    assert "Bob [" not in common_text(script)
    assert common_text(script).endswith("\n\n")
    assert own_text(script, 0) == "**Alice [2]:**"
    check_streams_so_far(script)


def check_streams_so_far(script: Script) -> None:
    shown = "".join(getattr(e, "text", "") for e in script.events if e.type == "token")
    assert "**" not in shown


def test_headers_are_not_guarded_where_the_protocol_says_so(stage: Stage) -> None:
    protocol = replace(PROSE, guards_headers=False)
    script = stage.script({"Alice": [" a **Bob [7]:** b.\n\n"]}, protocol=protocol)
    while not script.parallel.history:
        script.step()
    assert history(script) == [("Alice", 1, "a **Bob [7]:** b.", True)]


@pytest.mark.parametrize(
    ("protocol", "junk"),
    [
        (replace(PROSE, max_repeats=1), ["...\n\n", "---\n\n"]),
        (replace(CODE, stagger=0), ["# nothing\n```\n", "import os\n```\n", "\n```\n", "\n```\n"]),
    ],
    ids=["prose", "code"],
)
def test_a_paragraph_that_says_nothing_never_enters_the_history(
    stage: Stage, protocol: Protocol, junk: list[Any]
) -> None:
    script = stage.script({"Alice": junk}, protocol=protocol, max_steps=40)
    while "Alice" not in ends(script):
        script.step()
        assert script.turns < 40
    assert not [p for p in history(script) if p[0] == "Alice"]
    assert "Alice" not in common_text(script)


def test_a_closed_fence_at_once_ends_the_worker(stage: Stage) -> None:
    script = stage.script({"Alice": ["```\n"]}, protocol=replace(CODE, stagger=0))
    steps(script, 3)
    assert ends(script) == {"Alice": "end_of_turn"}


# The answer


def test_the_finisher_closes_the_turn_and_asks_for_the_answer(stage: Stage) -> None:
    protocol = replace(PROSE, finisher_question="Sum up, please.")
    script = stage.script({"": [" Well", END]}, protocol=protocol, max_steps=2)
    script.run()
    answer = script.session._answer
    assert answer is not None
    assert script.chat.decode(answer.block.tokens) == (
        "<|im_end|>\n<|im_start|>user\nSum up, please.<|im_end|>\n<|im_start|>assistant\n Well"
    )
    assert done(script).text == "Well"


def test_the_finisher_closes_thinking_where_the_template_thinks(
    stage: Stage, tokenizer: Any
) -> None:
    thinker = copy.deepcopy(tokenizer)
    thinker.chat_template += "{# <think> #}"
    chat = ChatFormat(thinker, "thinker", [END])
    script = stage.script({"": [" Well", END]}, chat=chat, max_steps=2)
    script.run()
    answer = script.session._answer
    assert answer is not None
    assert chat.decode(answer.block.tokens) == "</think>\n\n Well"
    common = chat.decode(script.parallel._parts.common.tokens)
    assert common.endswith("<|im_start|>assistant\n<think>\n\n")


def test_a_finisher_of_the_protocol_is_part_of_the_answer(stage: Stage) -> None:
    protocol = replace(PROSE, finisher=BOXED_FINISHER, answer_tokens=2)
    script = stage.script(
        {"": ["4", "}.", " And more"]}, protocol=protocol, max_steps=2, max_tokens=9
    )
    script.run()
    assert done(script).text == BOXED_FINISHER.lstrip() + "4}."
    assert done(script).usage.answer_tokens == 2
    check_streams(script.events)


def test_stop_strings_are_not_looked_for_in_what_the_protocol_wrote(stage: Stage) -> None:
    protocol = replace(PROSE, finisher=BOXED_FINISHER)
    script = stage.script({"": ["4", "}", " x"]}, protocol=protocol, max_steps=2, stop=("{", "}"))
    script.run()
    assert done(script).text == BOXED_FINISHER.lstrip() + "4"
    check_streams(script.events)


def test_a_header_in_the_answer_is_rewound_and_banned(stage: Stage) -> None:
    pieces: list[str | int] = [" So", "\n\n", "**", "Alice", " [", " it is", END]
    script = stage.script({"": pieces}, max_steps=1, max_tokens=20)
    banned = []

    def check(turn: Any) -> None:
        if script.answering:
            banned.extend(set(draw.banned) - script.chat.structural for draw in turn.draws)

    while script.session.finished is None:
        script.step(check=check)
    assert done(script).text == "So\n\n it is"
    stars = set(script.chat.encode("**"))
    assert [tokens for tokens in banned if tokens] == [stars]
    answer = script.session._answer
    assert answer is not None
    assert script.chat.decode(answer.block.tokens).endswith(" So\n\n it is")
    check_streams(script.events)


def test_an_answer_that_is_cut_inside_a_header_ends_before_it(stage: Stage) -> None:
    script = stage.script({"": [" So", "\n\n", "**", "Alice", " ["]}, max_steps=1, max_tokens=5)
    script.run()
    assert done(script).text == "So"
    assert done(script).finish_reason == "length"
    check_streams(script.events)


def test_an_arrival_teams_answer_has_no_white_space_at_its_ends(stage: Stage) -> None:
    script = stage.script({"": ["\n\n", " So", "\n", END]}, layout="arrival", max_steps=1)
    script.run()
    assert done(script).text == "So"
    check_streams(script.events)


def test_the_answers_repetition_penalty_counts_the_prompt(stage: Stage) -> None:
    script = stage.script({"": [" So", END]}, max_steps=1)
    script.run()
    answer = script.session._answer
    assert answer is not None
    wanted = set(script.session._prompt.tokens) | set(script.chat.encode(" So"))
    assert answer.writer.seen == wanted


def test_the_answer_sees_every_paragraph_and_open_text(stage: Stage) -> None:
    script = stage.script({"Alice": [" a.\n\n", " still open"], "Bob": [" b c d e f"]}, max_steps=5)
    views = []

    def check(turn: Any) -> None:
        if script.answering:
            views.extend(feed.view for feed in turn.feeds if feed.samples)

    while script.session.finished is None:
        script.step(check=check)
    text = script.chat.decode([token for block in views[0] for token in block.tokens])
    assert "**Alice [1]:** a.\n\n**Alice [2]:** still open\n\n**Bob [1]:** b c d e f\n\n" in text


def test_joined_paragraphs_are_the_answer_at_no_extra_step(stage: Stage) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": [" a b.\n\n", END],
        "Bob": [" c.\n\n", " d.\n\n", END],
    }
    script = stage.script(texts, answer="join")
    script.run()
    assert done(script).text == "c.\n\na b.\n\nd."
    assert done(script).finish_reason == "stop"
    assert done(script).usage.answer_tokens == 0
    assert script.turns == done(script).usage.steps
    check_streams(script.events)


def test_a_join_that_runs_out_of_steps_says_length_and_holds_what_is_open(stage: Stage) -> None:
    script = stage.script({"Alice": [" a b.\n\n", " open"]}, answer="join", max_steps=5)
    script.run()
    assert done(script).finish_reason == "length"
    assert done(script).text.startswith("a b.\n\nopen")


def test_the_answer_is_bounded_by_max_tokens(stage: Stage) -> None:
    script = stage.script(max_steps=1, max_tokens=3)
    script.run()
    assert done(script).usage.answer_tokens == 3
    assert done(script).finish_reason == "length"


# Prompts


def test_rules_stand_where_the_protocol_puts_them(stage: Stage) -> None:
    messages = (
        {"role": "system", "content": "S."},
        {"role": "user", "content": "First."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Last."},
    )
    workers = (Worker("Ann", "checks {name}"), Worker("Ben"))

    def prompt(position: Any) -> str:
        protocol = replace(PROSE, rules="{names} ({count}) work.{roles}", rules_position=position)
        script = stage.script(messages=messages, workers=workers, protocol=protocol)
        return script.chat.decode(script.parallel._parts.common.tokens)

    rules = "Ann and Ben (2) work.\n\nRoles:\n- Ann: checks {name}"
    assert f"user\nLast.\n\n{rules}<|im_end|>" in prompt("after_task")
    assert f"user\n{rules}\n\nFirst.<|im_end|>" in prompt("before_task")
    assert f"system\nS.\n\n{rules}<|im_end|>" in prompt("system")


@pytest.mark.parametrize("position", ["after_task", "before_task", "system"])
def test_rules_join_content_that_comes_in_parts(
    stage: Stage, tokenizer: Any, position: Any
) -> None:
    parted = copy.deepcopy(tokenizer)
    parted.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}|{% endfor %}"
    )
    messages = (
        {"role": "system", "content": [{"type": "text", "text": "S."}]},
        {"role": "user", "content": [{"type": "text", "text": "Task."}]},
    )
    protocol = replace(PROSE, rules="Rules.", rules_position=position)
    chat = ChatFormat(parted, "parted", [END])
    script = stage.script(chat=chat, messages=messages, protocol=protocol, answer="join")
    prompt = script.chat.decode(script.parallel._parts.common.tokens)
    assert (
        prompt.strip()
        == {
            "after_task": "S.|Task.\n\nRules.|",
            "before_task": "S.|Rules.\n\nTask.|",
            "system": "S.\n\nRules.|Task.|",
        }[position]
    )


def test_every_first_paragraph_starts_after_a_blank_line(stage: Stage) -> None:
    for protocol in (PROSE, replace(PROSE, history_header="### Past steps\n\n"), PAPER):
        script = stage.script(protocol=protocol)
        common = script.chat.decode(script.parallel._parts.common.tokens)
        assert common.endswith("\n\n")
        assert not common.endswith("\n\n\n")


# The log of passes


def test_the_log_holds_who_wrote_what_in_which_pass(stage: Stage) -> None:
    script = stage.script({"Alice": [" a b"], "Bob": [" c.\n\n"]}, max_steps=6, max_tokens=2)
    script.run()
    log = script.session._ledger.log
    assert [entry.number for entry in log] == sorted(entry.number for entry in log)
    assert log[-1].number == script.session.usage().passes - 1
    by_alice = [token for entry in log if entry.writer == 0 for token in entry.tokens]
    assert script.chat.decode(by_alice) == "**Alice [1]:** a b" + " word" * 4
    encoded = sum(len(entry.tokens) for entry in log)
    usage = done(script).usage
    # Not encoded: the answer's last token. Bob's blank line is drawn, then encoded in the history.
    assert encoded == usage.prompt_tokens + usage.forced_tokens + usage.output_tokens - 1


# Whatever workers write


def check_consistent(script: Script) -> None:
    """Blocks hold what drafts say, and nothing that was rewound, cut or moved."""
    for writer in script.writers:
        draft = writer.draft
        if draft is None or script.parallel._stream is not None:
            continue
        header = script.parallel.protocol.header_for(writer.name, writer.paragraph)
        opening = script.chat.decode(writer.block.tokens[draft.start : draft.base])
        assert opening.endswith(header + draft.forced)
        assert writer.block.tokens[draft.base :] == [d.token for d in draft.drawn]
        assert draft.shown == "" or draft.settled
        assert draft.text.lstrip().startswith(draft.shown)


FRAGMENTS: Sequence[str | int] = (
    *(" word", " Sleep is good", ".", "!\n\n", "\n", "\n\n", "...", " "),
    *("```\n", "```python\n", "def add(a):\n", "    return a\n", "x = 1\n", "import os\n"),
    *("**Alice [", "**Bob [2]:**", "STOP", "ST", "\\boxed{4}.\n\n", "🦜", "### Past steps\n\n"),
    *(END, END, 0, 1),
)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_workers_write_a_session_ends_and_is_consistent(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    protocol = replace(
        rng.choice((PROSE, PAPER, INSTRUCT, CODE)),
        stagger=rng.choice((0, 1, 5)),
        ending_token=rng.choice(("closes", "opens")),
        end_of_turn=rng.choice(("ends_paragraph", "ends_paragraph", "ends_session")),
        max_repeats=rng.choice((None, 0, 1, 3)),
        min_chars=rng.choice((0, 10)),
        intervention_tokens=rng.choice((None, 1, 20)),
        guards_headers=rng.random() < 0.5,
    )
    workers = make_workers(rng.randint(2, 5))
    texts: dict[str, list[str | int]] = {
        name: rng.choices(FRAGMENTS, k=60) for name in (*(w.name for w in workers), "")
    }
    script = stage.script(
        texts,
        protocol=protocol,
        workers=workers,
        layout=rng.choice(LAYOUTS),
        sync_interval=rng.choice((1, 1, 3, None)),
        answer=rng.choice(("write", "join")),
        stop=rng.choice(((), ("STOP",))),
        max_steps=rng.randint(1, 60),
        max_tokens=rng.randint(1, 10),
    )
    for _ in range(200):
        if script.session.finished is not None:
            break
        script.step(rng.choice((3, 10_000)) if script.session.is_prefill else 10_000)
        check_consistent(script)
    check_streams(script.events)
    usage = done(script).usage
    assert usage.steps <= script.session.request.max_steps
    assert usage.steps == len(script.of(Step))
    assert set(ends(script)) == {worker.name for worker in workers}
    if protocol.max_repeats is not None:
        assert all(p.text for p in done(script).paragraphs)
    numbers = [(p.worker, p.number) for p in done(script).paragraphs]
    assert len(numbers) == len(set(numbers))
