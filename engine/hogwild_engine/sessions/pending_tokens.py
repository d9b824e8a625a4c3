"""Tokens of a session's blocks whose keys and values are not computed yet, in encoding order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.writer import Draft
from hogwild_engine.step.batch import Chunk

ViewOf = Callable[[Block, Draft | None], Sequence[Block]]


@dataclass(slots=True)
class PendingChunk:
    """A run of pending tokens of one block.

    Args:
        block: holds the ids.
        start: block-local position of the first.
        count: how many.
        draft: the paragraph they belong to; ``None`` for text that no writer owns.
        samples: the draft's next token is sampled behind them.
        splits: may be encoded over several steps.
    """

    block: Block
    start: int
    count: int
    draft: Draft | None
    samples: bool
    splits: bool


class PendingTokens:
    """What a session still has to encode.

    Attributes:
        num_steps: forward steps that encoded anything of it.
    """

    def __init__(self) -> None:
        self._chunks: list[PendingChunk] = []
        self.num_steps = 0

    def append(
        self,
        block: Block,
        tokens: Sequence[int],
        draft: Draft | None = None,
        *,
        samples: bool = False,
        splits: bool = False,
    ) -> None:
        """Append ``tokens`` to ``block``, to be encoded in the next step."""
        if tokens:
            start = len(block)
            block.append(tokens)
            self._chunks.append(PendingChunk(block, start, len(tokens), draft, samples, splits))

    def skip(self, block: Block, start: int, stop: int) -> None:
        """Do not encode the tokens ``start … stop - 1`` of ``block``: they came from the cache."""
        for chunk in self._chunks:
            if chunk.block is block and chunk.start == start:
                chunk.start, chunk.count = stop, chunk.count - (stop - start)

    def drop(self, block: Block, start: int) -> None:
        """Do not encode the tokens of ``block`` from ``start`` on; call it before truncating."""
        for chunk in self._chunks:
            if chunk.block is block and chunk.start + chunk.count > start:
                chunk.count, chunk.samples = max(0, start - chunk.start), False
        self._chunks = [chunk for chunk in self._chunks if chunk.count]

    def stop_sampling(self) -> None:
        """Sample nothing behind what is pending."""
        for chunk in self._chunks:
            chunk.samples = False

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self._chunks)

    def encoded_len(self, block: Block) -> int:
        """Return how many tokens of ``block`` are encoded."""
        starts = [chunk.start for chunk in self._chunks if chunk.block is block]
        return min(starts, default=len(block))

    @property
    def is_prefill(self) -> bool:
        """Whether the next step may take part of it."""
        return any(chunk.splits for chunk in self._chunks)

    def schedule(self, limit: int, view_of: ViewOf) -> tuple[list[Chunk], list[Draft]]:
        """Take the next step's chunks, and the drafts that sample behind them, in their order.

        Args:
            limit: tokens to take at most; what cannot be split is taken all together.
            view_of: what the writer of a block reads.
        """
        taken: list[Chunk] = []
        drafts: list[Draft] = []
        while self._chunks:
            chunk = self._chunks[0]
            whole = chunk.count if chunk.splits else self.num_tokens
            if whole > limit and (taken or chunk.splits):
                count = min(chunk.count, limit) if chunk.splits else 0
                if count > 0:
                    view = view_of(chunk.block, chunk.draft)
                    taken.append(Chunk(chunk.block, chunk.start, count, view))
                    chunk.start += count
                    chunk.count -= count
                break
            self._chunks.pop(0)
            limit -= chunk.count
            view, samples = view_of(chunk.block, chunk.draft), False
            if chunk.samples and chunk.draft is not None:
                drafts.append(chunk.draft)
                samples = True
            taken.append(Chunk(chunk.block, chunk.start, chunk.count, view, samples))
        self.num_steps += bool(taken)
        return taken, drafts
