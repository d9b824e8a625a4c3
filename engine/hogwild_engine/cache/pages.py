"""The page pool: reference counts, and the keys under which cached pages are found again.

Knows page numbers; the tensors are in kv_cache.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

_FREE_RUN = re.compile(b"\x00+")


class OutOfPagesError(Exception):
    """No free page is left. Callers never see it: sessions stay within what they reserved."""


class PagePool:
    """Reference counts of pages.

    A growing block gets the page after its last one if that is free, so that its pages stay
    consecutive; a new block starts in the middle of the largest free run, so that it has room to
    grow. A page with a key keeps its content when its last reader releases it. It counts as free,
    and can be found by its key until it is evicted: cached pages are at most half of the free ones,
    and the least recently used are evicted first.

    Args:
        num_pages: pages in all.
        page_size: tokens a page holds.
        keeps_pages: cache pages by key; ``False`` turns the prefix cache off.
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
        self._kept: dict[int, None] = {}  # cached pages without a reader, least recently used first

    @property
    def num_free(self) -> int:
        return self._num_free

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate ``count`` free pages, consecutive and right after page ``after`` if possible.

        Raises:
            OutOfPagesError: fewer than ``count`` pages are free; none is allocated then.
        """
        if count > self._num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self._num_free} free")
        self._evict(self._num_free - count)
        pages: list[int] = []
        while len(pages) < count:
            page = self._next(after, count - len(pages))
            self._used[page] = 1
            self._references[page] = 1
            self._num_free -= 1
            pages.append(page)
            after = page
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reader to each page."""
        for page in pages:
            assert self._used[page], f"page {page} is not allocated"
            if self._references[page] == 0:
                del self._kept[page]
                self._num_free -= 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reader from each page; a page without readers is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._num_free += 1
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._used[page] = 0
        self._evict(self._num_free)

    def find(self, key: bytes) -> int | None:
        """Return the page that is cached under ``key``."""
        return self._page_of.get(key)

    def give_key(self, page: int, key: bytes) -> None:
        """Cache ``page``, which is full, under ``key``, unless another page has that key."""
        assert self._references[page] > 0, f"page {page} is free"
        if self._keeps_pages and self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def drop_key(self, page: int) -> None:
        """Stop caching ``page``: it is about to be overwritten."""
        if key := self._key_of.pop(page, None):
            del self._page_of[key]

    def _evict(self, num_free: int) -> None:
        """Evict cached pages until they are at most half of ``num_free``.

        More of them would leave growing blocks no consecutive pages.
        """
        for page in list(islice(self._kept, max(0, len(self._kept) - num_free // 2))):
            del self._kept[page]
            self.drop_key(page)
            self._used[page] = 0

    def _next(self, after: int | None, wanted: int) -> int:
        """Return a free page: the one after ``after``, else in the largest free run."""
        if after is not None and after + 1 < self.num_pages and not self._used[after + 1]:
            return after + 1
        run = max(_FREE_RUN.finditer(self._used), key=lambda found: found.end() - found.start())
        start, length = run.start(), run.end() - run.start()
        return start if start == 0 else start + max(0, (length - wanted) // 2)
