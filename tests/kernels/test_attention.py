"""Attention backends against attention over each query token's materialised view."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from cases import PAGE_SIZE, TOLERANCE, Case, Row, ordinary_rows
from hogwild_kernels.api import KernelArgumentError
from hogwild_kernels.backends import BACKENDS
from hogwild_kernels.cpu import c_backend
from hogwild_kernels.reference import merge_states
from hogwild_kernels.table import BlockTable

# Without a C compiler only the plain backends can run.
NATIVE = ("native",) if c_backend.build_error() is None else ()
NAMES = ("reference", "cpu", *NATIVE)
PLAIN = ("reference", "cpu")


def of_any_dtype(test: Any) -> Any:
    """Run for every backend in every dtype that it supports."""
    cases = [
        pytest.param(backend, dtype, id=f"{backend}-{dtype}")
        for backend in NAMES
        for dtype in TOLERANCE
        if backend in PLAIN or dtype in c_backend.DTYPES
    ]
    return pytest.mark.parametrize(("backend", "dtype"), cases)(test)


@of_any_dtype
@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize("lengths", [(1,), (63, 5), (111, 0, 17), (16, 32, 1, 63)], ids=str)
def test_query_tokens_see_every_block_at_its_place_in_their_view(
    backend: str, storage: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    rows = ordinary_rows(lengths)
    Case(lengths, rows, dtype=dtype, storage=storage).check(backend)


HEAD_DIMS = {"reference": (64, 80, 128), "cpu": (64, 80, 128), "native": (32, 64, 96, 128, 256)}


@pytest.mark.parametrize(("backend", "dim"), [(i, dim) for i in NAMES for dim in HEAD_DIMS[i]])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_head_groups_and_head_dims(backend: str, group: int, dim: int) -> None:
    lengths = (40, 63, 9)
    rows = ordinary_rows(lengths)
    Case(lengths, rows, num_heads=2 * group, num_kv_heads=2, dim=dim).check(backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("scattered", [True, False])
def test_pages_in_any_order(backend: str, scattered: bool) -> None:
    lengths = (111, 63)
    rows = ordinary_rows(lengths, 2)
    Case(lengths, rows, scattered=scattered, seed=5).check(backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("seed", range(12))
def test_any_ranges_and_any_readers(backend: str, seed: int) -> None:
    """Windows, hidden blocks, query tokens without a pair, blocks without a reader."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 15, 16, 17, 63, 111)) for _ in range(rng.randint(1, 5))]
    rows = []
    for _ in range(rng.randint(1, 6)):
        own_start = rng.randint(0, 300)
        reads: list[tuple[int, int, int] | None] = []
        for length in lengths:
            lo, hi = rng.randint(0, length), rng.randint(0, length)
            seen = (rng.randint(-200, 200), lo, hi)
            reads.append(None if rng.random() < 0.2 else seen)
        rows.append(Row(own_start, reads))
    storage = rng.choice(("head-major", "page-major"))
    Case(lengths, rows, storage=storage, seed=seed).check(backend)


@pytest.mark.parametrize("backend", NAMES)
def test_a_window_hides_the_tokens_before_it(backend: str) -> None:
    length, window = 111, 20
    rows = [Row(0, [(0, max(0, last - window), last)]) for last in (1, 19, 20, 21, 63, 111)]
    Case((length,), rows).check(backend)


@pytest.mark.parametrize("backend", NAMES)
def test_a_query_token_that_sees_nothing_is_zero_with_lse_minus_infinity(backend: str) -> None:
    rows = [Row(0, [(0, 0, 20)]), Row(0, [(0, 7, 7)]), Row(0, [(0, 9, 2)]), Row(0, [None])]
    case = Case((20,), rows)
    case.check(backend)
    out, lse = case.run(backend)
    assert out[1:].eq(0).all()
    assert lse[1:].eq(-math.inf).all()


