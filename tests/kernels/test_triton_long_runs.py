"""Long runs of rows by attention over sequences, beside rows that the Triton kernels serve.

The library is the definition itself here (`sequences.plain`); on a GPU it is the real one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cases import TOLERANCE, Case
from hogwild_kernels import BlockTable, block_attention
from hogwild_kernels.cuda import long_runs, triton_attention, varlen
from long_prefill import beside_decode, check, feed, on_cpu, with_runs


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_long_feed_reads_all_blocks_of_its_view_beside_rows_that_decode(
    dtype: torch.dtype,
) -> None:
    storage = "page-major" if dtype is torch.float16 else "head-major"
    case, prompt = beside_decode(dtype=dtype, storage=storage)
    check(case, prompt)


@on_cpu
@pytest.mark.parametrize("window", [1, 7, 16, 31, 50, 64, 90, 150])
def test_a_window_slides_over_the_blocks_of_a_long_feed(
    sequence_calls: list[tuple[int, int]], window: int
) -> None:
    """It hides blocks from all rows, from the last rows, their first tokens, and nothing."""
    lengths = (37, 21, 50)
    case = Case(lengths, feed(lengths, [1, 0, 2], 12, 30, window))
    check(case, range(30), impl="reference")
    assert len(sequence_calls) >= 1


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_sinks_count_once_however_many_blocks_are_merged(impl: str) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0])
    case, prompt = beside_decode()
    check(case, prompt, impl=impl, sinks=sinks)
    alone = Case(case.lengths, case.rows[1:31])
    check(alone, range(30), impl=impl, sinks=sinks)


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
def test_softcap_and_queries_of_any_strides() -> None:
    case, prompt = beside_decode(q_scale=4.0)
    case.q = case.q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    check(case, prompt, softcap=3.0)


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
@pytest.mark.parametrize(("group", "dim"), [(1, 80), (3, 64), (7, 96), (2, 256)])
def test_head_groups_and_head_dims(group: int, dim: int) -> None:
    case, prompt = beside_decode(num_heads=2 * group, num_kv_heads=2, dim=dim)
    check(case, prompt, impl="reference")


@on_cpu
def test_two_long_feeds_that_share_blocks_and_a_row_between_them(
    sequence_calls: list[tuple[int, int]],
) -> None:
    lengths = (40, 33, 30)
    first, second = feed(lengths, [0, 1], 3, 20), feed(lengths, [1, 0, 2], 10, 20)
    case = Case(lengths, [*first, *feed(lengths, [0], 39, 1), *second])
    check(case, range(20), range(21, 41))
    assert sequence_calls == [(20, 40), (20, 23), (20, 40), (20, 33), (20, 30)]


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
def test_other_rows_share_one_launch_that_is_cut_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case, prompt = beside_decode()
    tables: list[BlockTable] = []
    attention = triton_attention.block_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: BlockTable, **o: Any) -> Any:
        tables.append(table)
        return attention(q, k, v, table, **o)

    monkeypatch.setattr(triton_attention, "block_attention", spy)
    check(case, prompt)
    (table,) = tables
    assert table.num_active == 2
    rows = table.row_of_pair()
    assert set(rows[table.lo < table.hi].tolist()) == {0, 31}
    check(Case(case.lengths, case.rows[1:31]), range(30))
    assert len(tables) == 1  # a pass of long feeds alone launches nothing of ours


@on_cpu
@pytest.mark.parametrize("impl", ["reference", "cpu", "native", "triton", "auto"])
def test_runs_say_again_what_the_columns_say(impl: str) -> None:
    """Where no library attends, a table with runs gives what it gives without."""
    case, prompt = beside_decode()
    options: dict[str, Any] = {"scale": case.scale, "impl": impl}
    tensors = case.q, case.k_pages, case.v_pages
    case.check_output(*block_attention(*tensors, with_runs(case, prompt), **options))


def test_no_call_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data: asking one for its numbers raises."""
    case, prompt = beside_decode()
    table = with_runs(case, prompt)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        assert varlen._bounds(q).shape == varlen._bounds(k).shape == (2,)
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def rest(q: torch.Tensor, *_: Any) -> Any:
        return torch.empty_like(q), q.new_empty(q.shape[:2])

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        columns = {
            name: mode.from_tensor(column)
            for name, column in vars(table).items()
            if torch.is_tensor(column)
        }
        q, k_pages, v_pages = map(mode.from_tensor, (case.q, case.k_pages, case.v_pages))
        out, _ = long_runs.block_attention(
            q,
            k_pages,
            v_pages,
            replace(table, **columns, derived={}),
            scale=1.0,
            softcap=None,
            sinks=None,
            attend=attend,
            rest=rest,
        )
    assert out.shape == case.q.shape
