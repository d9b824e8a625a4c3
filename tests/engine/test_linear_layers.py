"""Linear layers in their fastest form: which form is chosen, and the numbers of `nn.Linear`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hogwild_engine.step import linear_layers, linear_packing
from hogwild_kernels.cpu import matrix
from tiny import FAMILIES, tiny_model

IDS = torch.tensor([[5, 600, 7, 1, 2, 9000, 11]])

# The C code needs AVX-512.
HAS_NATIVE = not any(
    matrix.unsupported_reason(torch.zeros((16, 64), dtype=dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.int8)
)
NATIVE = (linear_layers.NativeLinear,) if HAS_NATIVE else ()
FORMS = (*NATIVE, linear_layers.PackedLinear)
INT8_FORMS = (
    *((linear_layers.NativeInt8Linear,) if HAS_NATIVE else ()),
    linear_layers.PackedInt8Linear,
)
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no compiler, or no AVX-512 here")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits[0].float()


def forms_in(model: Any) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, FORMS)}


def without(monkeypatch: pytest.MonkeyPatch, *forms: Any) -> None:
    """Make ``forms`` fail as they do on a machine that lacks their operator."""

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such operator here")

    for form in forms:
        monkeypatch.setattr(linear_packing, form.__name__, fail)
    linear_packing._warn_once.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_layers_give_the_same_logits(family: str) -> None:
    model = tiny_model(family)
    wanted = logits(model)
    linear_packing.pack(model, "none", {})
    assert forms_in(model)
    torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_form_takes_any_number_of_rows(
    form: Any, rows: int, dtype: torch.dtype, bias: bool
) -> None:
    plain = torch.nn.Linear(64, 80, bias=bias).to(dtype).requires_grad_(False)
    layer = form(plain.weight, plain.bias)
    x = torch.randn(1, rows, 64, dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(layer(x), plain(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_the_next_form_is_used_where_one_is_not_available(
    monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    without(monkeypatch, *(other for other in FORMS if other is not form))
    model = tiny_model("llama")
    wanted = logits(model)
    linear_packing.pack(model, "none", {})
    assert forms_in(model) == {form}
    torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=2e-4)


@needs_native
def test_tied_embeddings_stay_one_tensor() -> None:
    model = tiny_model("llama")
    embedding = model.get_input_embeddings().weight
    model.get_output_embeddings().weight = embedding
    wanted = logits(model)
    linear_packing.pack(model, "none", {})
    assert model.get_output_embeddings().matrix.struct.weight == embedding.data_ptr()
    torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=2e-4)


def test_a_dtype_that_no_form_takes_stays_plain() -> None:
    model = tiny_model("llama").half()
    linear_packing.pack(model, "none", {})
    assert not forms_in(model)


@pytest.mark.parametrize("form", INT8_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_smoothing_keeps_int8_exact_beside_an_outlier_channel(
    dtype: torch.dtype, form: Any
) -> None:
    plain = torch.nn.Linear(64, 80).to(dtype).requires_grad_(False)
    x = torch.randn(3, 64).to(dtype)
    x[:, 5] *= 300
    wanted = plain(x).float()
    with linear_packing.recorded_absmax(plain) as absmax:
        plain(x)
    assert torch.equal(absmax[plain], x.abs().amax(0))
    unsmoothed, smoothed = (
        float((form(plain.weight, plain.bias, channels)(x).float() - wanted).norm())
        for channels in (None, absmax[plain])
    )
    assert smoothed < unsmoothed / 3
    assert smoothed < 0.02 * float(wanted.norm())


@needs_native
def test_both_int8_forms_give_the_same_numbers() -> None:
    weight, bias, x = torch.randn(80, 64), torch.randn(80), torch.randn(9, 64)
    native, packed = (form(weight, bias)(x) for form in INT8_FORMS)
    torch.testing.assert_close(native, packed, atol=0.2, rtol=0)
    assert float((native - packed).norm() / packed.norm()) < 4e-3


def test_one_warning_says_that_matrices_are_not_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, *FORMS)
    model = tiny_model("llama")
    linear_packing.pack(model, "none", {})
    assert not forms_in(model)
    assert [record.getMessage() for record in caplog.records] == [
        "matrices are not packed: no such operator here"
    ]


def test_recording_leaves_no_hook_behind() -> None:
    plain = torch.nn.Linear(64, 80)
    with linear_packing.recorded_absmax(plain):
        pass
    assert not plain._forward_pre_hooks
