"""What workers write that is not taken: repeats, headers of others, junk; tokens are the test's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Grammar, Protocol
from hogwild_engine.api.protocol import CODE
from model_harness import Script
from session_harness import END, PROSE, SessionHarness, common_text, ends, history, own_text, steps


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


def test_a_closed_fence_at_once_ends_the_worker(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": ["```\n"]}, protocol=replace(CODE, stagger=0))
    steps(script, 3)
    assert ends(script) == {"Alice": "end_of_turn"}
