"""Long prompt chunks by a prefill backend, beside query tokens that the Triton kernels serve.

The prefill backend is the definition itself here (`sequences.plain`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cases import TOLERANCE, Case
from hogwild_kernels.api import AttentionSpec
from hogwild_kernels.backends import BACKENDS, PREFILL_BACKENDS
from hogwild_kernels.cuda import triton_attention, varlen
from hogwild_kernels.cuda.long_runs import LongPromptBackend
from hogwild_kernels.table import BlockTable
from long_prefill import beside_decode, check, chunk, on_cpu


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_long_chunk_reads_all_blocks_of_its_view_beside_tokens_that_decode(
    dtype: torch.dtype,
) -> None:
    storage = "page-major" if dtype is torch.float16 else "head-major"
    case, prompt = beside_decode(dtype=dtype, storage=storage)
    check(case, prompt)


@on_cpu
@pytest.mark.parametrize("window", [1, 7, 16, 31, 50, 64, 90, 150])
def test_a_window_slides_over_the_blocks_of_a_long_chunk(
    sequence_calls: list[tuple[int, int]], window: int
) -> None:
    """It hides blocks from all rows, from the last rows, their first tokens, and nothing."""
    lengths = (37, 21, 50)
    case = Case(lengths, chunk(lengths, [1, 0, 2], 12, 30, window), window=window)
    check(case, range(30), attention="reference")
    assert len(sequence_calls) >= 1


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
@pytest.mark.parametrize("attention", ["triton", "reference"])
def test_sinks_count_once_however_many_blocks_are_merged(attention: str) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0])
    case, prompt = beside_decode()
    check(case, prompt, attention=attention, sinks=sinks)
    alone = Case(case.lengths, case.rows[1:31])
    check(alone, range(30), attention=attention, sinks=sinks)


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
    check(case, prompt, attention="reference")


@on_cpu
def test_two_long_chunks_that_share_blocks_and_a_token_between_them(
    sequence_calls: list[tuple[int, int]],
) -> None:
    lengths = (40, 33, 30)
    first, second = chunk(lengths, [0, 1], 3, 20), chunk(lengths, [1, 0, 2], 10, 20)
    case = Case(lengths, [*first, *chunk(lengths, [0], 39, 1), *second])
    check(case, range(20), range(21, 41))
    assert sequence_calls == [(20, 40), (20, 23), (20, 40), (20, 33), (20, 30)]


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
def test_other_query_tokens_share_one_launch_that_is_sized_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert len(tables) == 1  # a batch of long chunks alone launches no Triton kernel


@on_cpu
@pytest.mark.parametrize("backend", ["reference", "cpu", "native", "triton"])
def test_without_a_prefill_backend_long_rows_change_nothing(backend: str) -> None:
    case, prompt = beside_decode()
    if reason := BACKENDS[backend].supports(AttentionSpec(case.q.device, case.dtype, case.dim)):
        pytest.skip(f"{backend} wants {reason}")
    tensors = case.q, case.k_pages, case.v_pages, case.table([prompt])
    case.check_output(*BACKENDS[backend].attend(*tensors, scale=case.scale))


def test_long_rows_without_their_integers_are_refused() -> None:
    case, prompt = beside_decode()
    with pytest.raises(ValueError, match=r"^reads: wanted the block reads"):
        replace(case.table([prompt]), reads=None)


def test_no_call_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data, reading a number raises."""
    case, prompt = beside_decode()
    table = case.table([prompt])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        assert varlen._cu_seqlens(q).shape == varlen._cu_seqlens(k).shape == (2,)
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def others(q: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.empty_like(q), q.new_empty(q.shape[:2])

    monkeypatch.setattr(BACKENDS["reference"], "_attend", others)
    monkeypatch.setattr(PREFILL_BACKENDS["flash"], "attend", attend)
    backend = LongPromptBackend(BACKENDS["reference"], PREFILL_BACKENDS["flash"])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        columns = {
            name: mode.from_tensor(column)
            for name, column in vars(table).items()
            if torch.is_tensor(column)
        }
        q, k_pages, v_pages = map(mode.from_tensor, (case.q, case.k_pages, case.v_pages))
        table = replace(table, **columns, derived={})
        out, _ = backend.attend(q, k_pages, v_pages, table, scale=1.0)
    assert out.shape == case.q.shape
