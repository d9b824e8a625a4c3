"""Long prompt chunks beside query tokens that decode, and their check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cases import Case, Row
from hogwild_kernels.backends import BACKENDS, PREFILL_BACKENDS
from hogwild_kernels.cuda.long_runs import LongPromptBackend

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU has")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def chunk(
    lengths: Sequence[int], view: Sequence[int], start: int, count: int, window: int | None = None
) -> list[Row]:
    """Tokens ``start`` to ``start + count`` of the view's last block; they see the others whole."""
    starts, length = {}, 0
    for block in view:
        starts[block] = length
        length += lengths[block]
    own_start = starts[view[-1]]
    rows = []
    for position in range(start, start + count):
        place = own_start + position
        reads: list[tuple[int, int, int] | None] = [None] * len(lengths)
        for block, begin in starts.items():
            hi = position + 1 if block == view[-1] else lengths[block]
            lo = 0 if window is None else max(0, place - begin - window + 1)
            reads[block] = (own_start - begin, lo, hi)
        rows.append(Row(own_start, reads, place))
    return rows


def check(case: Case, *chunks: range, attention: str = "triton", **options: Any) -> None:
    backend = LongPromptBackend(BACKENDS[attention], PREFILL_BACKENDS["flash"])
    tensors = case.q, case.k_pages, case.v_pages, case.table(chunks)
    case.check_output(*backend.attend(*tensors, scale=case.scale, **options), **options)


def beside_decode(lengths: Sequence[int] = (37, 21, 50), **options: Any) -> tuple[Case, range]:
    """A token of another session, 30 tokens of a prompt behind two blocks, one more token."""
    rows = [
        *chunk(lengths, [1], 20, 1),
        *chunk(lengths, [1, 0, 2], 12, 30),
        *chunk(lengths, [0, 1], 9, 1),
    ]
    return Case(lengths, rows, **options), range(1, 31)
