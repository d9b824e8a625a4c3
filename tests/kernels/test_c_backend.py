"""The compiled code: what the tests of attention do not cover, and the operations of a layer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import Case, Row, ordinary_rows
from hogwild_kernels.api import KernelArgumentError
from hogwild_kernels.backends import BACKENDS
from hogwild_kernels.cpu import c_backend

pytestmark = pytest.mark.skipif(
    c_backend.build_error() is not None, reason="there is no C compiler to build it with"
)

DTYPES = tuple(c_backend.DTYPES)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_blocks_and_many_rows(dtype: torch.dtype, threads: int) -> None:
    """More tokens than one task takes, more rows than one tile holds, work for several threads."""
    lengths = (1111, 63)
    rows = ordinary_rows(lengths, 40)
    case = Case(lengths, rows, num_heads=10, num_kv_heads=2, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case.check("native")
    finally:
        torch.set_num_threads(before)


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = Case((63, 20), ordinary_rows((63, 20)))
    wanted, _ = case.run("native")
    rows, heads, dim = case.q.shape
    wide = torch.full((rows, heads * dim + 100), torch.nan)
    wide[:, : heads * dim] = case.q.flatten(1)
    case.q = wide[:, : heads * dim].unflatten(1, (heads, dim))
    got, _ = case.run("native")
    assert torch.equal(got, wanted)


def refused(case: Case, match: str) -> None:
    with pytest.raises(KernelArgumentError, match=match):
        case.run("native")


def test_what_it_cannot_run_is_refused() -> None:
    lengths = (20, 7)
    rows = ordinary_rows(lengths)
    refused(Case(lengths, rows, dtype=torch.float16), "float32 or bfloat16")
    refused(Case(lengths, rows, dim=80), "32 divides")
    refused(Case(lengths, rows, num_heads=66, num_kv_heads=2), "32 query heads")
    case = Case(lengths, rows)
    case.v_pages = case.v_pages.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    case.k_pages = case.k_pages.contiguous()
    refused(case, "^v_pages: wanted strides")


PAIRS = ("deltas", "hi", "offsets")

BAD_READS: dict[str, Any] = {
    "a page that is not there": lambda r: {"pages": [page + 1000 for page in r.pages]},
    "a page before the first": lambda r: {"pages": [page - 1000 for page in r.pages]},
    "a page past int32": lambda r: {"pages": [2**40, *r.pages[1:]]},
    "no pages": lambda r: {"pages": []},
    "tokens past the pages": lambda r: {"hi": [hi + 10_000 for hi in r.hi]},
    "a negative end": lambda r: {"hi": [-1 for _ in r.hi]},
    "offsets past int32": lambda r: {"offsets": [2**40 for _ in r.offsets]},
    "rows past the last": lambda r: {"first_row": r.first_row + 1},
    "rows before the first": lambda r: {"first_row": -1},
    "fewer offsets than pairs": lambda r: {"offsets": r.offsets[1:]},
    "fewer deltas than pairs": lambda r: {"deltas": r.deltas[1:]},
    "fewer pairs than the tensors": lambda r: {name: getattr(r, name)[1:] for name in PAIRS},
}


@pytest.mark.parametrize("fault", [*BAD_READS, "no integers", "no reads"])
@pytest.mark.parametrize("backend", ["native", "cpu"])
def test_a_table_that_points_outside_reads_nothing(fault: str, backend: str) -> None:
    case = Case((20, 7), ordinary_rows((20, 7)))
    first, second = case.reads()
    reads: Any = {"no integers": None, "no reads": ()}.get(fault, ())
    if fault in BAD_READS:
        reads = (first, second._replace(**BAD_READS[fault](second)))
    table = replace(case.table(), derived={}, reads=reads)
    with pytest.raises(IndexError, match=r"^table.reads.*: wanted .+, got"):
        BACKENDS[backend].attend(case.q, case.k_pages, case.v_pages, table, scale=1.0)


# The operations of a layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_add_norm(dtype: torch.dtype, rows: int) -> None:
    x, y = torch.randn(rows, 576).to(dtype) * 5, torch.randn(rows, 576).to(dtype)
    weight, out = torch.rand(576).to(dtype), torch.full((rows, 576), torch.nan, dtype=dtype)
    total = (x.float() + y.float()).to(dtype)
    wanted = torch.nn.functional.rms_norm(total.float(), (576,), weight.float(), 1e-5)
    c_backend.add_norm(x, y, weight, 1e-5, out)
    assert torch.equal(x, total)
    close(out, wanted, dtype)
    c_backend.add_norm(x, None, weight, 1e-5, out)
    assert torch.equal(x, total)
    close(out, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_silu_mul(dtype: torch.dtype, rows: int) -> None:
    gate_up = torch.randn(rows, 2 * 1536).to(dtype) * 8
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 1e30, -1e30])
    out = torch.full((rows, 1536), torch.nan, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    c_backend.silu_mul(gate_up, out)
    close(out, torch.nn.functional.silu(gate) * up, dtype)


# Attention of bfloat16, with AMX where the processor has it, and without


AMX = (False, True) if c_backend.build_error() is None and c_backend.has_amx() else (False,)


@pytest.fixture(params=AMX, ids=lambda amx: "amx" if amx else "no-amx")
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(c_backend, "has_amx", lambda: request.param)
    return request.param


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("seed", range(6))
def test_any_ranges_on_pages_of_any_size(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 31, 32, 33, 63, 200, 600)) for _ in range(rng.randint(1, 4))]
    rows = []
    for _ in range(rng.randint(1, 8)):
        ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in lengths]
        reads = [(rng.randint(-99, 99), lo, hi) for lo, hi in ends]
        rows.append(Row(rng.randint(0, 900), reads))
    Case(lengths, rows, dtype=torch.bfloat16, page_size=page_size, seed=seed).check("native")


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (12, 2), (32, 1)])
def test_heads_and_rows_of_bfloat16(dim: int, heads: int, kv_heads: int) -> None:
    lengths = (70, 9)
    for num_rows in (1, 5, 11):
        rows = ordinary_rows(lengths, num_rows)
        case = Case(lengths, rows, heads, kv_heads, dim, torch.bfloat16, page_size=32)
        case.check("native")


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("q_scale", [1.0, 5.0])
def test_softcap_and_sinks_of_bfloat16(q_scale: float) -> None:
    lengths = (600, 40)
    rows = ordinary_rows(lengths, 3)
    case = Case(lengths, rows, dtype=torch.bfloat16, page_size=32, q_scale=q_scale)
    case.check("native", softcap=5.0)
    case.check("native", sinks=torch.tensor([0.5, -3.0, 9.0, 0.0]))
    case.scale = -case.scale
    case.check("native")


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("q_scale", [1e5, 1e9, 1e20])
def test_huge_scores_stay_finite(q_scale: float) -> None:
    rows = [Row(0, [(0, 0, 40)]), Row(0, [(0, 0, 10)])]
    case = Case((40,), rows, 2, 2, dtype=torch.bfloat16, q_scale=q_scale)
    out, _ = case.run("native")
    torch.testing.assert_close(out.double(), case.wanted()[0], atol=0.03, rtol=0.03)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [600, 40])
def test_a_row_that_sees_nothing_but_nan_in_a_task_is_nan(length: int, dtype: torch.dtype) -> None:
    """Tasks are cut at 512 tokens: the first row sees one of the first task's, the second none."""
    hidden = length - 1 if length < 512 else 511
    rows = [Row(0, [(0, hidden, length)]), Row(0, [(0, hidden + 1, length)]), Row(0, [(0, 0, 9)])]
    case = Case((length,), rows, 2, 2, dtype=dtype, page_size=32)
    case.k_pages[case.pages[0][hidden // 32], hidden % 32] = torch.nan
    case.q[2, 0] = torch.nan
    out, lse = case.run("native")
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
    assert out[2, 0].isnan().all()
    assert lse[2, 0].isnan()
    assert out[2, 1].isfinite().all()


@pytest.mark.usefixtures("amx")
def test_a_key_that_is_not_a_number_shows() -> None:
    rows = [Row(0, [(0, 0, 40)]), Row(0, [(0, 0, 10)])]
    case = Case((40,), rows, 2, 2, dtype=torch.bfloat16)
    case.k_pages[case.pages[0][1], 4, 0, 3] = torch.nan
    out, _ = case.run("native")
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
    assert out[1].isfinite().all()


def test_a_row_reads_nothing_where_it_sees_nothing() -> None:
    out, lse = Case((5,), [Row(0, [(0, 5, 5)])] * 3).run("native")
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [300, 3000])
def test_equal_calls_give_equal_numbers_whatever_thread_is_faster(
    length: int, dtype: torch.dtype
) -> None:
    case = Case((length, 40), ordinary_rows((length, 40)), dtype=dtype, page_size=32)
    table = case.table()

    def run() -> torch.Tensor:
        tensors = case.q, case.k_pages, case.v_pages, table
        return BACKENDS["native"].attend(*tensors, scale=case.scale)[0]

    first = run()
    assert all(torch.equal(run(), first) for _ in range(60))
