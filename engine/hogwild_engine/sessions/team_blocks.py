"""The blocks of a team: which ones it holds, what each worker reads, and how long that is."""

from __future__ import annotations

from collections.abc import Sequence

from hogwild_engine.api.layout import Layout, SharedBlocks
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.writer import Draft, Writer
from hogwild_engine.step.batch import view_len


class TeamBlocks:
    """The shared blocks of a session and its workers' own ones, under one layout.

    Args:
        layout: the rule that makes views.
        shared: the blocks that no single worker owns.
        writers: the workers, in order.
    """

    def __init__(
        self, layout: Layout, shared: SharedBlocks[Block], writers: Sequence[Writer]
    ) -> None:
        self._layout = layout
        self._shared = shared
        self._writers = writers

    @property
    def own(self) -> list[Block]:
        """The workers' blocks; one block as often as workers write it."""
        return [writer.block for writer in self._writers]

    @property
    def all(self) -> list[Block]:
        """Every block, each once."""
        blocks = [*(block for block in self._shared if block is not None), *self.own]
        return list({id(block): block for block in blocks}.values())

    def view(self, block: Block, draft: Draft | None) -> list[Block]:
        """Return what a writer of ``block`` reads; see `hogwild_engine.sessions.phase.Phase`."""
        common = self._shared.common
        if block is common:
            return [common]
        if draft is None:  # a header, or the end of a closed paragraph
            return [common, block]
        return self._view_of(draft.writer)

    def _view_of(self, writer: Writer) -> list[Block]:
        others = [w.block for w in self._writers if w is not writer and len(w.block)]
        return self._layout.view(self._shared, others, writer.block)

    def answer_context(self) -> list[Block]:
        """Return the blocks that the writer of the final answer reads before its own."""
        written = [block for block in self.own if len(block)]
        if self._layout.single_stream:
            written = written[:1]
        return self._layout.answer_context(self._shared, written)

    def private_len(self) -> int:
        """Return how many tokens separate caches would hold: the workers' views, added up."""
        return sum(view_len(self._view_of(writer)) for writer in self._writers)

    def longest_view(self, *, answers: bool) -> int:
        """Return a bound on the tokens of any view.

        Lengths add up to it, so that no view is made only to be measured.

        Args:
            answers: a final answer, which reads everything, will be written.
        """
        common, others_header, after_other, own_header = (
            0 if block is None else len(block) for block in self._shared
        )
        own = [len(block) for block in self.own]
        if self._layout.single_stream:
            return common + own[0]
        if not answers and not self._layout.shows_open_text:
            return common + max(own)
        separators = max(len(own) * after_other, (len(own) - 2) * after_other + own_header)
        return common + others_header + separators + sum(own)
