"""Incremental detokenizer: token ids to text, as they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes one growing sequence of tokens.

    Text is returned once later tokens cannot change it. Example: if 🦜 takes three tokens, `add`
    returns "" for the first two and "🦜" for the third.

    Args:
        decode: token ids to text, with special tokens, without clean-up.
        hidden: ids that have no text.
    """

    def __init__(self, decode: Decode, hidden: Collection[int] = ()) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        # As in vLLM: ids from the prefix offset on are decoded together, because the text of a
        # token depends on the token before it; ids before the read offset were returned.
        self._prefix_offset = self._read_offset = 0

    def add(self, token: int) -> str:
        """Return the text that ``token`` completes; empty if it is hidden or half a character."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        return self._read(final=False)

    def flush(self) -> str:
        """Return the rest, with a replacement character for bytes that are no character."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._prefix_offset : self._read_offset])
        text = self._decode(self._ids[self._prefix_offset :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)
        return text[len(before) :]
