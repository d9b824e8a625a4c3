"""Prefill backends: how they call their libraries.

The libraries are the definition itself here (`sequences.plain`); on a GPU they are the real ones.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen as torch_varlen

from cases import TOLERANCE, Case
from hogwild_kernels.api import AttentionSpec
from hogwild_kernels.backends import PREFILL_BACKENDS, choose_backends
from hogwild_kernels.cuda import varlen
from long_prefill import chunk, on_cpu, on_gpu
from sequences import plain


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """The arguments of flash-attn 2.7 and 2.8, and what they mean there."""
    assert softmax_scale is not None
    assert return_attn_probs
    assert dropout_p == 0
    check_bounds(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size[0], 0 if causal else window_size[1])
    cap = softcap if softcap > 0 else None
    out, lse = plain(q, k, v, scale=softmax_scale, softcap=cap, window=window)
    return out, lse.T.contiguous(), None


def varlen_attn(*args: Any, **options: Any) -> Any:
    """The arguments of this torch, and what they mean there."""
    given = inspect.signature(torch_varlen.varlen_attn).bind(*args, **options).arguments
    q, k, v = given["query"], given["key"], given["value"]
    names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
    check_bounds(q, k, *(given[name] for name in names))
    assert given["enable_gqa"]
    assert given["return_aux"].lse
    out, lse = plain(q, k, v, scale=given["scale"], softcap=None, window=given["window_size"])
    return out, lse.T.contiguous()


def check_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    of_rows: torch.Tensor,
    of_keys: torch.Tensor,
    max_rows: int,
    max_keys: int,
) -> None:
    for x, bounds, longest in ((q, of_rows, max_rows), (k, of_keys, max_keys)):
        assert bounds.dtype == torch.int32
        assert bounds.tolist() == [0, longest] == [0, x.shape[0]]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that check their arguments, and compute here."""
    module = SimpleNamespace(varlen_attn=varlen_attn, AuxRequest=torch_varlen.AuxRequest)
    monkeypatch.setattr(varlen, "_flash_attn", lambda: flash_attn_varlen_func)
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: module)


@on_cpu
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", PREFILL_BACKENDS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (20, -1)], ids=str)
def test_a_library_is_called_by_its_own_signature(name: str, window: tuple[int, int]) -> None:
    q, k, v = torch.randn(12, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 16)
    options: dict[str, Any] = {"scale": 0.3, "softcap": None, "window": window}
    wanted = plain(q, k, v, **options)
    torch.testing.assert_close(PREFILL_BACKENDS[name].attend(q, k, v, **options), wanted)


@on_cpu
@pytest.mark.usefixtures("libraries")
def test_flash_attn_gets_the_softcap() -> None:
    q, k, v = (torch.randn(12, 4, 16) * 4 for _ in "qkv")
    options: dict[str, Any] = {"scale": 1.0, "softcap": 3.0, "window": (-1, 0)}
    torch.testing.assert_close(
        PREFILL_BACKENDS["flash"].attend(q, k, v, **options), plain(q, k, v, **options)
    )


@on_cpu
def test_the_state_of_torchs_varlen_attn_has_its_own_shapes() -> None:
    """By torch's own operator, on tensors without data that claim to be on a GPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(n, h, 64, device="cuda") for n, h in ((12, 4), (30, 2), (30, 2)))
        out, lse = PREFILL_BACKENDS["varlen"].attend(
            q, k, v, scale=0.3, softcap=None, window=(-1, 0)
        )
    assert out.shape == (12, 4, 64)
    assert lse.shape == (12, 4)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", PREFILL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (6, 0), (300, 0), (600, -1), (0, -1)], ids=str
)
def test_a_library_equals_the_definition(
    name: str, dtype: torch.dtype, window: tuple[int, int]
) -> None:
    if reason := PREFILL_BACKENDS[name].supports(AttentionSpec(torch.device("cuda"), dtype, 128)):
        pytest.skip(f"{name} wants {reason}")
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 128).to(dtype) for n, h in ((300, 8), (777, 2), (777, 2)))
    options: dict[str, Any] = {"scale": 128**-0.5, "softcap": None, "window": window}
    got = PREFILL_BACKENDS[name].attend(q.cuda(), k.cuda(), v.cuda(), **options)
    for part, wanted in zip(got, plain(q, k, v, **options), strict=True):
        torch.testing.assert_close(part.cpu(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", PREFILL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_chunks_on_a_gpu_beside_tokens_that_decode(name: str, dtype: torch.dtype) -> None:
    spec = AttentionSpec(torch.device("cuda"), dtype, 64, 2)
    if reason := PREFILL_BACKENDS[name].supports(spec):
        pytest.skip(f"{name} wants {reason}")
    (backend,) = choose_backends("auto", name, [spec])
    for window in (None, 25, 64):
        lengths = (37, 21, 50)
        rows = [*chunk(lengths, [1], 20, 1, window), *chunk(lengths, [1, 0, 2], 12, 30, window)]
        case = Case(lengths, rows, dtype=dtype, window=window)
        table = case.table([range(1, 31)])
        columns = {n: c.cuda() for n, c in vars(table).items() if torch.is_tensor(c)}
        out, lse = backend.attend(
            case.q.cuda(),
            case.k_pages.cuda(),
            case.v_pages.cuda(),
            replace(table, **columns, derived={}),
            scale=case.scale,
        )
        case.check_output(out.cpu(), lse.cpu())
