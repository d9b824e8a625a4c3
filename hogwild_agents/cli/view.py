"""Views of a session: plain lines, or one JSON object per event.

The view for terminals is in live_view.py.
"""

from __future__ import annotations

import json
from typing import Protocol, Self, TextIO

from hogwild_engine.api.events import (
    AnswerToken,
    Event,
    Finished,
    Paragraph,
    ParagraphFinished,
    ThoughtToken,
)

_KEPT = "\n\t"
_CONTROLS = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}
_CONTROLS[ord("\r")] = ""


class View(Protocol):
    """Shows the events of one session, and restores the terminal at its end."""

    def show(self, event: Event) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class _StreamView:
    """A view that writes to a stream."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class JsonView(_StreamView):
    """Prints one JSON object per event and line; the last one is the answer."""

    def show(self, event: Event) -> None:
        self._write(json.dumps(event.as_dict()) + "\n")


class PlainView(_StreamView):
    """Prints the answer while it is written.

    Args:
        out: takes the answer and nothing else.
        log: takes finished paragraphs, thoughts and a summary; ``None`` leaves them out.
    """

    def __init__(self, out: TextIO, log: TextIO | None = None) -> None:
        super().__init__(out)
        self._log = log
        self._thinks = False
        self._answers = False

    def show(self, event: Event) -> None:
        match event:
            case ParagraphFinished(paragraph=paragraph):
                self._tell("".join(titled(paragraph)) + "\n\n")
            case ThoughtToken(text=text):
                self._tell(printable(text) if self._thinks else "Thoughts:\n" + text.lstrip())
                self._thinks = True
            case AnswerToken(text=text):
                text = printable(text)
                text = text if self._answers else text.lstrip()
                self._answers = self._answers or bool(text)
                self._write(text)
            case Finished():
                self._write("\n" if self._answers else "")
                gap = "\n\n" if self._thinks else ""
                self._tell(f"{gap}{summary(event)}\n")

    def _tell(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text)
            self._log.flush()


def printable(text: str) -> str:
    """Replace control characters, which would control the terminal, except newlines and tabs."""
    return text.translate(_CONTROLS)


def titled(paragraph: Paragraph) -> tuple[str, str]:
    """Return a finished paragraph's title and text; a text of several lines starts a new line."""
    text = printable(paragraph.text).strip()
    cut = "" if paragraph.complete else " (cut)"
    gap = "\n" if "\n" in text else " "
    return f"{paragraph.worker} [{paragraph.number}]{cut}:", gap + text


def summary(finished: Finished) -> str:
    """Return one line: what the session cost, and its cache compared with private caches."""
    usage = finished.usage
    counts = [f"{name} {count}" for name, count in usage.worker_tokens.items()]
    if usage.answer_tokens and counts:
        counts.append(f"answer {usage.answer_tokens}")
    parts = [
        f"{_count(usage.steps, 'step')}, " if usage.steps else "",
        _count(usage.output_tokens, "token"),
        f" ({', '.join(counts)})" if counts else "",
        f" in {usage.duration_s:.1f} s, {_rate(usage.output_tokens, usage.duration_s)} tokens/s",
        f"; cache: {usage.stored_tokens} tokens stored",
    ]
    if len(usage.worker_tokens) > 1:
        parts.append(f", {usage.private_tokens} in {len(usage.worker_tokens)} private caches")
    if finished.finish_reason == "length":
        parts.append("; ended by its budget or the context length")
    return "".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _rate(number: int, duration_s: float) -> str:
    return f"{number / duration_s:.1f}" if duration_s > 0 else "–"
