"""Layouts: which blocks a writer reads, in which order. Pure Python; knows no tensors.

    contiguous    common · others' texts · own text
    interleaved   common · own open paragraph
    combined      common · others header · others' open paragraphs · own header · own open paragraph
    arrival       common · one block that all workers write in turn

Others stand in ascending worker order, self last (arXiv 2504.06261, section 3). To add a layout,
add a `Layout` to `LAYOUTS` and its name to `LayoutName`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, TypeVar

LayoutName = Literal["combined", "interleaved", "contiguous", "arrival"]

B = TypeVar("B")


class SharedBlocks(NamedTuple, Generic[B]):
    """The blocks that no single worker owns: the prompt with the history, and section headers."""

    common: B
    others_header: B | None = None
    after_other: B | None = None
    own_header: B | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The rule that makes views.

    Args:
        name: how requests name it.
        shows_open_text: what the others are writing stands in a worker's view.
        moves_paragraphs: finished paragraphs move to the common block.
        has_headers: section headers stand between the blocks of a view.
        single_stream: all workers write one block, token by token. A worker's whole text is one
            paragraph then, which has no header and is never moved or rewound.
    """

    name: LayoutName
    shows_open_text: bool = False
    moves_paragraphs: bool = False
    has_headers: bool = False
    single_stream: bool = False

    def isolated(self) -> Layout:
        """Return the layout in which workers never see each other (``sync_interval=None``)."""
        return replace(self, shows_open_text=False, moves_paragraphs=False)

    def view(self, shared: SharedBlocks[B], others: Sequence[B], own: B) -> list[B]:
        """Return the blocks that the writer of ``own`` reads, in order.

        Example for "combined" with two workers, the view of Alice::

            [common] [others header] [Bob's paragraph] [own header] [Alice's paragraph]

        Args:
            shared: the session's shared blocks.
            others: non-empty blocks of the other workers, ascending.
            own: the block that is written; comes last.
        """
        if not self.shows_open_text or not others:
            return [shared.common, own]
        blocks: list[B | None] = [shared.common, shared.others_header]
        for other in others[:-1]:
            blocks += [other, shared.after_other]
        blocks += [others[-1], shared.own_header, own]
        return [block for block in blocks if block is not None]

    def answer_context(self, shared: SharedBlocks[B], written: Sequence[B]) -> list[B]:
        """Return the blocks before the final answer's own block: everything.

        Args:
            shared: the session's shared blocks.
            written: the workers' non-empty blocks, ascending.
        """
        blocks: list[B | None] = [shared.common]
        if written:
            blocks.append(shared.others_header)
        for block in written:
            blocks += [block, shared.after_other]
        return [block for block in blocks if block is not None]


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("combined", shows_open_text=True, moves_paragraphs=True, has_headers=True),
        Layout("interleaved", moves_paragraphs=True),
        Layout("contiguous", shows_open_text=True),
        Layout("arrival", single_stream=True),
    )
}
