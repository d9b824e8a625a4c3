"""Echo: an answer that begins with a speaker's name, as earlier answers in the prompt do.

Templates without names show an earlier answer of the agent "critic" as ``critic: …``, so a model
may begin its own answer the same way. That label is dropped, whole or in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from hogwild_engine.api.request import Request
from hogwild_engine.text.speakers import speaker_label


class Echo:
    """Drops a label at the start of an answer.

    Args:
        names: the speakers whose labels earlier answers have.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._labels = {f"{speaker_label(name)}:" for name in names}
        self._held = ""
        self._decided = not self._labels

    @classmethod
    def of(cls, request: Request) -> Echo:
        """Return the echo that an answer to ``request`` may have.

        An answer that continues a message, or that a grammar constrains, has none.
        """
        last = request.messages[-1]
        continues = last["role"] == "assistant" and not last.get("tool_calls")
        if continues or request.grammar is not None:
            return cls()
        spoken = (message for message in request.messages if message["role"] == "assistant")
        return cls(str(message["name"]) for message in spoken if message.get("name"))

    def feed(self, text: str) -> str:
        """Return the text that is certain not to be part of a label."""
        if self._decided:
            return text
        self._held += text
        start = self._held.lstrip()
        if any(_is_undecided(start, label) for label in self._labels):
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return what is held; the text ends here."""
        self._decided = True
        held, self._held = self._held, ""
        return self.without_label(held)

    def without_label(self, text: str) -> str:
        """Return a whole answer without a label at its start."""
        start = text.lstrip()
        for label in self._labels:
            # An answer that is nothing but a label is no echo.
            if start.startswith(label) and (rest := start.removeprefix(label).lstrip()):
                return rest
        return text


def _is_undecided(start: str, label: str) -> bool:
    """Whether the text may become the label, or is the label and nothing yet."""
    return label.startswith(start) or start.rstrip() == label
