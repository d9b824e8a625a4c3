"""What a reader sees of a session: plain lines, JSON lines, and the live view of a terminal."""

from __future__ import annotations

import io
import json
from itertools import count

import pytest
from rich.cells import cell_len
from rich.console import Console

from hogwild_agents.cli.live_view import Frame, LiveView
from hogwild_agents.cli.session_state import SessionState
from hogwild_agents.cli.view import JsonView, PlainView, printable, summary
from hogwild_engine.api.events import (
    AnswerToken,
    DraftDropped,
    DraftToken,
    Event,
    Finished,
    Paragraph,
    ParagraphFinished,
    Step,
    ThoughtToken,
    Token,
    Usage,
    WorkerFinished,
)
from hogwild_engine.api.request import make_workers

MARKUP = "[bold]x[/] [/red] :smile: \\[y]"
WIDE = "日本語の文章です。" * 6
TEAM_SIZES = [1, 2, 8, 40]


def names(size: int) -> list[str]:
    return [worker.name for worker in make_workers(size)]


def wrote(worker: str, text: str, *, number: int = 1, complete: bool = True) -> ParagraphFinished:
    return ParagraphFinished(4, 0, Paragraph(worker, number, text, complete, 4))


def answered(text: str, **usage: object) -> Finished:
    return Finished(text, "stop", (), Usage(**usage), seed=1)  # type: ignore[arg-type]


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, highlight=False
    )


