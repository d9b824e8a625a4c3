"""A team's answer, its prompt, and its steps, on tokens that the test chooses."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hogwild_engine import Protocol, Worker, make_workers
from hogwild_engine.api.events import Step
from hogwild_engine.api.layout import LAYOUTS
from hogwild_engine.api.protocol import BOXED_PROMPT, CODE, INSTRUCT, PAPER
from hogwild_engine.sessions.session import ScheduledStep
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import Script
from session_harness import END, PROSE, TASK, SessionHarness, done, ends, own_text
from streams import check_streams

# The answer


def test_the_finisher_closes_the_turn_and_asks_for_the_answer(sessions: SessionHarness) -> None:
    protocol = replace(PROSE, final_question="Sum up, please.")
    script = sessions.script({"": [" Well", END]}, protocol=protocol, max_steps=2)
    script.run()
    answer = script.answer
    assert script.chat.decode(answer.writer.block.tokens) == (
        "<|im_end|>\n<|im_start|>user\nSum up, please.<|im_end|>\n<|im_start|>assistant\n Well"
    )
    assert done(script).text == "Well"


def test_the_finisher_closes_thinking_where_the_template_thinks(
    sessions: SessionHarness, tokenizer: Any
) -> None:
    thinker = copy.deepcopy(tokenizer)
    thinker.chat_template += "{# <think> #}"
    chat = ChatTemplate(thinker, "thinker", [END])
    script = sessions.script({"": [" Well", END]}, chat=chat, max_steps=2)
    script.run()
    answer = script.answer
    assert chat.decode(answer.writer.block.tokens) == "</think>\n\n Well"
    common = chat.decode(script.parallel.shared.common.tokens)
    assert common.endswith("<|im_start|>assistant\n<think>\n\n")


def test_a_finisher_of_the_protocol_is_part_of_the_answer(sessions: SessionHarness) -> None:
    protocol = replace(PROSE, final_prompt=BOXED_PROMPT, answer_tokens=2)
    script = sessions.script(
        {"": ["4", "}.", " And more"]}, protocol=protocol, max_steps=2, max_tokens=9
    )
    script.run()
    assert done(script).text == BOXED_PROMPT.lstrip() + "4}."
    assert done(script).usage.answer_tokens == 2
    check_streams(script.events)


def test_stop_strings_are_not_looked_for_in_what_the_protocol_wrote(
    sessions: SessionHarness,
) -> None:
    protocol = replace(PROSE, final_prompt=BOXED_PROMPT)
    script = sessions.script(
        {"": ["4", "}", " x"]}, protocol=protocol, max_steps=2, stop=("{", "}")
    )
    script.run()
    assert done(script).text == BOXED_PROMPT.lstrip() + "4"
    check_streams(script.events)


def test_a_header_in_the_answer_is_rewound_and_banned(sessions: SessionHarness) -> None:
    pieces: list[str | int] = [" So", "\n\n", "**", "Alice", " [", " it is", END]
    script = sessions.script({"": pieces}, max_steps=1, max_tokens=20)
    banned = []

    def check(turn: Any) -> None:
        if script.answering:
            banned.extend(set(draw.banned) - script.chat.added_ids for draw in turn.rows)

    while script.session.finished is None:
        script.step(check=check)
    assert done(script).text == "So\n\n it is"
    stars = set(script.chat.encode("**"))
    assert [tokens for tokens in banned if tokens] == [stars]
    answer = script.answer
    assert script.chat.decode(answer.writer.block.tokens).endswith(" So\n\n it is")
    check_streams(script.events)


def test_a_header_for_a_tool_is_rewound_too(sessions: SessionHarness) -> None:
    """Models take tools for members of the team."""
    weigh = {"name": "weigh", "parameters": {"type": "object", "properties": {}}}
    tools = ({"type": "function", "function": weigh},)
    for name in ("weigh", "Weigh"):
        pieces: list[str | int] = ["**", name, " [", " So", END]
        script = sessions.script({"": pieces}, max_steps=1, max_tokens=20, tools=tools)
        script.run()
        assert done(script).text == "So"
        check_streams(script.events)


def test_a_team_is_asked_for_a_call_before_results_and_for_words_after_them(
    sessions: SessionHarness,
) -> None:
    weigh = {"name": "weigh", "parameters": {"type": "object", "properties": {}}}
    tools = ({"type": "function", "function": weigh},)
    call = {"id": "1", "type": "function", "function": {"name": "weigh", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "3 kg", "name": "weigh", "tool_call_id": "1"}

    def rendered(messages: tuple[Any, ...], **options: Any) -> str:
        settings = {"protocol": INSTRUCT, "max_steps": 1, **options}
        script = sessions.script({"": [" So", END]}, messages=messages, **settings)
        script.run()
        answer = script.answer
        tokens = script.parallel.shared.common.tokens + answer.writer.block.tokens
        return script.chat.decode(tokens)

    before = rendered(TASK, tools=tools)
    after = rendered((*TASK, asked, result), tools=tools)
    assert all("no tool can be called" in text for text in (before, after))
    assert "Now call a tool" in before
    assert "using what the tools have given" in after
    for text in (rendered(TASK), rendered(TASK, tools=tools, tool_choice="none")):
        assert "tool can be called" not in text
        assert "complete final answer" in text


def test_an_answer_that_is_cut_inside_a_header_ends_before_it(sessions: SessionHarness) -> None:
    script = sessions.script({"": [" So", "\n\n", "**", "Alice", " ["]}, max_steps=1, max_tokens=5)
    script.run()
    assert done(script).text == "So"
    assert done(script).finish_reason == "length"
    check_streams(script.events)


def test_an_arrival_teams_answer_has_no_white_space_at_its_ends(sessions: SessionHarness) -> None:
    script = sessions.script({"": ["\n\n", " So", "\n", END]}, layout="arrival", max_steps=1)
    script.run()
    assert done(script).text == "So"
    check_streams(script.events)


def test_the_answers_repetition_penalty_counts_the_prompt(sessions: SessionHarness) -> None:
    script = sessions.script({"": [" So", END]}, max_steps=1)
    script.run()
    answer = script.answer
    wanted = set(script.session._context.prompt.tokens) | set(script.chat.encode(" So"))
    assert answer.writer.seen == wanted


def test_the_answer_sees_every_paragraph_and_open_text(sessions: SessionHarness) -> None:
    script = sessions.script(
        {"Alice": [" a.\n\n", " still open"], "Bob": [" b c d e f"]}, max_steps=5
    )
    views = []

    def check(turn: Any) -> None:
        if script.answering:
            views.extend(chunk.view for chunk in turn.chunks if chunk.samples)

    while script.session.finished is None:
        script.step(check=check)
    text = script.chat.decode([token for block in views[0] for token in block.tokens])
    assert (
        "**Alice [1]:** a.\n\n**Alice [2]:** still open (unfinished)\n\n"
        "**Bob [1]:** b c d e f (unfinished)\n\n"
    ) in text


def test_joined_paragraphs_are_the_answer_at_no_extra_step(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": [" a b.\n\n", END],
        "Bob": [" c.\n\n", " d.\n\n", END],
    }
    script = sessions.script(texts, answer="join")
    script.run()
    assert done(script).text == "c.\n\na b.\n\nd."
    assert done(script).finish_reason == "stop"
    assert done(script).usage.answer_tokens == 0
    assert script.turns == done(script).usage.steps
    check_streams(script.events)


def test_a_join_that_runs_out_of_steps_says_length_and_leaves_out_what_is_open(
    sessions: SessionHarness,
) -> None:
    script = sessions.script({"Alice": [" a b.\n\n", " open"]}, answer="join", max_steps=5)
    script.run()
    assert done(script).finish_reason == "length"
    assert done(script).text == "a b."
    assert [(p.text, p.complete) for p in done(script).paragraphs[:2]] == [
        ("a b.", True),
        ("open", False),
    ]


def test_a_join_of_nothing_but_cut_paragraphs_is_what_they_hold(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": [" a"], "Bob": [" b"]}, answer="join", max_steps=1)
    script.run()
    assert done(script).finish_reason == "length"
    assert done(script).text == "a\n\nb"


def test_a_joined_answer_of_code_runs(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {
        "Alice": ["x = two(3)\n```\n", "flatten(nested)\n```\n", "return 1\n```\n"],
        "Bob": ["def two(n):\n    return 2 * n\n```\n"],
    }
    protocol = replace(CODE, stagger=0)
    script = sessions.script(texts, protocol=protocol, answer="join", max_steps=40)
    script.run()
    assert {p.text for p in done(script).paragraphs if p.complete} >= {
        "```python\nx = two(3)\n```",
        "```python\nflatten(nested)\n```",
        "```python\nreturn 1\n```",
    }
    code = done(script).text.replace("```python", "").replace("```", "")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["x"] == 6


def test_a_cut_paragraph_shows_and_keeps_no_start_of_a_header(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": [" a b", " **", "Bob"]}, max_steps=4)
    while not script.answering:
        script.step()
    assert [(p.text, p.complete) for p in script.parallel.history if p.worker == "Alice"] == [
        ("a b", False)
    ]
    assert "**Bob" not in own_text(script, 0).removeprefix("**Alice [1]:**")
    script.run()
    check_streams(script.events)


@pytest.mark.parametrize(("protocol", "mark"), [(PROSE, " (unfinished)"), (PAPER, "")])
def test_the_writer_of_the_answer_reads_what_is_unfinished(
    sessions: SessionHarness, protocol: Protocol, mark: str
) -> None:
    script = sessions.script({"Alice": [" a b"]}, protocol=protocol, max_steps=6)
    while not script.answering:
        script.step()
    assert own_text(script, 0).endswith(" word" + mark)
    assert not any("unfinished" in p.text for p in script.parallel.history)


def test_a_cut_block_of_code_is_closed_before_the_mark(sessions: SessionHarness) -> None:
    texts: dict[str, list[str | int]] = {"Alice": ["x = 1\n"], "Bob": ["y = 1\n"]}
    script = sessions.script(texts, protocol=replace(CODE, stagger=0), max_steps=6)
    while not script.answering:
        script.step()
    assert own_text(script, 0).endswith("\n```\n (unfinished)")


def test_the_answer_is_bounded_by_max_tokens(sessions: SessionHarness) -> None:
    script = sessions.script(max_steps=1, max_tokens=3)
    script.run()
    assert done(script).usage.answer_tokens == 3
    assert done(script).finish_reason == "length"


# Prompts


def test_rules_stand_where_the_protocol_puts_them(sessions: SessionHarness) -> None:
    messages = (
        {"role": "system", "content": "S."},
        {"role": "user", "content": "First."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Last."},
    )
    workers = (Worker("Ann", "checks {name}"), Worker("Ben"))

    def prompt(position: Any) -> str:
        protocol = replace(PROSE, rules="{names} ({count}) work.{roles}", rules_position=position)
        script = sessions.script(messages=messages, workers=workers, protocol=protocol)
        return script.chat.decode(script.parallel.shared.common.tokens)

    rules = "Ann and Ben (2) work.\n\nRoles:\n- Ann: checks {name}"
    assert f"user\nLast.\n\n{rules}<|im_end|>" in prompt("after_task")
    assert f"user\n{rules}\n\nFirst.<|im_end|>" in prompt("before_task")
    assert f"system\nS.\n\n{rules}<|im_end|>" in prompt("system")


@pytest.mark.parametrize("position", ["after_task", "before_task", "system"])
def test_rules_join_content_that_comes_in_parts(
    sessions: SessionHarness, tokenizer: Any, position: Any
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
    chat = ChatTemplate(parted, "parted", [END])
    script = sessions.script(chat=chat, messages=messages, protocol=protocol, answer="join")
    prompt = script.chat.decode(script.parallel.shared.common.tokens)
    assert (
        prompt.strip()
        == {
            "after_task": "S.|Task.\n\nRules.|",
            "before_task": "S.|Rules.\n\nTask.|",
            "system": "S.\n\nRules.|Task.|",
        }[position]
    )


def test_every_first_paragraph_starts_after_a_blank_line(sessions: SessionHarness) -> None:
    for protocol in (PROSE, replace(PROSE, history_header="### Past steps\n\n"), PAPER):
        script = sessions.script(protocol=protocol)
        common = script.chat.decode(script.parallel.shared.common.tokens)
        assert common.endswith("\n\n")
        assert not common.endswith("\n\n\n")


# What is encoded


def test_every_token_is_encoded_once(sessions: SessionHarness) -> None:
    script = sessions.script({"Alice": [" a b"], "Bob": [" c.\n\n"]}, max_steps=6, max_tokens=2)
    by_alice: list[int] = []
    encoded = 0

    def check(scheduled: ScheduledStep) -> None:
        nonlocal encoded
        encoded += sum(chunk.count for chunk in scheduled.chunks)
        for block, start, count in ((c.block, c.start, c.count) for c in scheduled.chunks):
            if block is script.writers[0].block:
                by_alice.extend(block.tokens[start : start + count])

    while script.session.finished is None:
        script.step(check=check)
    assert script.chat.decode(by_alice) == "**Alice [1]:** a b" + " word" * 4 + " (unfinished)"
    usage = done(script).usage
    # Not encoded: the answer's last token. Bob's blank line is encoded in the history.
    assert encoded == usage.prompt_tokens + usage.forced_tokens + usage.output_tokens - 1


# Whatever workers write


def check_consistent(script: Script) -> None:
    """Blocks hold what drafts say, and nothing that was rewound, cut or moved."""
    for writer in script.writers:
        draft = writer.draft
        if draft is None or script.parallel.layout.single_stream:
            continue
        header = script.parallel.protocol.header_for(writer.name, writer.paragraph)
        opening = script.chat.decode(writer.block.tokens[draft.start : draft.base])
        assert opening.endswith(header + draft.forced)
        assert writer.block.tokens[draft.base :] == [d.token for d in draft.sampled]
        assert draft.shown == "" or draft.committed
        assert draft.text.lstrip().startswith(draft.shown)


FRAGMENTS: Sequence[str | int] = (
    *(" word", " Sleep is good", ".", "!\n\n", "\n", "\n\n", "...", " "),
    *("```\n", "```python\n", "def add(a):\n", "    return a\n", "x = 1\n", "import os\n"),
    *("**Alice [", "**Bob [2]:**", "STOP", "ST", "\\boxed{4}.\n\n", "🦜", "### Past steps\n\n"),
    *(END, END, 0, 1),
)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_workers_write_a_session_ends_and_is_consistent(
    sessions: SessionHarness, seed: int
) -> None:
    rng = random.Random(seed)
    protocol = replace(
        rng.choice((PROSE, PAPER, INSTRUCT, CODE)),
        stagger=rng.choice((0, 1, 5)),
        ending_token=rng.choice(("closes", "opens")),
        end_of_turn=rng.choice(("ends_paragraph", "ends_paragraph", "ends_session")),
        max_repeats=rng.choice((None, 0, 1, 3)),
        min_chars=rng.choice((0, 10)),
        intervention_tokens=rng.choice((None, 1, 20)),
        forbids_headers=rng.random() < 0.5,
    )
    workers = make_workers(rng.randint(2, 5))
    texts: dict[str, list[str | int]] = {
        name: rng.choices(FRAGMENTS, k=60) for name in (*(w.name for w in workers), "")
    }
    script = sessions.script(
        texts,
        protocol=protocol,
        workers=workers,
        layout=LAYOUTS[rng.choice(list(LAYOUTS))].name,
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
