"""Which attention backend is chosen at load, and what a request that cannot run raises."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hogwild_kernels.api import AttentionSpec, KernelArgumentError
from hogwild_kernels.backends import BACKENDS, PREFILL_BACKENDS, choose_backends
from hogwild_kernels.cpu import c_backend
from hogwild_kernels.cuda import triton_attention, varlen
from hogwild_kernels.names import ATTENTIONS, PREFILLS
from long_prefill import on_cpu

CPU = torch.device("cpu")


def chosen(attention: str = "auto", prefill: str = "auto", **changed: Any) -> str:
    """The backend of a layer that suits all of them, but for what is ``changed``."""
    spec = AttentionSpec(torch.device("cuda", 0), torch.bfloat16, 128, 4)._replace(**changed)
    (backend,) = choose_backends(attention, prefill, [spec])
    return backend.name


def refused(match: str, *names: str, **changed: Any) -> None:
    with pytest.raises(KernelArgumentError, match=match):
        chosen(*names, **changed)


def test_every_name_has_a_backend() -> None:
    assert {"auto", *BACKENDS} == set(ATTENTIONS)
    assert {"auto", "same", *PREFILL_BACKENDS} == set(PREFILLS)


def test_the_docs_list_every_name_once() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text().splitlines()
    listed = [line.split("`")[1] for line in lines if line.startswith('| `"')]
    assert listed == [f'"{name}"' for name in ("auto", *list(BACKENDS)[::-1], *PREFILLS)]


def test_names_import_no_torch() -> None:
    code = "import sys, hogwild_kernels.names; sys.exit('torch' in sys.modules)"
    kernels = Path(__file__).parents[2] / "kernels"
    subprocess.run([sys.executable, "-c", code], cwd=kernels, check=True)


def test_unknown_names_are_errors() -> None:
    refused(r"^attention: wanted one of .+, got 'tpu'", "tpu")
    refused(r"^prefill_attention: wanted one of .+, got 'fastest'", "auto", "fastest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_on_the_cpu_is_c_where_it_can_run(dtype: torch.dtype) -> None:
    compiles = c_backend.build_error() is None and dtype in c_backend.DTYPES
    assert chosen(device=CPU, dtype=dtype) == ("native" if compiles else "cpu")
    assert chosen(device=CPU, dtype=dtype, head_dim=80) == "cpu"


def test_auto_without_a_c_compiler_uses_torch_and_native_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c_backend, "build_error", lambda: "no cc")
    assert chosen(device=CPU) == "cpu"
    refused(r"^attention: wanted for 'native' a working C compiler \(no cc\)", "native", device=CPU)


def test_auto_on_cuda_is_triton_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(prefill="same") == "triton"
    monkeypatch.setitem(sys.modules, "hogwild_kernels.cuda.triton_attention", None)
    assert chosen(prefill="same") == "reference"
    assert "plain PyTorch, which is slow: Triton wants" in caplog.text
    refused(r"^attention: wanted for 'triton' Triton 3.* install", "triton")


def test_auto_on_other_devices_is_the_reference() -> None:
    assert chosen(device=torch.device("mps")) == "reference"


@pytest.mark.parametrize("name", ["cpu", "native"])
def test_cpu_backends_want_tensors_on_the_cpu(name: str) -> None:
    refused(rf"^attention: wanted for '{name}' tensors on the CPU", name)


def test_triton_wants_cuda_tensors_outside_of_its_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_attention, "INTERPRETED", False)
    refused(r"^attention: wanted for 'triton' CUDA tensors", "triton", device=CPU)


def test_each_layer_has_the_backend_of_its_spec() -> None:
    specs = [
        AttentionSpec(CPU, torch.float16, 64),
        AttentionSpec(torch.device("mps"), torch.half, 64),
    ]
    backends = choose_backends("auto", "auto", [specs[0], specs[1], specs[0]])
    assert [backend.name for backend in backends] == ["cpu", "reference", "cpu"]


# Prefill backends


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Pretend a CUDA device with both libraries; call it to change an answer."""
    answers: dict[str, object] = {"capability": (8, 0), "flash": print, "torch": print}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: answers["capability"])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(varlen, "_flash_attn", lambda: answers["flash"])
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: answers["torch"])
    return answers.__setitem__


FLASH, VARLEN = (f"triton, {name} for long prompts" for name in ("flash", "varlen"))


def test_auto_takes_flash_attn_then_torchs_own_then_triton(
    card: Callable[[str, object], None],
) -> None:
    assert chosen() == chosen("triton") == chosen(softcap=30.0) == FLASH
    assert chosen("auto", "varlen") == VARLEN
    assert chosen("auto", "same") == "triton"
    assert chosen("reference") == "reference"
    card("flash", None)
    assert chosen() == VARLEN
    assert chosen(softcap=30.0) == "triton"
    card("torch", None)
    assert chosen() == "triton"
    refused("^prefill_attention: wanted for 'flash' flash-attn 2.7", "auto", "flash")
    refused("^prefill_attention: wanted for 'varlen' a torch with varlen_attn", "auto", "varlen")


@pytest.mark.usefixtures("card")
def test_torchs_own_refuses_a_softcap() -> None:
    message = "^prefill_attention: wanted for 'varlen' a model without a softcap"
    refused(message, "auto", "varlen", softcap=30.0)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"dtype": torch.float32}, "a cache in float16"),
        ({"head_dim": 20}, "a head dim that 8 divides"),
        ({"head_dim": 320}, "a head dim that 8 divides, at most 256"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("card")
def test_layers_that_prefill_backends_refuse_stay_with_triton(
    changed: dict[str, Any], wanted: str
) -> None:
    assert chosen(**changed) == "triton"
    refused(f"^prefill_attention: wanted for 'flash' {wanted}", "auto", "flash", **changed)


def test_an_old_card_stays_with_triton(card: Callable[[str, object], None]) -> None:
    card("capability", (7, 5))
    assert chosen() == "triton"


@on_cpu
def test_no_prefill_backend_runs_on_the_cpu_and_one_that_is_named_is_an_error() -> None:
    assert "long prompts" not in chosen(device=CPU)
    for name in PREFILL_BACKENDS:
        refused(f"^prefill_attention: wanted for '{name}' a CUDA device", "auto", name, device=CPU)


def test_libraries_that_lack_what_is_needed_count_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, softcap: float, window_size: Any, return_attn_probs: bool
    ) -> None: ...

    old = SimpleNamespace(
        flash_attn_varlen_func=lambda q, k, v, window_size: None,
        varlen_attn=lambda query, key, value, *, return_aux, scale, window_size: None,
    )
    for module in (old, None):
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        assert varlen._flash_attn.__wrapped__() is None
        assert varlen._torch_varlen.__wrapped__() is None
    new = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", new)
    assert varlen._flash_attn.__wrapped__() is flash_attn_varlen_func


@pytest.mark.usefixtures("card")
def test_the_choice_is_logged_once_per_kind_of_layer(caplog: pytest.LogCaptureFixture) -> None:
    spec = AttentionSpec(torch.device("cuda", 0), torch.bfloat16, 128)
    with caplog.at_level(logging.INFO, logger="hogwild_kernels"):
        choose_backends("auto", "auto", [spec] * 3)
    assert caplog.text.count(f"attention runs by {FLASH}") == 1
