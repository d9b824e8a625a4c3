"""A block: a run of cached tokens on pages of the pool."""

from __future__ import annotations

from collections.abc import Sequence

from hogwild_engine.cache.kv_cache import KVCache


class Block:
    """Tokens ``0 … len(block) - 1`` at block-local positions.

    A page is shared with other blocks only once it is full.

    Args:
        cache: where keys and values are stored.

    Attributes:
        tokens: the token ids, in order.
        pages: page numbers, in order.
        visible_len: how many tokens other writers may read.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.visible_len = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots of the tokens ``start … stop - 1``: ``page * page_size + offset``."""
        size = self._cache.pool.page_size
        return [self.pages[i // size] * size + i % size for i in range(start, stop)]

    def publish(self) -> None:
        """Let other writers read all tokens from the coming step on."""
        self.visible_len = len(self)

    def append(self, tokens: Sequence[int]) -> list[int]:
        """Append ``tokens`` and return their slots; the next step writes their keys and values.

        Raises:
            OutOfPagesError: the pool is full; the block is as before.
        """
        pool = self._cache.pool
        start, stop = len(self), len(self) + len(tokens)
        shared = bool(tokens and start % pool.page_size and pool.references(self.pages[-1]) > 1)
        missing = -(-stop // pool.page_size) - len(self.pages) + shared
        if missing > 0:
            fresh = pool.allocate(missing, self.pages[-1] if self.pages else None)
            if shared:
                self._copy_last_page(fresh.pop(0))
            self.pages += fresh
        if tokens and start % pool.page_size:
            pool.drop_key(self.pages[start // pool.page_size])
        self.tokens += tokens
        return self.slots(start, stop)

    def adopt(self, first: int, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Take full ``pages`` from the prefix cache, which hold ``tokens`` already.

        They replace the block's own pages from index ``first`` on.
        """
        pool, stop = self._cache.pool, first + len(pages)
        pool.share(pages)
        pool.release(reversed(self.pages[first:stop]))
        self.pages[first:stop] = pages
        self.tokens[first * pool.page_size : stop * pool.page_size] = tokens

    def _copy_last_page(self, page: int) -> None:
        """Replace the last page, which other blocks share, by a copy on ``page``."""
        first = len(self) // self._cache.pool.page_size * self._cache.pool.page_size
        source = self.slots(first, len(self))
        self._cache.pool.release([self.pages.pop()])
        self.pages.append(page)
        self._cache.move(source, self.slots(first, len(self)), 0)

    def truncate(self, length: int) -> None:
        """Drop all tokens from ``length`` on and free the pages that held nothing else."""
        keep = -(-length // self._cache.pool.page_size)
        self._cache.pool.release(
            reversed(self.pages[keep:])
        )  # a page's prefix must be evicted after it
        del self.pages[keep:]
        del self.tokens[length:]
        self.visible_len = min(self.visible_len, length)

    def move_to(self, target: Block) -> None:
        """Move all tokens to the end of ``target``.

        Keys are rotated to their new block-local positions, values are copied, nothing is encoded
        again. A finished paragraph moves to the history this way.
        """
        source = self.slots(0, len(self))
        delta = len(target)
        self._cache.move(source, target.append(self.tokens), delta)
        self.truncate(0)

    def share(self) -> Block:
        """Return a block with the same tokens, which shares all full pages; a partly filled last
        page is copied.
        """
        pool = self._cache.pool
        full = len(self) // pool.page_size
        twin = Block(self._cache)
        pool.share(self.pages[:full])
        twin.pages = self.pages[:full]
        twin.tokens = self.tokens[: full * pool.page_size]
        rest = self.tokens[full * pool.page_size :]
        try:
            slots = twin.append(rest)
        except Exception:
            twin.release()
            raise
        self._cache.move(self.slots(len(self) - len(rest), len(self)), slots, 0)
        twin.visible_len = self.visible_len
        return twin

    def release(self) -> None:
        """Free every page. Safe to call again."""
        self.truncate(0)