def frame(state: SessionState, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(Frame(state))
    return file_of(console).splitlines()


def file_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(*events: Event) -> tuple[str, str]:
    """Return what a plain view with a log writes: the answer, and what goes beside it."""
    out, log = io.StringIO(), io.StringIO()
    with PlainView(out, log) as view:
        for event in events:
            view.show(event)
    return out.getvalue(), log.getvalue()


def state_of(size: int, text: str) -> SessionState:
    state = SessionState(names(size), clock=count(step=0.5).__next__)
    for name in state.workers:
        state.apply(Token(1, name, 1, text))
    state.apply(Step(1, tuple(state.workers)))
    return state


def test_plain_view_tells_a_paragraph_when_it_is_finished_and_by_whom() -> None:
    output = plain(Token(1, "Bob", 1, "Tea"), Step(1, ("Bob",)), wrote("Bob", " Tea is hot.\n\n"))
    assert output == ("", "Bob [1]: Tea is hot.\n\n")


def test_plain_view_starts_text_of_several_lines_on_its_own_line() -> None:
    _, log = plain(wrote("Bob", "```python\nx = 1\n```\n"))
    assert log == "Bob [1]:\n```python\nx = 1\n```\n\n"


def test_plain_view_marks_a_paragraph_that_was_cut() -> None:
    assert plain(wrote("Bob", "Tea is", complete=False)) == ("", "Bob [1] (cut): Tea is\n\n")


def test_plain_view_writes_the_answer_alone_and_all_else_beside_it() -> None:
    finished = answered("Tea, then.", worker_tokens={"Ann": 3, "Bob": 4}, answer_tokens=3)
    events = wrote("Bob", "Tea."), AnswerToken("\n Tea,"), AnswerToken(" then."), finished
    assert plain(*events) == ("Tea, then.\n", f"Bob [1]: Tea.\n\n{summary(finished)}\n")
    out = io.StringIO()
    with PlainView(out) as view:
        for event in events:
            view.show(event)
    assert out.getvalue() == "Tea, then.\n"


def test_plain_view_tells_thoughts_beside_the_answer() -> None:
    finished = answered("Tea.", answer_tokens=2)
    thoughts = ThoughtToken("\n Hot"), ThoughtToken(" or cold?")
    output = plain(*thoughts, AnswerToken("\nTea."), finished)
    assert output == ("Tea.\n", f"Thoughts:\nHot or cold?\n\n{summary(finished)}\n")


def test_live_view_shows_thoughts_until_the_answer_begins() -> None:
    state = state_of(1, "")
    state.apply(ThoughtToken("Hot or cold?"))
    assert any("thoughts" in line for line in frame(state))
    assert any("Hot or cold?" in line for line in frame(state))
    state.apply(AnswerToken("Tea."))
    assert not any("Hot or cold?" in line for line in frame(state))


def test_plain_view_flushes_what_it_writes() -> None:
    class Out(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed = len(self.getvalue())

    out = Out()
    PlainView(out).show(AnswerToken("Tea"))
    assert out.flushed == len("Tea")


def test_json_view_writes_one_object_an_event_and_the_answer_last() -> None:
    out = io.StringIO()
    with JsonView(out) as view:
        for event in (Step(1, ("Bob",)), Token(1, "Bob", 1, "é\n\x1b"), answered("Tea.", steps=1)):
            view.show(event)
    step, token, answer = map(json.loads, out.getvalue().splitlines())
    assert step == {"type": "step", "step": 1, "active": ["Bob"]}
    assert token["text"] == "é\n\x1b"
    assert (answer["type"], answer["text"], answer["usage"]["steps"]) == ("answer", "Tea.", 1)


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\nd\te\x7f") == "a�[2Jb��c\nd\te�"


def test_the_summary_is_one_line_with_every_cost() -> None:
    usage = {"worker_tokens": {"Ann": 30, "Bob": 28}, "answer_tokens": 12, "steps": 31}
    line = summary(answered("", **usage, duration_s=2.0, stored_tokens=90, private_tokens=150))
    assert line == (
        "31 steps, 70 tokens (Ann 30, Bob 28, answer 12) in 2.0 s, 35.0 tokens/s; "
        "cache: 90 tokens stored, 150 in 2 private caches"
    )


def test_the_summary_of_one_worker_names_no_team() -> None:
    line = summary(answered("", answer_tokens=1, duration_s=0.5, stored_tokens=9))
    assert line == "1 token in 0.5 s, 2.0 tokens/s; cache: 9 tokens stored"


def test_the_summary_says_when_something_was_cut() -> None:
    assert "budget" in summary(Finished("", "length", (), Usage(), seed=1))


def test_workers_stand_side_by_side_with_what_they_have_open() -> None:
    state = SessionState(["Ann", "Bob"])
    state.apply(Token(1, "Ann", 1, "Tea is"))
    state.apply(Token(1, "Bob", 2, "Coffee is"))
    lines = frame(state)
    assert any("Ann [1]" in line and "Bob [2]" in line for line in lines)
    assert any("Tea is" in line and "Coffee is" in line for line in lines)


def test_a_finished_paragraph_leaves_its_desk() -> None:
    state = SessionState(["Ann", "Bob"])
    state.apply(Token(1, "Ann", 1, "Tea is hot."))
    state.apply(wrote("Ann", "Tea is hot."))
    shown = "\n".join(frame(state))
    assert "Tea" not in shown
    assert "Ann [2]" in shown


def test_the_frame_says_why_a_worker_writes_no_more() -> None:
    state = SessionState(["Ann", "Bob"])
    state.apply(WorkerFinished(3, "Ann", "end_of_turn"))
    assert "Ann: done" in "\n".join(frame(state))


def test_the_frame_tells_steps_and_tokens_a_second() -> None:
    times = iter([10.0, 10.0, 10.0, 12.0, 12.0])
    state = SessionState(["Ann", "Bob"], clock=times.__next__)
    state.apply(Step(1, ("Ann", "Bob")))
    state.apply(Step(2, ("Ann", "Bob")))
    assert frame(state)[-1].strip() == "step 2 · 1.0 steps/s · 2.0 tokens/s · 2.0 s"


def test_the_speed_of_steps_stands_while_the_answer_is_written() -> None:
    times = iter([0.0, 10.0, 12.0, 12.0, 20.0, 22.0])
    state = SessionState(["Ann", "Bob"], clock=times.__next__)
    state.apply(Step(1, ("Ann", "Bob")))
    state.apply(Step(2, ("Ann", "Bob")))
    speed = state.speed().partition(" · ")[2].partition(" · ")[0]
    state.apply(AnswerToken("Tea"))
    assert speed in state.speed()


def test_the_frame_shows_drafts_until_they_are_dropped() -> None:
    state = SessionState(["Ann", "Bob"])
    state.apply(DraftToken(1, "Ann", 1, "Tea"))
    state.apply(DraftToken(2, "Ann", 1, " is hot"))
    assert any("Tea is hot" in line for line in frame(state))
    state.apply(DraftDropped(3, "Ann", 1, "Tea is hot"))
    assert not any("Tea" in line for line in frame(state))
    state.apply(DraftToken(4, "Ann", 1, "Cocoa"))
    state.apply(Token(5, "Ann", 1, "Cocoa is"))
    assert any("Cocoa is" in line for line in frame(state))
    assert not any("CocoaCocoa" in line for line in frame(state))


def test_live_view_prints_a_joined_answer_once() -> None:
    console = terminal()
    paragraph = Paragraph("Ann", 1, "Tea is hot.")
    with LiveView(console, ["Ann", "Bob"]) as view:
        view.show(ParagraphFinished(4, 0, paragraph))
        view.show(Finished("Tea is hot.", "stop", (paragraph,), Usage(), seed=1))
    assert file_of(console).count("Tea is hot.") == 1


def test_the_frame_shows_the_end_of_a_long_paragraph() -> None:
    text = " ".join(f"word{i}" for i in range(500))
    assert any("word499" in line for line in frame(state_of(2, text)))


@pytest.mark.parametrize("size", TEAM_SIZES)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (30, 10), (12, 5)])
@pytest.mark.parametrize("text", [MARKUP, WIDE, "a" * 900, "one\ttwo\nthree\n" * 20, ""])
def test_a_frame_fits_the_terminal(size: int, width: int, height: int, text: str) -> None:
    state = state_of(size, text)
    if size == 1:
        state.apply(AnswerToken(text))
    lines = frame(state, width, height)
    assert len(lines) < height
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_live_view_leaves_history_answer_and_summary(size: int) -> None:
    team, console = names(size), terminal()
    finished = answered("Both are hot.", steps=4)
    with LiveView(console, team) as view:
        for name in team[1:]:
            view.show(wrote(name, f"Tea of {name}."))
        view.show(AnswerToken("Both are hot."))
        view.show(finished)
    output = file_of(console)
    for name in team[1:]:
        assert f"{name} [1]:" in output
        assert f"Tea of {name}." in output
    assert "Both are hot." in output
    assert summary(finished)[:20] in output


@pytest.mark.parametrize("text", [MARKUP, "[link=file:///etc]x[/link]"])
def test_live_view_never_reads_text_as_markup(text: str) -> None:
    console = terminal(width=120)
    with LiveView(console, ["Ann", "Bob"]) as view:
        view.show(Token(1, "Ann", 1, text))
        view.show(wrote("Bob", text))
        view.show(answered(text))
    output = file_of(console)
    assert output.count(text) >= 2
    assert "\x1b]8" not in output


def test_live_view_shows_the_cursor_again_after_an_error() -> None:
    console = terminal()
    with pytest.raises(KeyboardInterrupt), LiveView(console, ["Ann", "Bob"]):
        raise KeyboardInterrupt
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert file_of(console).rfind(show) > file_of(console).rfind(hide) >= 0