@of_any_dtype
def test_a_batch_in_which_every_query_token_sees_nothing(backend: str, dtype: torch.dtype) -> None:
    out, lse = Case((0, 5), [Row(0, [(0, 0, 0), (0, 3, 3)])] * 2, dtype=dtype).run(backend)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("backend", NAMES)
def test_an_empty_range_past_the_written_tokens_reads_no_unwritten_slot(backend: str) -> None:
    """With ``hi <= lo`` nothing is read, even if ``hi`` lies past the written tokens."""
    Case((20,), [Row(0, [(0, 0, 20)]), Row(0, [(0, 30, 25)])]).check(backend)


@of_any_dtype
def test_softcap(backend: str, dtype: torch.dtype) -> None:
    lengths = (63, 20)
    rows = [*ordinary_rows(lengths), Row(0, [(0, 0, 0), (0, 0, 0)])]
    Case(lengths, rows, dtype=dtype, q_scale=4.0).check(backend, softcap=3.0)


@of_any_dtype
def test_sinks_join_the_denominator_only(backend: str, dtype: torch.dtype) -> None:
    lengths = (63, 20)
    rows = [*ordinary_rows(lengths), Row(0, [(0, 0, 0), (0, 0, 0)])]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], dtype=dtype)
    case = Case(lengths, rows, dtype=dtype)
    case.check(backend, sinks=sinks)
    out, lse = case.run(backend, sinks=sinks)
    assert out[-1].eq(0).all()
    torch.testing.assert_close(lse[-1], sinks.float())


@pytest.mark.parametrize("backend", NAMES)
def test_softcap_and_sinks_together(backend: str) -> None:
    lengths = (63, 20)
    case = Case(lengths, ordinary_rows(lengths), q_scale=4.0)
    case.check(backend, softcap=3.0, sinks=torch.tensor([-2.0, 0.0, 1.0, 5.0]))


@pytest.mark.parametrize("backend", NAMES)
def test_lse_is_the_natural_logarithm(backend: str) -> None:
    case = Case((7,), [Row(0, [(0, 0, 7)])])
    case.q = torch.zeros_like(case.q)
    _, lse = case.run(backend)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(7)))


@pytest.mark.parametrize("backend", NAMES)
def test_large_scores_do_not_overflow(backend: str) -> None:
    lengths = (63, 17)
    Case(lengths, ordinary_rows(lengths), q_scale=300.0).check(backend)


