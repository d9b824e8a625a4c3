"""One forward step as data: which tokens, where they are written, what each of them reads.

Plain integers that pickle. Prompt tokens, decoded tokens, headers and final-answer prompts are the
same thing here: *query tokens*. Those of one session are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hogwild_engine.cache.block import Block
from hogwild_kernels.table import BlockRead

LONG_CHUNK = 256
"""Chunks of at least this many tokens may use a kernel for long sequences. Not measured yet."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one block that a step encodes.

    Args:
        block: holds their ids already; their keys and values are missing.
        start: local position of the first of them.
        count: number of tokens, at least one.
        view: the blocks that they read, in order; ``block`` comes last.
        samples: whether the next token is sampled from the last one's logits.
    """

    block: Block
    start: int
    count: int
    view: Sequence[Block]
    samples: bool = False


@dataclass
class Batch:
    """All query tokens of one step.

    Attributes:
        tokens: token id of each query token.
        positions: block-local position of each.
        slots: where the key and value of each go.
        logit_indices: query tokens whose logits are wanted, in the order of the chunks that sample.
        reads: which blocks the query tokens read.
        long_chunks: the query tokens of each long chunk.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_indices: list[int] = field(default_factory=list)
    reads: list[BlockRead] = field(default_factory=list)
    long_chunks: list[range] = field(default_factory=list)


def build_batch(sessions: Sequence[Sequence[Chunk]]) -> Batch:
    """Put the chunks of all sessions into one batch. Reads blocks and changes none.

    Args:
        sessions: the chunks of each session, in order; several may belong to one block.
    """
    batch = Batch()
    for chunks in sessions:
        reads: dict[tuple[int, int], BlockRead] = {}
        for chunk in chunks:
            _add_reads(reads, chunk, len(batch.tokens))
            first, stop = len(batch.tokens), chunk.start + chunk.count
            if chunk.count >= LONG_CHUNK:
                batch.long_chunks.append(range(first, first + chunk.count))
            batch.tokens += chunk.block.tokens[chunk.start : stop]
            batch.positions += range(chunk.start, stop)
            batch.slots += chunk.block.slots(chunk.start, stop)
            if chunk.samples:
                batch.logit_indices.append(len(batch.tokens) - 1)
        batch.reads += reads.values()
    return batch


def _add_reads(reads: dict[tuple[int, int], BlockRead], chunk: Chunk, row: int) -> None:
    """Add what one chunk reads, whose first query token is number ``row``.

    A block starts in the view where the visible tokens of the blocks before it end. Say that Alice
    writes the third token of her paragraph (start 2, count 1), and her view is

        [common: 100 tokens] [Bob's paragraph: 7] [separator: 2] [Alice's own]

    Her own block starts at 109. So her query is rotated by 109 - 0 more positions before it meets
    keys of the common block, by 109 - 100 = 9 for Bob's paragraph, by 2 for the separator, and by
    0 for her own block: these are the deltas. Her token stands at 111 in the view, so the offsets
    are 111, 11, 4 and 2. She sees 100, 7 and 2 tokens of the other blocks and 3 of her own: ``hi``.

    ``reads`` is keyed by block and by how often the block stood in the view before: a separator may
    stand there twice. Query tokens between two readers of a block get ``hi`` 0.
    """
    lengths = [block.visible_len for block in chunk.view[:-1]]
    own_start, block_start = sum(lengths), 0
    appearances: dict[int, int] = {}
    for block, length in zip(chunk.view, [*lengths, chunk.start + chunk.count], strict=True):
        appearance = appearances[id(block)] = appearances.get(id(block), -1) + 1
        if length:
            key = (id(block), appearance)
            read = reads.get(key)
            if read is None:
                read = reads[key] = BlockRead(list(block.pages), row, [], [], [])
            if skipped := row - read.first_row - len(read.hi):
                for column in (read.deltas, read.hi, read.offsets):
                    column.extend([0] * skipped)
            is_own = block is chunk.view[-1]
            first = own_start + chunk.start - block_start
            read.deltas.extend([own_start - block_start] * chunk.count)
            read.hi.extend(
                range(chunk.start + 1, chunk.start + chunk.count + 1)
                if is_own
                else [length] * chunk.count
            )
            read.offsets.extend(range(first, first + chunk.count))
        block_start += length


def view_len(view: Sequence[Block]) -> int:
    """Return the tokens in a view: what others published, and all of the own block, the last."""
    return sum(block.visible_len for block in view[:-1]) + len(view[-1])
