"""One forward pass as data: which tokens, where they are written, what each of them reads. Plain
integers that pickle.

A row is a row: prompt, decoded token, header and final prompt are the same thing here. Rows of one
session are contiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hogwild_engine.cache.block import Block
from hogwild_kernels.table import BlockRead

LONG_FEED = 256
"""A feed of so many rows may attend on its own, by kernels for long sequences. Not measured yet."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one block that a pass encodes.

    Args:
        block: holds their ids already; their keys and values are missing.
        start: local position of the first of them.
        count: how many they are, at least one.
        view: the blocks that they read, in order; ``block`` comes last.
        samples: whether the next token is drawn from the last row's logits.
    """

    block: Block
    start: int
    count: int
    view: Sequence[Block]
    samples: bool = False


@dataclass
class Batch:
    """All rows of one pass.

    Attributes:
        tokens: token id of each row.
        positions: block-local position of each row.
        slots: where each row's key and value go.
        sampled: rows whose logits are wanted, in the order of the sampling feeds.
        entries: what the rows read, by `BlockRead`.
        long: the rows of each long feed.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    entries: list[BlockRead] = field(default_factory=list)
    long: list[range] = field(default_factory=list)

    def add_session(self, feeds: Sequence[Chunk], hidden: Collection[Block] = ()) -> None:
        """Add one session's rows.

        Args:
            feeds: what is encoded, in order; several may belong to one block.
            hidden: blocks of which others see no more than before. All others become visible whole,
                tokens of this pass included.
        """
        unseen = {id(block) for block in hidden}
        for number, block in {id(block): block for feed in feeds for block in feed.view}.items():
            if number not in unseen:
                block.visible_len = len(block)
        entries: dict[tuple[int, int], BlockRead] = {}
        for feed in feeds:
            stop = feed.start + feed.count
            self._read(feed, entries)
            if feed.count >= LONG_FEED:
                self.long.append(range(len(self.tokens), len(self.tokens) + feed.count))
            self.tokens += feed.block.tokens[feed.start : stop]
            self.positions += range(feed.start, stop)
            self.slots += feed.block.slots(feed.start, stop)
            if feed.samples:
                self.sampled.append(len(self.tokens) - 1)
        self.entries += entries.values()

    def _read(self, feed: Chunk, entries: dict[tuple[int, int], BlockRead]) -> None:
        row, start, count = len(self.tokens), feed.start, feed.count
        lengths = [block.visible_len for block in feed.view[:-1]]
        own_start = sum(lengths)
        block_start = 0
        appearances: dict[int, int] = {}
        for block, length in zip(feed.view, [*lengths, start + count], strict=True):
            appearance = appearances[id(block)] = appearances.get(id(block), -1) + 1
            if length:
                key = (id(block), appearance)
                entry = entries.get(key)
                if entry is None:
                    entry = entries[key] = BlockRead(list(block.pages), row, [], [], [])
                if unread := row - entry.first_row - len(entry.hi):
                    for column in (entry.deltas, entry.hi, entry.offsets):
                        column.extend([0] * unread)
                own = block is feed.view[-1]
                first = own_start + start - block_start
                entry.deltas.extend([own_start - block_start] * count)
                entry.hi.extend(range(start + 1, start + count + 1) if own else [length] * count)
                entry.offsets.extend(range(first, first + count))
            block_start += length


def view_len(view: Sequence[Block]) -> int:
    """Tokens in a view: what others made visible, and all of the own block, which comes last."""
    return sum(block.visible_len for block in view[:-1]) + len(view[-1])
