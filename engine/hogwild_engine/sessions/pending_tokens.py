"""Tokens of a session's blocks whose keys and values are still missing, in the order in which they
are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.writer import Writer
from hogwild_engine.step.batch import Chunk

ViewOf = Callable[[Block, Writer | None], Sequence[Block]]


@dataclass(slots=True)
class Owed:
    """A run of tokens of one block.

    Args:
        block: holds the ids.
        start: local position of the first.
        count: how many.
        writer: whose they are; ``None`` for shared text.
        samples: the writer draws its next token behind them.
        splits: may be encoded over several passes.
    """

    block: Block
    start: int
    count: int
    writer: Writer | None = None
    samples: bool = False
    splits: bool = False


class Encoded(NamedTuple):
    """One entry of the log of passes: what a writer's tokens were in pass ``number``."""

    number: int
    writer: int | None
    tokens: tuple[int, ...]


class PendingTokens:
    """What a session owes to its next passes, and the log of those that were."""

    def __init__(self) -> None:
        self._owed: list[Owed] = []
        self.log: list[Encoded] = []
        self.num_passes = 0

    def owe(
        self,
        block: Block,
        tokens: Sequence[int],
        writer: Writer | None = None,
        *,
        samples: bool = False,
        splits: bool = False,
    ) -> None:
        """Append ``tokens`` to ``block``, to be encoded in the next pass."""
        if tokens:
            start = len(block)
            block.append(tokens)
            self._owed.append(Owed(block, start, len(tokens), writer, samples, splits))

    def recall(self, block: Block, start: int, stop: int) -> None:
        """Log the tokens ``start … stop - 1`` of ``block``, shared text that is encoded already,
        and owe them no more.
        """
        tokens = tuple(block.tokens[start:stop])
        self.log.append(Encoded(self.num_passes, None, tokens))
        for owed in self._owed:
            if owed.block is block and owed.start == start:
                owed.start, owed.count = stop, owed.count - len(tokens)

    def forget(self, block: Block) -> None:
        """Drop what is owed for ``block``; call before it is truncated."""
        self._owed = [owed for owed in self._owed if owed.block is not block]

    def silence(self) -> None:
        """Let nobody draw behind what is owed."""
        for owed in self._owed:
            owed.samples = False

    @property
    def num_tokens(self) -> int:
        return sum(owed.count for owed in self._owed)

    def encoded_len(self, block: Block) -> int:
        """Tokens of ``block`` that are owed no more."""
        starts = [owed.start for owed in self._owed if owed.block is block]
        return min(starts, default=len(block))

    @property
    def is_prefill(self) -> bool:
        """Whether the next pass may be split."""
        return any(owed.splits for owed in self._owed)

    def take(self, limit: int, view_of: ViewOf) -> tuple[list[Chunk], list[Writer]]:
        """The next pass's feeds, and the writers that draw from it in the order of their rows.

        Args:
            limit: tokens to take at most; what cannot be split is taken whole, all of it together.
            view_of: what a writer reads.
        """
        feeds: list[Chunk] = []
        drawing: list[Writer] = []
        while self._owed:
            owed = self._owed[0]
            whole = owed.count if owed.splits else self.num_tokens
            if whole > limit and (feeds or owed.splits):
                count = min(owed.count, limit) if owed.splits else 0
                if count > 0:
                    feeds.append(self._feed(owed, count, view_of))
                    owed.start += count
                    owed.count -= count
                break
            self._owed.pop(0)
            limit -= owed.count
            feeds.append(self._feed(owed, owed.count, view_of))
            if owed.samples and owed.writer is not None:
                drawing.append(owed.writer)
        self.num_passes += bool(feeds)
        return feeds, drawing

    def _feed(self, owed: Owed, count: int, view_of: ViewOf) -> Chunk:
        number = owed.writer.number if owed.writer else None
        tokens = tuple(owed.block.tokens[owed.start : owed.start + count])
        self.log.append(Encoded(self.num_passes, number, tokens))
        view = view_of(owed.block, owed.writer)
        samples = owed.samples and count == owed.count
        return Chunk(owed.block, owed.start, count, view, samples)
