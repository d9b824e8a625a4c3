"""Which pages are in use, by how many, and what can be found again. Knows page numbers; tensors
live in cache.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

_FREE_RUN = re.compile(b"\x00+")


class OutOfPagesError(Exception):
    """No free page is left. Never reaches a caller: sessions stay within what they reserved."""


class PagePool:
    """Reference counts of pages.

    A block that grows gets the page behind its last one where that is free, so that its pages stay
    consecutive; a new block starts in the middle of the largest free run, so that it has room to
    grow. A page that has a key stays as it is when its last reader is gone, free all the same, and
    can be found by its key, as long as such pages are at most half of the free ones: the least
    recently used go first.

    Args:
        num_pages: pages in all.
        page_size: tokens a page holds.
        keeps_pages: pages can be found again; else they never have a key.
    """

    def __init__(self, num_pages: int, page_size: int, *, keeps_pages: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._used = bytearray(num_pages)
        self._num_free = num_pages
        self._keeps_pages = keeps_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: dict[int, None] = {}  # with a key and no reader, least recently used first

    @property
    def num_free(self) -> int:
        return self._num_free

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` free pages, consecutive and behind page ``after`` as far as that can be
        had.

        Raises:
            OutOfPagesError: fewer than ``count`` pages are free; none is taken then.
        """
        if count > self._num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self._num_free} free")
        self._give_up(self._num_free - count)
        taken: list[int] = []
        while len(taken) < count:
            page = self._next(after, count - len(taken))
            self._used[page] = 1
            self._references[page] = 1
            self._num_free -= 1
            taken.append(page)
            after = page
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Count one more reader of each page."""
        for page in pages:
            assert self._used[page], f"page {page} holds nothing"
            if self._references[page] == 0:
                del self._kept[page]
                self._num_free -= 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one reader less of each page; a page without readers is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._num_free += 1
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._used[page] = 0
        self._give_up(self._num_free)

    def find(self, key: bytes) -> int | None:
        """The page that was given ``key``, as long as it holds what it held then."""
        return self._page_of.get(key)

    def give_key(self, page: int, key: bytes) -> None:
        """Let ``page``, which is written whole, be found by ``key``, unless another one has it."""
        assert self._references[page] > 0, f"page {page} is free"
        if self._keeps_pages and self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def drop_key(self, page: int) -> None:
        """``page`` is about to be written: what it held cannot be found any more."""
        if key := self._key_of.pop(page, None):
            del self._page_of[key]

    def _give_up(self, num_free: int) -> None:
        """Let go of kept pages until they are at most half of ``num_free``: between them a block
        finds no room to grow on consecutive pages.
        """
        for page in list(islice(self._kept, max(0, len(self._kept) - num_free // 2))):
            del self._kept[page]
            self.drop_key(page)
            self._used[page] = 0

    def _next(self, after: int | None, wanted: int) -> int:
        if after is not None and after + 1 < self.num_pages and not self._used[after + 1]:
            return after + 1
        run = max(_FREE_RUN.finditer(self._used), key=lambda found: found.end() - found.start())
        start, length = run.start(), run.end() - run.start()
        return start if start == 0 else start + max(0, (length - wanted) // 2)
