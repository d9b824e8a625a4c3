"""Streaming: streamed pieces join to the decoded tokens, without half characters, special tokens or
stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hogwild_engine import Engine, Protocol, Request, SamplingParams, make_workers
from hogwild_engine.api.events import Finished
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.sessions.writer import Draft, Writer
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.detokenizer import Detokenizer
from model_harness import ModelHarness, Script, sampled_by_writer
from streams import check_streams
from tiny import VOCABULARY, tiny_model

END = 2
ONCE = settings(deadline=None, derandomize=True, max_examples=150)
EMOJI = "🧑‍🚀🏳️‍🌈👩🏽‍🔬"
SPELLED = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])
"""Few of these lack a token in the embedded model's tokenizer, which drops them."""
TEXTS = st.lists(
    st.one_of(
        st.text(SPELLED, max_size=8),
        st.sampled_from((EMOJI, "né", "数学", " \n", "<|", "STOP", "ST")),
    )
).map("".join)


@pytest.fixture(scope="module")
def harness() -> ModelHarness:
    return ModelHarness(tiny_model("llama"), num_pages=256)


def pieces(chat: ChatTemplate, ids: Sequence[int]) -> list[str]:
    """The text that a detokenizer returns for each token, and at the end."""
    detokenizer = Detokenizer(chat.decode, chat.special_ids)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@ONCE
@given(text=TEXTS)
def test_the_pieces_of_any_text_join_to_it_and_are_whole_characters(
    chat: ChatTemplate, text: str
) -> None:
    ids = chat.encode_data(text)
    assume(chat.decode(ids) == text)
    got = pieces(chat, ids)
    assert "".join(got) == text
    assert sum(piece.count("\ufffd") for piece in got) == text.count("\ufffd")


@ONCE
@given(ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=24))
def test_the_pieces_of_any_tokens_join_to_their_decode(chat: ChatTemplate, ids: list[int]) -> None:
    """Any token ids, including broken characters and special tokens."""
    visible = [token for token in ids if token not in chat.special_ids]
    assert "".join(pieces(chat, ids)) == chat.decode(visible)


def test_an_emoji_of_several_tokens_is_one_piece(chat: ChatTemplate) -> None:
    ids = chat.encode("go 🦜 now")
    assert len(ids) > 4
    got = [piece for piece in pieces(chat, ids) if piece]
    assert got == ["go", " 🦜", " now"] or got == ["go", " ", "🦜", " now"]


def test_flush_returns_half_an_emoji_as_a_replacement_character(chat: ChatTemplate) -> None:
    ids = chat.encode("🦜")[:-1]
    *waiting, last = pieces(chat, ids)
    assert not any(waiting)
    assert last == chat.decode(ids)


def drafted(chat: ChatTemplate, ids: Sequence[int], **options: Any) -> tuple[Draft, list[str]]:
    """Return a draft that got ``ids`` one by one, and the text that it showed after each."""
    block = Block(KVCache([], num_pages=400, page_size=1))
    block.append([0])
    writer = Writer(0, "Alice", block, ())
    draft = Draft(writer, chat, start=0, base=1, **{"forced": "", **options})
    shown = []
    for token in ids:
        draft.add(SampledToken(token, 0.5))
        block.append([token])
        shown.append(draft.show())
    return draft, shown


@ONCE
@given(text=TEXTS, watched=st.lists(st.text(SPELLED, min_size=1, max_size=4), max_size=3))
def test_a_draft_shows_its_text_once_and_in_order(
    chat: ChatTemplate, text: str, watched: list[str]
) -> None:
    ids = chat.encode_data(text)
    assume(chat.decode(ids) == text)
    for strips in (True, False):
        draft, shown = drafted(chat, ids, watched=watched, strips=strips)
        given_out = "".join([*shown, draft.finish()])
        assert given_out == draft.shown == (text.strip() if strips else text)


@ONCE
@given(text=TEXTS, stop=st.text(SPELLED, min_size=1, max_size=5))
def test_the_start_of_a_watched_string_is_held_back(
    chat: ChatTemplate, text: str, stop: str
) -> None:
    """No part of ``stop`` is shown while it may become complete, for any tokenization."""
    draft, shown = drafted(chat, chat.encode_data(text + stop), watched=[stop], strips=False)
    cut = draft.text.find(stop)
    if draft.text.count(stop) == 1:
        assert len("".join(shown)) <= cut + len(stop)
        before_last = "".join(shown[:-1])
        assert len(before_last) <= cut


def test_a_draft_shows_nothing_until_it_is_committed(chat: ChatTemplate) -> None:
    draft, shown = drafted(chat, chat.encode(" one two three"), committed=False)
    assert not any(shown)
    draft.committed = True
    assert draft.show() == "one two three"


def test_a_rewound_draft_equals_one_without_the_tokens(chat: ChatTemplate) -> None:
    ids = chat.encode(" red 🦜 green blue")
    for keep in range(len(ids)):
        draft, _ = drafted(chat, ids, committed=False)
        assert draft.rewind(keep) == [0, *ids][keep]
        assert draft.writer.block.tokens == [0, *ids][:keep]
        fresh, _ = drafted(chat, ids[:keep], committed=False)
        assert (draft.text, draft.text_ends) == (fresh.text, fresh.text_ends)
        assert [d.token for d in draft.sampled] == ids[:keep]
        assert set(draft.banned()) == {ids[keep]}
        for token in ids[keep:]:
            draft.add(SampledToken(token, 0.5))
        assert draft.text == " red 🦜 green blue"


