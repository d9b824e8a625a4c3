"""Libraries for long runs of rows: how they are called, and which one attends.

They are the definition itself here (`sequences.plain`); on a GPU they are the real ones.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen as torch_varlen

from cases import TOLERANCE, Case
from hogwild_kernels import KernelArgumentError, backends, block_attention
from hogwild_kernels.cuda import varlen
from long_prefill import CPU, beside_decode, check, feed, on_cpu, on_gpu, with_runs
from sequences import plain

# How the libraries are called


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
    """Libraries that check what they are given, and compute here."""
    module = SimpleNamespace(varlen_attn=varlen_attn, AuxRequest=torch_varlen.AuxRequest)
    monkeypatch.setattr(varlen, "_flash_attn", lambda: flash_attn_varlen_func)
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: module)


@on_cpu
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", varlen.BACKENDS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (20, -1)], ids=str)
def test_a_library_is_called_by_its_own_signature(name: str, window: tuple[int, int]) -> None:
    q, k, v = torch.randn(12, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 16)
    options: dict[str, Any] = {"scale": 0.3, "softcap": None, "window": window}
    wanted = plain(q, k, v, **options)
    torch.testing.assert_close(varlen.BACKENDS[name](q, k, v, **options), wanted)


@on_cpu
@pytest.mark.usefixtures("libraries")
def test_flash_attn_gets_the_softcap() -> None:
    q, k, v = (torch.randn(12, 4, 16) * 4 for _ in "qkv")
    options: dict[str, Any] = {"scale": 1.0, "softcap": 3.0, "window": (-1, 0)}
    torch.testing.assert_close(varlen.flash(q, k, v, **options), plain(q, k, v, **options))


@on_cpu
def test_the_state_of_torchs_varlen_attn_has_its_own_shapes() -> None:
    """Through torch's own operator, on tensors without data that claim to be on a GPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(n, h, 64, device="cuda") for n, h in ((12, 4), (30, 2), (30, 2)))
        out, lse = varlen.varlen(q, k, v, scale=0.3, softcap=None, window=(-1, 0))
    assert out.shape == (12, 4, 64)
    assert lse.shape == (12, 4)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", varlen.BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (6, 0), (300, 0), (600, -1), (0, -1)], ids=str
)
def test_a_library_gives_what_the_definition_gives(
    name: str, dtype: torch.dtype, window: tuple[int, int]
) -> None:
    refusal = varlen.refusal(name, torch.device("cuda"), dtype, 128, None)
    if refusal:
        pytest.skip(f"{name} wants {refusal}")
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 128).to(dtype) for n, h in ((300, 8), (777, 2), (777, 2)))
    options: dict[str, Any] = {"scale": 128**-0.5, "softcap": None, "window": window}
    got = varlen.BACKENDS[name](q.cuda(), k.cuda(), v.cuda(), **options)
    for part, wanted in zip(got, plain(q, k, v, **options), strict=True):
        torch.testing.assert_close(part.cpu(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", varlen.BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_feeds_on_a_gpu_beside_rows_that_decode(name: str, dtype: torch.dtype) -> None:
    refusal = varlen.refusal(name, torch.device("cuda"), dtype, 64, None)
    if refusal:
        pytest.skip(f"{name} wants {refusal}")
    for window in (None, 25, 64):
        lengths = (37, 21, 50)
        rows = [*feed(lengths, [1], 20, 1), *feed(lengths, [1, 0, 2], 12, 30, window)]
        case = Case(lengths, rows, dtype=dtype)
        table = with_runs(case, range(1, 31))
        columns = {n: c.cuda() for n, c in vars(table).items() if torch.is_tensor(c)}
        out, lse = block_attention(
            case.q.cuda(),
            case.k_pages.cuda(),
            case.v_pages.cuda(),
            replace(table, **columns),
            scale=case.scale,
            prefill=name,
        )
        case.check_output(out.cpu(), lse.cpu())


# Who attends


@on_cpu
def test_no_library_attends_on_the_cpu_and_one_that_is_named_is_an_error() -> None:
    case, prompt = beside_decode()
    table = with_runs(case, prompt)
    tensors = case.q, case.k_pages, case.v_pages
    for name in varlen.BACKENDS:
        with pytest.raises(KernelArgumentError, match=rf"^prefill: wanted for '{name}' a CUDA dev"):
            block_attention(*tensors, table, scale=1.0, prefill=name)
    with pytest.raises(KernelArgumentError, match=r"^prefill: wanted one of"):
        block_attention(*tensors, table, scale=1.0, prefill="fastest")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """A card with both libraries, as far as questions about it go; says what to change."""
    answers: dict[str, object] = {"capability": (8, 0), "flash": print, "torch": print}
    get = torch.cuda
    monkeypatch.setattr(get, "get_device_capability", lambda _=None: answers["capability"])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(varlen, "_flash_attn", lambda: answers["flash"])
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: answers["torch"])
    return answers.__setitem__


def chosen(prefill: str = "auto", impl: str = "auto", **changed: Any) -> str:
    kind = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "dim": 128, **changed}
    return backends.prefill_implementation.__wrapped__(prefill, impl, **kind)


def test_auto_takes_flash_attn_then_torchs_own_then_our_kernels(
    card: Callable[[str, object], None],
) -> None:
    assert chosen() == chosen(impl="triton") == chosen(softcap=30.0) == "flash"
    assert chosen("varlen") == "varlen"
    assert chosen("same") == chosen(impl="reference") == "same"
    card("flash", None)
    assert chosen() == "varlen"
    assert chosen(softcap=30.0) == "same"
    card("torch", None)
    assert chosen() == "same"
    for name, wanted in (("flash", "flash-attn 2.7"), ("varlen", "a torch with varlen_attn")):
        with pytest.raises(KernelArgumentError, match=rf"^prefill: wanted for '{name}' {wanted}"):
            chosen(name)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"dtype": torch.float32}, "a cache in float16"),
        ({"dtype": torch.float8_e4m3fn}, "a cache in float16"),
        ({"dim": 20}, "a head dim that 8 divides"),
        ({"dim": 320}, "a head dim that 8 divides, at most 256"),
        ({"device": CPU}, "a CUDA device"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("card")
def test_caches_that_libraries_refuse_stay_with_our_kernels(
    changed: dict[str, Any], wanted: str
) -> None:
    assert chosen(**changed) == "same"
    with pytest.raises(KernelArgumentError, match=f"^prefill: wanted for 'flash' {wanted}"):
        chosen("flash", **changed)


def test_an_old_card_stays_with_our_kernels(card: Callable[[str, object], None]) -> None:
    card("capability", (7, 5))
    assert chosen() == "same"


def test_libraries_that_lack_what_is_needed_count_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = SimpleNamespace(
        flash_attn_varlen_func=lambda q, k, v, window_size: None,
        varlen_attn=lambda query, key, value, *, return_aux, scale, window_size: None,
    )
    for module in (old, None):
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert varlen._flash_attn.__wrapped__() is None
        assert varlen._torch_varlen.__wrapped__() is None
    monkeypatch.setitem(sys.modules, "flash_attn", sys.modules[__name__])
    assert varlen._flash_attn.__wrapped__() is flash_attn_varlen_func


@on_cpu
@pytest.mark.usefixtures("sequence_calls")
def test_who_attends_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    case, prompt = beside_decode()
    with caplog.at_level(logging.INFO, logger="hogwild_kernels"):
        for _ in range(3):
            check(case, prompt, impl="reference")
    assert caplog.text.count("long prompts attend through 'flash'") == 1
