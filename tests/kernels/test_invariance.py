"""A query token's attention has the same bits whatever else a call holds, on any number of threads.

`tests/engine/test_schedules.py` tests the same of whole models.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch

from cases import Case, Row, ordinary_rows, table_of
from hogwild_kernels.backends import BACKENDS
from hogwild_kernels.cpu import c_backend

NATIVE = ("native",) if c_backend.build_error() is None else ()
LENGTHS = (600, 63, 540, 5, 40)
WAYS = 8


def drawn_rows(seed: int) -> list[Row]:
    """Query tokens of which some see windows of blocks, or not all of them."""
    chance = random.Random(seed)
    rows = ordinary_rows(LENGTHS, 30)
    for row in rows:
        reads = []
        for number, read in enumerate(row.reads):
            assert read is not None
            delta, lo, hi = read
            if chance.random() < 0.3:
                hi = chance.randint(0, hi)
            if chance.random() < 0.3:
                lo = chance.randint(0, hi)
            hidden = number < len(LENGTHS) - 1 and chance.random() < 0.2
            reads.append(None if hidden else (delta, lo, hi))
        row.reads = reads
    return rows


def attended(
    case: Case, backend: str, index: list[int], chance: random.Random, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with some of the case's query tokens, the block reads in any order."""
    part = copy.copy(case)
    part.rows, part.q = [case.rows[i] for i in index], case.q[index]
    reads = part.reads()
    chance.shuffle(reads)
    table = table_of(reads, case.inv_freq, 1)
    sinks = torch.linspace(-1, 1, case.num_heads)
    tensors = part.q, case.k_pages, case.v_pages, table
    options = {"scale": case.scale, "softcap": softcap, "sinks": sinks}
    return BACKENDS[backend].attend(*tensors, **options)


@pytest.mark.parametrize(("group", "softcap"), [(1, None), (3, 3.0), (8, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", *NATIVE])
def test_a_query_token_has_the_same_bits_in_any_call(
    backend: str, dtype: torch.dtype, group: int, softcap: float | None
) -> None:
    case = Case(LENGTHS, drawn_rows(group), num_heads=2 * group, dtype=dtype)
    chance, everyone = random.Random(0), list(range(len(case.rows)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out, lse = attended(case, backend, everyone, chance, softcap)
        for way in range(WAYS):
            torch.set_num_threads(1 + way % 3)
            index = chance.sample(everyone, chance.choice((1, 2, 3, 11, 30)))
            other_out, other_lse = attended(case, backend, index, chance, softcap)
            assert torch.equal(other_out, out[index])
            assert torch.equal(other_lse, lse[index])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", NATIVE)
def test_a_small_workspace_takes_query_tokens_in_slabs(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(LENGTHS, drawn_rows(1))
    everyone, chance = list(range(len(case.rows))), random.Random(0)
    out, lse = attended(case, backend, everyone, chance, None)
    monkeypatch.setattr(c_backend, "WORKSPACE_FLOATS", 1)
    other_out, other_lse = attended(case, backend, everyone, chance, None)
    assert torch.equal(other_out, out)
    assert torch.equal(other_lse, lse)
