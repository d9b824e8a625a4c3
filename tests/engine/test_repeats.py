"""What workers write that is not taken: repeats, headers of others, junk; tokens are the test's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Grammar, Protocol
from hogwild_engine.api.events import DraftDropped, DraftToken, Token, WorkerFinished
from hogwild_engine.api.protocol import CODE
from model_harness import Script
from session_harness import (
    END,
    PROSE,
    SessionHarness,
    common_text,
    done,
    ends,
    history,
    own_text,
)
from streams import check_streams


def test_prose_that_repeats_is_rewound_and_its_weakest_token_banned(
    sessions: SessionHarness,
) -> None:
    words = " sleep is good for you and for me and all who live here too. "
    texts: dict[str, list[str | int]] = {
        "Alice": [words, "\n\n"],
        "Bob": [words, " but then"],
    }
    script = sessions.script(texts, protocol=replace(PROSE, max_repeats=1), max_steps=60)
    while not script.writers[1].draft or not script.writers[1].draft.rewinds:
        script.step()
    draft = script.writers[1].draft
    assert len(draft.sampled) < 12
    first_banned = {place for place, banned in draft.banned_ids.items() if banned}
    assert first_banned == {len(draft.sampled)}
    assert own_text(script, 1) == "**Bob [1]:**" + script.chat.decode(
        [d.token for d in draft.sampled]
    )
    shown = [e for e in script.events if e.type == "token" and getattr(e, "worker", "") == "Bob"]
    assert not shown


def test_a_banned_token_is_not_drawn_again_at_its_place(sessions: SessionHarness) -> None:
    words = " sleep is good for you and for me and all who live here too. "
    script = sessions.script(
        {"Alice": [words], "Bob": [words]}, protocol=replace(PROSE, max_repeats=2)
    )
    banned: list[set[int]] = []

    def check(turn: Any) -> None:
        for draw in turn.rows:
            if draw.writer == 1:
                banned.append(set(draw.banned) - script.chat.added_ids)

    while not script.writers[1].draft or not script.writers[1].draft.rewinds:
        script.step(check=check)
    draft = script.writers[1].draft
    script.step(check=check)
    assert banned[-1] == draft.banned_ids[len(draft.sampled) - 1]
    assert not any(banned[:-1])


def test_a_worker_that_repeats_on_and_on_is_done_and_leaves_nothing(
    sessions: SessionHarness,
) -> None:
    words = " sleep is good for you and for me and all who live here too. "
    script = sessions.script(
        {"Alice": [words]}, protocol=replace(PROSE, max_repeats=1), max_steps=60
    )
    script.loop("Bob", words)
    while "Bob" not in ends(script):
        script.step()
    assert ends(script) == {"Bob": "repeats"}
    assert not script.writers[1].block.tokens
    assert "Bob" not in common_text(script)


def test_code_that_opens_like_another_is_rewound_and_done_at_last(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n    return a\n```\n"],
        "Bob": ["def add(", "def add(", "def sub(a):\n    return -a\n```\n"],
    }
    script = sessions.script(texts, protocol=replace(CODE, stagger=0), max_steps=60)
    while not any(p[0] == "Bob" for p in history(script)):
        script.step()
        assert script.turns < 60
    assert [p[2] for p in history(script)] == [
        "```python\ndef add(a):\n    return a\n```",
        "```python\ndef sub(a):\n    return -a\n```",
    ]
    assert common_text(script).count("def add") == 1


def test_the_fourth_repeat_of_code_ends_its_worker(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n    return a\n```\n", *["def add("] * 8],
        "Bob": ["def sub(a):\n    return a\n    # and so on, on and on"],
    }
    script = sessions.script(texts, protocol=replace(CODE, stagger=0), max_steps=80)
    rewound = 0
    while "Alice" not in ends(script):
        script.step()
        draft = script.writers[0].draft
        if draft is not None and script.writers[0].paragraph == 2:
            rewound = draft.rewinds
        assert script.turns < 80
    assert rewound == 3
    assert ends(script)["Alice"] == "repeats"


def test_the_header_of_another_worker_is_cut_and_ends_the_paragraph(
    sessions: SessionHarness,
) -> None:
    script = sessions.script({"Alice": [" My part.", " **Bob [7]:** And his"]})
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


def test_headers_are_not_guarded_where_the_protocol_says_so(sessions: SessionHarness) -> None:
    protocol = replace(PROSE, forbids_headers=False)
    script = sessions.script({"Alice": [" a **Bob [7]:** b.\n\n"]}, protocol=protocol)
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
    sessions: SessionHarness, protocol: Protocol, junk: list[Any]
) -> None:
    script = sessions.script({"Alice": junk}, protocol=protocol, max_steps=40)
    while "Alice" not in ends(script):
        script.step()
        assert script.turns < 40
    assert not [p for p in history(script) if p[0] == "Alice"]
    assert "Alice" not in common_text(script)


@pytest.mark.parametrize(
    ("stub", "body"),
    [
        (["    pass\n```\n"], " return a"),
        (["    ...\n\n\n\n\n"], " return a"),
        (["```\n"], "    return a"),
        (["    pass\n", END], " return a"),
        ([END], "    return a"),
    ],
    ids=["pass", "dots", "nothing", "pass-end-of-turn", "end-of-turn"],
)
def test_a_stub_is_rewound_to_its_missing_body_and_shows_nothing_before(
    sessions: SessionHarness, stub: list[str | int], body: str
) -> None:
    head = "def add(a):\n    # Give it back\n"
    texts: dict[str, list[str | int]] = {"Alice": [head, *stub, body + "\n```\n"]}
    script = sessions.script(texts, protocol=replace(CODE, stagger=9), max_steps=60)
    while not script.writers[0].draft or not script.writers[0].draft.rewinds:
        script.step()
        assert not script.writers[0].done
    draft = script.writers[0].draft
    assert draft.text.rstrip() == "```python\n" + head.rstrip()
    assert set(draft.banned_ids) == {len(draft.sampled)}
    assert (END in draft.banned_ids[len(draft.sampled)]) == (stub == [END])
    assert not [e for e in script.events if e.type == "token"]
    while not script.parallel.history:
        script.step()
        assert script.turns < 60
    shown = "".join(getattr(e, "text", "") for e in script.events if e.type == "token")
    assert shown == f"```python\n{head}    return a\n```"
    assert [p[2] for p in history(script)] == [shown]


def test_the_fourth_end_of_turn_at_a_stub_ends_its_worker(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {"Alice": ["def add(a):\n", END, END, END, END, "    no"]}
    script = sessions.script(texts, protocol=replace(CODE, stagger=9), max_steps=60)
    while "Alice" not in ends(script):
        script.step()
        assert script.turns < 60
    assert ends(script) == {"Alice": "repeats"}
    assert not script.writers[0].block.tokens
    assert not [e for e in script.events if e.type == "token"]


def test_an_end_of_turn_behind_a_body_s_indent_leaves_the_indent(sessions: SessionHarness) -> None:
    head = "def add(a):\n    # Give it back\n        "
    texts: dict[str, list[str | int]] = {"Alice": [head, END, "return a\n```\n"]}
    script = sessions.script(texts, protocol=replace(CODE, stagger=9), max_steps=60)
    while not script.parallel.history:
        script.step()
        assert script.turns < 60
    assert [p[2] for p in history(script)] == [f"```python\n{head}return a\n```"]


def test_what_a_grammar_ends_is_kept_even_where_it_says_nothing(sessions: SessionHarness) -> None:
    grammar = Grammar("regex", r"def [a-z]+\(a\):\n( +(pass|return a)\n)?")
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n", END],
        "Bob": ["def sub(a):\n    pass\n", END],
    }
    protocol = replace(CODE, stagger=0)
    script = sessions.script(texts, protocol=protocol, worker_grammar=grammar, max_steps=60)
    while len(ends(script)) < 2:
        script.step()
        assert script.turns < 60
    assert ends(script) == {"Alice": "end_of_turn", "Bob": "end_of_turn"}
    assert {p[0]: p[2] for p in history(script)} == {
        "Alice": "def add(a):",
        "Bob": "def sub(a):\n    pass",
    }


def test_a_stub_ends_its_worker_where_the_protocol_rewinds_nothing(
    sessions: SessionHarness,
) -> None:
    protocol = replace(CODE, stagger=9, max_repeats=None)
    script = sessions.script({"Alice": ["def add(a):\n", END]}, protocol=protocol)
    while "Alice" not in ends(script):
        script.step()
        assert script.turns < 60
    assert ends(script) == {"Alice": "end_of_turn"}


def test_a_stub_in_the_stream_of_all_workers_is_never_rewound(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {"Alice": ["def add(a):\n", END], "Bob": ["def sub(b):\n"]}
    protocol = replace(CODE, stagger=0)
    script = sessions.script(texts, protocol=protocol, layout="arrival", max_steps=60)
    while "Alice" not in ends(script):
        before = list(script.writers[0].block.tokens)
        script.step()
        assert script.writers[0].block.tokens[: len(before)] == before
        assert script.turns < 60
    assert ends(script)["Alice"] == "end_of_turn"


@pytest.mark.parametrize("leaves", ["```\n", END], ids=["closed fence", "end of turn"])
def test_a_worker_that_has_written_nothing_stays_unless_it_insists(
    sessions: SessionHarness, leaves: str | int
) -> None:
    protocol = replace(CODE, stagger=0)
    code = "def add(a):\n    return a\n```\n"
    script = sessions.script({"Alice": [leaves, code, leaves]}, protocol=protocol, max_steps=60)
    while "Alice" not in ends(script):
        script.step()
    (text,) = [p[2] for p in history(script) if p[0] == "Alice"]
    assert text.split("\n", 1)[1].strip() == "def add(a):\n    return a\n```"
    assert ends(script)["Alice"] == "end_of_turn"
    script = sessions.script({"Alice": [leaves] * 4}, protocol=protocol, max_steps=60)
    while "Alice" not in ends(script):
        script.step()
        assert script.turns < 12
    assert ends(script)["Alice"] in ("end_of_turn", "repeats")
    assert not script.writers[0].block.tokens


def test_a_worker_leaves_at_once_after_its_share(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": [" My part.\n\n", END]}, protocol=PROSE)
    while "Alice" not in ends(script):
        script.step()
    finished = script.of(WorkerFinished)[0]
    assert (finished.worker, finished.reason) == ("Alice", "end_of_turn")
    script.run()
    assert done(script).end_steps["Alice"] == finished.step
    assert set(done(script).end_steps) == {"Alice", "Bob"}


# Items


CODE_TASK = ({"role": "user", "content": "Write Python functions: add(a), sub(a), neg(a)."},)


def code_script(sessions: SessionHarness, texts: dict[str, list[str | int]]) -> Script:
    protocol = replace(CODE, stagger=0)
    return sessions.script(texts, messages=CODE_TASK, protocol=protocol, max_steps=80)


@pytest.mark.parametrize(
    "extra",
    ["add(1)\n", "print(add(1))\n", "def is_add(a):\n", "assert add(1) == 1\n", "x = add(2)\n"],
)
def test_code_that_the_task_does_not_name_is_no_share_of_a_worker_that_wrote_what_it_names(
    sessions: SessionHarness, extra: str
) -> None:
    done_add = "def add(a):\n    return a\n```\n"
    script = code_script(
        sessions,
        {"Alice": [done_add, *[extra] * 4], "Bob": ["def sub(a):\n    # on and on and on"]},
    )
    while "Alice" not in ends(script):
        script.step()
        assert script.turns < 60
    assert ends(script)["Alice"] == "repeats"
    assert [p[2] for p in history(script) if p[0] == "Alice"] == [
        "```python\ndef add(a):\n    return a\n```"
    ]
    assert extra.strip() not in common_text(script)


def test_a_worker_whose_own_code_the_task_does_not_name_goes_on(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["assert add(1)\n```\n", "assert sub(1)\n```\n", "assert neg(1)\n```\n", END]
    }
    script = code_script(sessions, texts)
    while "Alice" not in ends(script):
        script.step()
    assert sum(p[0] == "Alice" for p in history(script)) == 3


def test_a_function_that_another_wrote_is_rewound_inside_a_block_too(
    sessions: SessionHarness,
) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n    return a\n```\n"],
        "Bob": ["def sub(a):\n    return -a\n\n", "def add(", "def neg(a):\n    return 0\n```\n"],
    }
    script = code_script(sessions, texts)
    while not any(p[0] == "Bob" for p in history(script)):
        script.step()
        assert script.turns < 60
    assert [p[2] for p in history(script) if p[0] == "Bob"] == [
        "```python\ndef sub(a):\n    return -a\n\ndef neg(a):\n    return 0\n```"
    ]
    script.run()
    check_streams(script.events)


LONG_LIST = " Sights to see, each of them worth an hour of your time in Rome, are:\n- The Forum\n"


def test_a_line_of_a_list_is_written_once(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": [LONG_LIST, "- Vatican Museums\n"],
        "Bob": [
            " Days are full of things that we can do, and here are some of the best:\n- Trevi\n",
            "- Vatican Museums\n",
            "- Pantheon\n",
        ],
    }
    protocol = replace(PROSE, max_repeats=1)
    script = sessions.script(texts, protocol=protocol, max_steps=70)
    script.run()
    shown = {p.worker: p.text for p in done(script).paragraphs}
    assert sum(text.count("- Vatican Museums") for text in shown.values()) == 1
    assert "- Pantheon" in shown["Bob"]
    check_streams(script.events)


def test_a_worker_that_repeats_lines_on_and_on_is_done_before_them(
    sessions: SessionHarness,
) -> None:
    script = sessions.script(
        {"Alice": [LONG_LIST, *["- The Forum\n"] * 9]},
        protocol=replace(PROSE, max_repeats=1),
        max_steps=90,
    )
    while "Alice" not in ends(script):
        script.step()
    assert ends(script)["Alice"] == "repeats"
    (paragraph,) = [p for p in history(script) if p[0] == "Alice"]
    assert paragraph[2].count("- The Forum") == 1
    script.run()
    check_streams(script.events)


def test_a_sentence_that_comes_back_ends_its_paragraph(sessions: SessionHarness) -> None:
    script = sessions.script(
        {"Alice": [" We will bake a cake.", " Then we sing.", " We will bake a cake.", END]},
        protocol=replace(PROSE, max_repeats=1),
    )
    while not history(script):
        script.step()
    assert history(script)[0][2] == "We will bake a cake. Then we sing. We will bake a cake."


def test_the_task_counts_as_taken(sessions: SessionHarness) -> None:
    task = "Plan a weekend in Rome: food, sights, transport and budget, for two people."
    echo = f" {task}\n\n"
    for max_repeats, texts in ((1, []), (None, [task])):
        script = sessions.script(
            {"Alice": [echo, END], "Bob": [" Of course.\n\n", END]},
            messages=({"role": "user", "content": task},),
            protocol=replace(PROSE, max_repeats=max_repeats),
        )
        script.run()
        assert [p[2] for p in history(script) if p[0] == "Alice"][:1] == texts


def test_a_draft_is_told_before_it_counts_and_so_is_its_end(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["def add(a):\n    return a\n```\n"],
        "Bob": ["def add(", "def sub(a):\n    return -a\n```\n"],
    }
    script = code_script(sessions, texts)
    while not any(p[0] == "Bob" for p in history(script)):
        script.step()
    told, dropped, shown = "", "", ""
    for event in script.events:
        if getattr(event, "worker", "") != "Bob":
            continue
        if isinstance(event, DraftToken):
            told += event.text
        elif isinstance(event, DraftDropped):
            assert event.text == told
            dropped, told = dropped + event.text, ""
        elif isinstance(event, Token):
            shown, told = shown + event.text, ""
    assert "def add" in dropped
    assert shown == "```python\ndef sub(a):\n    return -a\n```"
