"""Token ids to text, as they come: no half characters, no control tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one growing token sequence.

    A token's text is given out once it can no longer change: a character of several tokens waits
    for its last one.

    Args:
        decode: token ids to text, special tokens included, without clean-up.
        hidden: ids that never show.
        context: ids that stand before the sequence; they shape its first piece but are not given
            out.
    """

    def __init__(
        self, decode: Decode, hidden: Collection[int] = (), context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids = list(context[-4:])
        self._start = 0  # ids from here on are decoded together
        self._given = len(self._ids)  # ids before this one are given out

    def add(self, token: int) -> str:
        """The text that ``token`` completes; empty where it waits or is hidden."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What still waits, with a replacement character for bytes that make no character."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._given])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text[len(before) :]
