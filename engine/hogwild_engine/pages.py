"""Which pages are in use, and by how many. Knows page numbers; tensors live in cache.py."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FREE_RUN = re.compile(b"\x00+")


class OutOfPagesError(Exception):
    """No free page is left. Never reaches a caller: sessions stay within what they reserved."""


class PagePool:
    """Reference counts of pages.

    A block that grows gets the page behind its last one where that is free, so that its pages stay
    consecutive; a new block starts in the middle of the largest free run, so that it has room to
    grow.

    Args:
        num_pages: pages in all.
        page_size: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._used = bytearray(num_pages)
        self._num_free = num_pages

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
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one reader less of each page; a page without readers is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._used[page] = 0
                self._num_free += 1

    def _next(self, after: int | None, wanted: int) -> int:
        if after is not None and after + 1 < self.num_pages and not self._used[after + 1]:
            return after + 1
        run = max(_FREE_RUN.finditer(self._used), key=lambda found: found.end() - found.start())
        start, length = run.start(), run.end() - run.start()
        return start if start == 0 else start + max(0, (length - wanted) // 2)
