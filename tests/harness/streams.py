"""Check that the streamed events of a session join to its final texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hogwild_engine.api.events import AnswerToken, Event, Finished, ParagraphFinished, Token


def check_streams(events: Sequence[Event]) -> None:
    """Assert that tokens join to the paragraphs and to the answer of `Finished`."""
    streams: dict[tuple[str, int], str] = defaultdict(str)
    answer = ""
    for event in events:
        if isinstance(event, Token):
            streams[event.worker, event.paragraph] += event.text
        elif isinstance(event, AnswerToken):
            answer += event.text
        elif isinstance(event, ParagraphFinished):
            paragraph = event.paragraph
            assert streams.pop((paragraph.worker, paragraph.number), "") == paragraph.text
    done = events[-1]
    assert isinstance(done, Finished)
    assert answer == done.text
    assert [e.paragraph for e in events if isinstance(e, ParagraphFinished)] == list(
        done.paragraphs
    )
    for text in (done.text, *(p.text for p in done.paragraphs), *streams.values()):
        assert "<|im" not in text