@pytest.mark.parametrize("backend", NAMES)
def test_one_table_serves_layers_of_any_storage(backend: str) -> None:
    """What a backend keeps on a table must hold for the next layer too."""
    lengths = (63, 20)
    cases = [Case(lengths, ordinary_rows(lengths)) for _ in range(2)]
    table = cases[0].table()
    case = cases[1]
    case.q, case.v_pages = case.q * 2, case.v_pages * 3
    case.blocks = [(keys, values * 3) for keys, values in case.blocks]
    for each in cases:
        tensors = each.q, each.k_pages, each.v_pages, table
        out, _ = BACKENDS[backend].attend(*tensors, scale=each.scale)
        torch.testing.assert_close(out.double(), each.wanted()[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_merged_states_equal_attention_over_the_union(dtype: torch.dtype) -> None:
    """Also where a part is empty for a query token, and where all parts are."""
    lengths = (63, 1, 40)
    rows = [
        *ordinary_rows(lengths, 2),
        Row(0, [(0, 0, 0), (0, 0, 1), (0, 3, 3)]),
        Row(0, [None, (0, 0, 0), None]),
    ]
    parts = []
    for block in range(len(lengths)):
        part = Case(lengths, rows, dtype=dtype)
        part.rows = [
            Row(row.own_start, [r if i == block else None for i, r in enumerate(row.reads)])
            for row in rows
        ]
        parts.append(part.run("reference"))
    outs, lses = (torch.stack(states) for states in zip(*parts, strict=True))
    Case(lengths, rows, dtype=dtype).check_output(*merge_states(outs, lses))
    for merged, state in zip(merge_states(outs[:1], lses[:1]), (outs[0], lses[0]), strict=True):
        torch.testing.assert_close(merged, state)


def replaced(table: BlockTable, **columns: torch.Tensor) -> BlockTable:
    return dataclasses.replace(table, derived={}, **columns)


def attention_arguments() -> dict[str, Any]:
    lengths = (20, 7)
    case = Case(lengths, ordinary_rows(lengths))
    pages = {"k_pages": case.k_pages, "v_pages": case.v_pages}
    return {"q": case.q, **pages, "table": case.table(), "scale": 1.0}


BAD_ATTENTION: dict[str, tuple[str, Any]] = {
    "q has too few dims": ("q", lambda a: {"q": a["q"][0]}),
    "q has another head dim": ("q", lambda a: {"q": a["q"][..., :32]}),
    "q's heads are no multiple": ("q", lambda a: {"q": a["q"][:, :3]}),
    "k_pages has too few dims": ("k_pages", lambda a: {"k_pages": a["k_pages"][0]}),
    "k_pages is strided in D": (
        "k_pages",
        lambda a: {"k_pages": a["k_pages"].transpose(2, 3).contiguous().transpose(2, 3)},
    ),
    "v_pages has another shape": ("v_pages", lambda a: {"v_pages": a["v_pages"][1:]}),
    "v_pages is strided in D": (
        "v_pages",
        lambda a: {"v_pages": a["v_pages"].transpose(2, 3).contiguous().transpose(2, 3)},
    ),
    "first_row has another length": (
        "table.first_row",
        lambda a: {"table": replaced(a["table"], first_row=a["table"].first_row[1:])},
    ),
    "num_rows has another length": (
        "table.num_rows",
        lambda a: {"table": replaced(a["table"], num_rows=a["table"].num_rows[1:])},
    ),
    "first_pair has another length": (
        "table.first_pair",
        lambda a: {"table": replaced(a["table"], first_pair=a["table"].first_pair[1:])},
    ),
    "pages has one dim": (
        "table.pages",
        lambda a: {"table": replaced(a["table"], pages=a["table"].pages[0])},
    ),
    "lo has two dims": (
        "table.lo",
        lambda a: {"table": replaced(a["table"], lo=a["table"].lo[None])},
    ),
    "hi has another length": (
        "table.hi",
        lambda a: {"table": replaced(a["table"], hi=a["table"].hi[1:])},
    ),
    "cos has another shape": (
        "table.cos",
        lambda a: {"table": replaced(a["table"], cos=a["table"].cos[:, 1:])},
    ),
    "hi has another dtype": (
        "table.hi",
        lambda a: {"table": replaced(a["table"], hi=a["table"].hi.long())},
    ),
    "sin has another dtype": (
        "table.sin",
        lambda a: {"table": replaced(a["table"], sin=a["table"].sin.double())},
    ),
    "sinks has another length": ("sinks", lambda _: {"sinks": torch.zeros(3)}),
    "softcap is not positive": ("softcap", lambda _: {"softcap": 0.0}),
}


@pytest.mark.parametrize("what", list(BAD_ATTENTION))
def test_a_bad_argument_of_attention_is_named(what: str) -> None:
    name, change = BAD_ATTENTION[what]
    arguments = attention_arguments()
    with pytest.raises(KernelArgumentError, match=rf"^{name}: wanted .+, got .+"):
        BACKENDS["reference"].attend(**{**arguments, **change(arguments)})


def test_an_odd_head_dim_is_refused() -> None:
    arguments: dict[str, Any] = attention_arguments() | {
        "q": torch.zeros(3, 4, 7),
        "k_pages": torch.zeros(4, PAGE_SIZE, 2, 7),
        "v_pages": torch.zeros(4, PAGE_SIZE, 2, 7),
    }
    with pytest.raises(KernelArgumentError, match=r"^q: wanted an even head dim"):
        BACKENDS["reference"].attend(**arguments)
