"""The Triton kernels against attention over each query token's materialised view.

They run in Triton's interpreter, or on the GPU if there is one. Tiles are small, so that a few
tokens make many of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cases import TOLERANCE, Case, Row, ordinary_rows
from hogwild_kernels.cuda import triton_attention
from hogwild_kernels.cuda.triton_config import Config, choose
from hogwild_kernels.reference import merge_states
from hogwild_kernels.table import BlockTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(16, 16, 4, 2, programs_per_sm=1, min_tiles=1)


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that what a kernel fails to write shows in the output."""
    empty = torch.empty

    def nan_filled(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan_filled)


def with_columns(table: BlockTable, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockTable:
    columns = {column.name: getattr(table, column.name) for column in fields(table)}
    tensors = {name: change(column) for name, column in columns.items() if torch.is_tensor(column)}
    return replace(table, **tensors, derived={})


def on_device(table: BlockTable) -> BlockTable:
    return with_columns(table, lambda column: column.to(DEVICE))


def run(
    case: Case, config: Config | None = SMALL, num_programs: int | None = 3, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {
        name: value.to(DEVICE) if torch.is_tensor(value) else value
        for name, value in options.items()
    }
    out, lse = triton_attention.block_attention(
        case.q.to(DEVICE),
        case.k_pages.to(DEVICE),
        case.v_pages.to(DEVICE),
        on_device(case.table()),
        scale=case.scale,
        config=config,
        num_programs=num_programs,
        **options,
    )
    return out.cpu(), lse.cpu()


def check(
    case: Case, config: Config | None = SMALL, num_programs: int | None = 3, **options: Any
) -> None:
    case.check_output(*run(case, config, num_programs, **options), **options)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("lengths", [(1,), (63, 5), (111, 0, 17), (16, 32, 1, 63)], ids=str)
def test_query_tokens_see_every_block_at_its_place_in_their_view(
    dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    storage = "page-major" if len(lengths) % 2 else "head-major"
    check(Case(lengths, ordinary_rows(lengths), dtype=dtype, storage=storage))


@pytest.mark.parametrize("num_programs", [1, 2, 5, 40])
def test_the_output_does_not_depend_on_the_number_of_splits(num_programs: int) -> None:
    """Splits inside blocks, between blocks, and more programs than tiles."""
    lengths = (63, 0, 33, 17)
    check(Case(lengths, ordinary_rows(lengths)), num_programs=num_programs)


@pytest.mark.parametrize(
    ("group", "dim"), [(1, 80), (3, 64), (4, 128), (7, 96), (2, 256), (40, 20), (17, 16)]
)
def test_head_groups_and_head_dims(group: int, dim: int) -> None:
    """Also a group that is larger than a tile, which is then split."""
    lengths = (40, 9)
    rows = ordinary_rows(lengths)
    check(Case(lengths, rows, num_heads=2 * group, num_kv_heads=2, dim=dim))


@pytest.mark.parametrize("seed", range(10))
def test_any_ranges_and_any_readers(seed: int) -> None:
    """Windows, hidden blocks, query tokens without a pair, blocks without a reader."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 15, 16, 17, 63, 111)) for _ in range(rng.randint(1, 5))]
    rows = []
    for _ in range(rng.randint(1, 11)):
        reads: list[tuple[int, int, int] | None] = []
        for length in lengths:
            lo, hi = rng.randint(0, length), rng.randint(0, length)
            seen = (rng.randint(-200, 200), lo, hi)
            reads.append(None if rng.random() < 0.3 else seen)
        rows.append(Row(rng.randint(0, 300), reads))
    check(Case(lengths, rows, seed=seed), num_programs=rng.randint(1, 6))


def test_prefill_and_decode_of_several_sessions_in_one_launch() -> None:
    """Session one encodes 21 prompt tokens; two workers of session two decode one token each."""
    prompt = [Row(0, [(0, 0, 8 + i), None, None, None]) for i in range(21)]
    workers = [
        Row(67, [None, (67, 0, 50), (17, 0, 17), (0, 0, 9)]),
        Row(59, [None, (59, 0, 50), (0, 0, 17), (9, 0, 9)]),
    ]
    case = Case((28, 50, 17, 9), [*prompt, *workers])
    check(case, num_programs=4)
    check(case, None, None)


def test_a_window_hides_the_tokens_before_it() -> None:
    length, window = 111, 20
    rows = [Row(0, [(0, max(0, last - window), last)]) for last in (1, 19, 20, 21, 63, 111)]
    check(Case((length,), rows))


def test_a_query_token_that_sees_nothing_is_zero_with_lse_minus_infinity() -> None:
    rows = [Row(0, [(0, 0, 20)]), Row(0, [(0, 7, 7)]), Row(0, [(0, 9, 2)]), Row(0, [None])]
    out, lse = run(Case((20,), rows))
    assert out[1:].eq(0).all()
    assert lse[1:].eq(-math.inf).all()


@pytest.mark.parametrize("lengths", [(), (0, 5)], ids=str)
def test_a_batch_in_which_every_query_token_sees_nothing(lengths: Sequence[int]) -> None:
    out, lse = run(Case(lengths, [Row(0, [(0, 0, 0), (0, 3, 3)][: len(lengths)])] * 2))
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_a_batch_without_query_tokens() -> None:
    out, lse = run(Case((20,), []))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_an_empty_range_past_the_written_tokens_reads_no_unwritten_slot() -> None:
    check(Case((20,), [Row(0, [(0, 0, 20)]), Row(0, [(0, 30, 25)])]))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_softcap_and_sinks(dtype: torch.dtype) -> None:
    lengths = (63, 20)
    rows = [*ordinary_rows(lengths), Row(0, [(0, 0, 0), (0, 0, 0)])]
    case = Case(lengths, rows, dtype=dtype, q_scale=4.0)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], dtype=dtype)
    check(case, softcap=3.0)
    check(case, sinks=sinks)
    check(case, softcap=3.0, sinks=sinks)


def test_lse_is_the_natural_logarithm() -> None:
    case = Case((40,), [Row(0, [(0, 0, 40)])])
    case.q = torch.zeros_like(case.q)
    _, lse = run(case)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(40)))


def test_large_scores_do_not_overflow() -> None:
    lengths = (63, 17)
    check(Case(lengths, ordinary_rows(lengths), q_scale=300.0))
    check(Case(lengths, ordinary_rows(lengths), q_scale=300.0), softcap=50.0)


def test_queries_of_any_strides() -> None:
    lengths = (20, 17)
    case = Case(lengths, ordinary_rows(lengths))
    case.q = case.q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert case.q.stride(-1) != 1
    check(case)


def test_one_table_serves_layers_with_other_heads_and_pages() -> None:
    lengths = (63, 20)
    rows = ordinary_rows(lengths)
    first = Case(lengths, rows, num_heads=8, num_kv_heads=1)
    second = Case(lengths, rows, num_heads=2, num_kv_heads=2, storage="page-major")
    table = on_device(first.table())
    for case in (first, second, first):
        out, lse = triton_attention.block_attention(
            case.q.to(DEVICE),
            case.k_pages.to(DEVICE),
            case.v_pages.to(DEVICE),
            table,
            scale=case.scale,
            config=SMALL,
        )
        case.check_output(out.cpu(), lse.cpu())


def test_states_merge_into_attention_over_the_union() -> None:
    lengths = (63, 20)
    rows = ordinary_rows(lengths)
    parts = []
    for block in range(2):
        part = Case(lengths, rows)
        part.rows = [
            Row(row.own_start, [r if i == block else None for i, r in enumerate(row.reads)])
            for row in rows
        ]
        parts.append(run(part))
    outs, lses = (torch.stack(states) for states in zip(*parts, strict=True))
    case = Case(lengths, rows)
    case.check_output(*merge_states(outs, lses))


def test_a_launch_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data, reading a number raises."""

    class Unlaunched:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **options: None

    lengths = (63, 20)
    case = Case(lengths, ordinary_rows(lengths))
    monkeypatch.undo()  # of what fills tensors with NaN
    for kernel in ("split_kernel", "reduce_kernel"):
        monkeypatch.setattr(triton_attention, kernel, Unlaunched())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k_pages, v_pages = map(mode.from_tensor, (case.q, case.k_pages, case.v_pages))
        table = with_columns(case.table(), mode.from_tensor)
        out, _ = triton_attention.block_attention(q, k_pages, v_pages, table, scale=1.0)
    assert out.shape == case.q.shape


@pytest.mark.parametrize("num_rows", [1, 4, 16, 512])
@pytest.mark.parametrize("group", [1, 4, 7, 40, 200])
def test_a_configuration_holds_whole_heads_and_is_no_larger_than_needed(
    num_rows: int, group: int
) -> None:
    config = choose(num_rows, group, 128, 2)
    assert config.block_m in (16, 32, 64, 128)
    assert config.block_m == 16 or num_rows * group > config.block_m // 2