def test_forced_text_is_part_of_the_draft(chat: ChatTemplate) -> None:
    draft, shown = drafted(chat, chat.encode(" can go."), forced=" Hi, I'm Alice. We")
    assert "".join([*shown, draft.finish()]) == draft.shown == "Hi, I'm Alice. We can go."


# Sessions


def answer(
    harness: ModelHarness,
    chat: ChatTemplate,
    pieces: Sequence[str | int],
    max_tokens: int = 500,
    **options: Any,
) -> Finished:
    """Return how a single worker's session ends, after checking its stream."""
    messages = ({"role": "user", "content": "Go"},)
    request = Request(messages, workers=make_workers(1), max_tokens=max_tokens, **options)
    script = Script(harness, chat, request, {"": pieces})
    script.run(600)
    script.session.release()
    check_streams(script.events)
    assert script.session.finished is not None
    return script.session.finished


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (("All is well.", END), (), "All is well.", "stop"),
        (("Some text STOP and more", END), ("STOP",), "Some text ", "stop"),
        (("Some text ST", "OP", "more", END), ("STOP",), "Some text ", "stop"),
        (("ends with ST", END), ("STOP",), "ends with ST", "stop"),
        (("both A!B", END), ("!B", "A!"), "both ", "stop"),
        (("STOP at once", END), ("STOP",), "", "stop"),
        (("a STO STOP", END), ("STOP",), "a STO ", "stop"),
        (("line\n", "\n", "next", END), ("\n\n",), "line", "stop"),
        (("🦜🦜 STOP", END), ("🦜 ",), "🦜", "stop"),
        ((" a ", 1, "b ", 0, "c", END), (), " a b c", "stop"),
        ((END,), (), "", "stop"),
    ],
)
def test_an_answer_ends_at_end_of_turn_or_before_a_stop_string(
    harness: ModelHarness,
    chat: ChatTemplate,
    pieces: tuple[str | int, ...],
    stop: tuple[str, ...],
    text: str,
    reason: str,
) -> None:
    done = answer(harness, chat, pieces, stop=stop)
    assert (done.text, done.finish_reason) == (text, reason)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(text=TEXTS, stop=st.sampled_from(("STOP", "🏳️‍🌈", "\n", "é", "ST")))
def test_an_answer_ends_before_the_first_stop_string(
    harness: ModelHarness, chat: ChatTemplate, text: str, stop: str
) -> None:
    ids = chat.encode_data(text)
    assume(chat.decode(ids) == text)
    done = answer(harness, chat, [*ids, END], stop=(stop,))
    assert done.text == text.partition(stop)[0]


def test_held_back_text_is_streamed_at_the_end(harness: ModelHarness, chat: ChatTemplate) -> None:
    done = answer(harness, chat, [], max_tokens=2, stop=("word word!",))
    assert (done.text, done.finish_reason) == (" word word", "length")


@pytest.mark.parametrize("cut", [1, 2])
def test_a_character_cut_at_max_tokens_is_a_replacement_character(
    harness: ModelHarness, chat: ChatTemplate, cut: int
) -> None:
    ids = chat.encode("go 🦜")[:-cut]
    done = answer(harness, chat, ids, max_tokens=len(ids))
    assert done.text == chat.decode(ids)
    assert done.text.startswith("go ")
    assert "\ufffd" in done.text


@pytest.mark.parametrize("layout", ["combined", "contiguous", "interleaved", "arrival"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_workers_stream_the_tokens_they_sampled(
    monkeypatch: pytest.MonkeyPatch, tiny_engine: Callable[..., Engine], family: str, layout: Any
) -> None:
    """For a model that samples any token. White space between paragraphs is not compared."""
    engine = tiny_engine(family, talkative=True)
    request = Request(
        ({"role": "user", "content": "Write."},),
        workers=make_workers(3),
        layout=layout,
        protocol=Protocol(name="x", rules="Go.", min_chars=0, forbids_headers=False, stagger=1),
        sampling=SamplingParams(temperature=1, seed=5),
        max_steps=30,
        max_tokens=20,
    )
    with sampled_by_writer(monkeypatch) as sampled:
        events = list(engine.submit(request))
    check_streams(events)
    done = events[-1]
    assert isinstance(done, Finished)
    hidden = engine.chat.special_ids
    for number, name in enumerate(("Alice", "Bob", "Carol")):
        written = "".join(p.text for p in done.paragraphs if p.worker == name)
        wanted = engine.chat.decode([t for t in sampled[number] if t not in hidden])
        assert "".join(written.split()).replace("\ufffd", "") == "".join(wanted.split()).replace(
            "\ufffd", ""
        )
    assert (
        done.text.split() == engine.chat.decode([t for t in sampled[3] if t not in hidden]).split()
    )
