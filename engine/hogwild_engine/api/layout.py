"""Views: which blocks a worker reads, in which order. Pure Python; knows no tensors.

    contiguous    common · others' texts · own text
    interleaved   common · own open paragraph
    combined      common · others header · others' open paragraphs · own header · own open paragraph
    arrival       common · one block that all workers write in turn

Others stand in ascending worker order, self last (arXiv 2504.06261, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

LayoutName = Literal["combined", "interleaved", "contiguous", "arrival"]
LAYOUTS: tuple[LayoutName, ...] = ("combined", "interleaved", "contiguous", "arrival")

B = TypeVar("B")


class Parts(NamedTuple, Generic[B]):
    """The blocks of a session that views are made of. ``own`` holds one block a worker, by worker
    order.
    """

    common: B
    others_header: B | None
    after_other: B | None
    own_header: B | None


def moves_paragraphs(layout: LayoutName) -> bool:
    """Whether finished paragraphs move to the common block."""
    return layout in ("combined", "interleaved")


def shows_headers(layout: LayoutName) -> bool:
    """Whether section headers stand in views."""
    return layout == "combined"


def view(
    layout: LayoutName, parts: Parts[B], others: Sequence[B], own: B, *, sees_others: bool = True
) -> list[B]:
    """The blocks that the writer of ``own`` reads, in order.

    Args:
        layout: which rule.
        parts: the session's shared blocks.
        others: open blocks of the other workers that have started, ascending.
        own: the block that is written; comes last.
        sees_others: ``False`` leaves the others out (no synchronisation).
    """
    if layout == "arrival":
        return [parts.common, own]
    if layout == "interleaved" or not sees_others or not others:
        return [parts.common, own]
    if layout == "contiguous":
        return [parts.common, *others, own]
    blocks = [parts.common]
    if parts.others_header is not None:
        blocks.append(parts.others_header)
    for place, other in enumerate(others):
        blocks.append(other)
        separator = parts.own_header if place == len(others) - 1 else parts.after_other
        if separator is not None:
            blocks.append(separator)
    blocks.append(own)
    return blocks


def answer_view(parts: Parts[B], written: Sequence[B], answer: B) -> list[B]:
    """The blocks that the writer of the final answer reads: everything.

    Args:
        parts: the session's shared blocks.
        written: the workers' blocks that hold anything, ascending.
        answer: the block that is written; comes last.
    """
    blocks = [parts.common]
    if written and parts.others_header is not None:
        blocks.append(parts.others_header)
    for block in written:
        blocks += [block] if parts.after_other is None else [block, parts.after_other]
    return [*blocks, answer]
