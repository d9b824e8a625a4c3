"""The prefix cache: full pages of a prompt that other sessions may share.

Only text that was encoded from left to right as one block is cached. What a page holds then depends
on its tokens and those before them alone, so its key is a hash of these.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from hogwild_engine.cache.block import Block
from hogwild_engine.cache.pages import PagePool


class Prefix:
    """One session's prompt in full pages, without its last token, whose logits are needed.

    Args:
        prompt: the tokens that the session's first block starts with.
        page_size: tokens a page holds.

    Attributes:
        num_reused: tokens that came from the cache.
    """

    def __init__(self, prompt: Sequence[int], page_size: int) -> None:
        self.num_reused = 0
        self._page_size = page_size
        self._tokens = prompt
        self._keys = _page_keys(prompt[:-1], page_size)
        self._num_kept = 0

    def next_key(self, encoded: int) -> bytes | None:
        """Return the key of the page that is encoded next, after ``encoded`` tokens."""
        index = encoded // self._page_size
        return self._keys[index] if index < len(self._keys) else None

    def reuse(self, pool: PagePool, block: Block, encoded: int) -> int:
        """Let ``block`` share cached pages that hold its next tokens.

        Returns:
            How many of its tokens are encoded now.
        """
        first, pages = encoded // self._page_size, []
        for key in self._keys[first:]:
            if (page := pool.find(key)) is None:
                break
            pages.append(page)
        if not pages:
            return encoded
        start, stop = first * self._page_size, (first + len(pages)) * self._page_size
        block.adopt(first, pages, self._tokens[start:stop])
        self._num_kept = first + len(pages)
        self.num_reused += stop - encoded
        return stop

    def keep(self, pool: PagePool, block: Block, encoded: int) -> None:
        """Cache the pages of ``block`` that its first ``encoded`` tokens fill."""
        for index in range(self._num_kept, min(encoded // self._page_size, len(self._keys))):
            pool.give_key(block.pages[index], self._keys[index])
            self._num_kept = index + 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Make ``tokens``, which start with the prompt, the prefix from now on."""
        self._keys = _page_keys(tokens, self._page_size)


def _page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return a key for each full page: a hash of its tokens and of the previous page's key."""
    keys, key = [], b""
    for start in range(0, len(tokens) - page_size + 1, page_size):
        content = array("q", tokens[start : start + page_size]).tobytes()
        key = blake2b(key + content, digest_size=16).digest()
        keys.append(key)
    return keys
