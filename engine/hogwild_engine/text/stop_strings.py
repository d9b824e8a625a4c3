"""Stop strings in growing text: where one begins, and which end of the text may become one."""

from __future__ import annotations

from collections.abc import Iterable


def find_first(text: str, strings: Iterable[str], since: int = 0) -> int | None:
    """Return where the first of ``strings`` begins in ``text``, at ``since`` or later."""
    places = [place for s in strings if (place := text.find(s, since)) >= 0]
    return min(places, default=None)


def held_back_len(text: str, strings: Iterable[str]) -> int:
    """Return the length of the text's end that later text may complete to one of ``strings``.

    Example: 2 for "Wait, ST" and the stop string "STOP", because "ST" must not be shown yet.
    """
    held = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), held, -1):
            if text.endswith(string[:length]):
                held = length
                break
    return held
