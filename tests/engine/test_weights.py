"""From a name to a loaded model: where it lies, what is kept of a conversion, what is packed."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hogwild_engine import Engine, SamplingParams
from hogwild_engine.loading import gguf_cache, weights
from hogwild_engine.loading.weights import Source, locate
from hogwild_engine.step import linear_layers, linear_packing
from hogwild_kernels.cpu import c_backend, matrix
from tiny import FAMILIES, tiny_model

IDS = torch.tensor([[5, 600, 7, 1, 2, 9000, 11]])


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits[0].float()


def test_names_are_told_apart_without_loading(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    assert locate("Qwen/Qwen3-8B") == Source("Qwen/Qwen3-8B", local=False)
    assert locate("gpt-oss") == Source("gpt-oss", local=False)
    assert locate(str(tmp_path)) == Source(str(tmp_path))
    assert locate(str(file)) == Source(str(tmp_path), "some.gguf")


def test_the_embedded_model_is_a_gguf_file_of_a_package() -> None:
    source = locate("smollm2-135m")
    assert source.local
    assert source.gguf_file
    assert Path(source.place, source.gguf_file).is_file()


def test_importing_the_engine_loads_no_torch() -> None:
    code = "import hogwild_engine as e, sys; e.Request; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    subprocess.run([sys.executable, "-c", code], check=True, env=path, timeout=60)


# Converted models


def test_a_converted_model_is_loaded_as_it_was_kept(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model("llama")
    folder = tmp_path / "deep" / "kept"
    gguf_cache.keep(folder, model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(loaded.eval()), logits(model))
    text = "Hi 🦜<|im_end|>"
    assert AutoTokenizer.from_pretrained(folder).encode(text) == tokenizer.encode(text)
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]


def test_a_file_that_was_converted_once_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch, smollm: Engine
) -> None:
    read: list[str] = []
    load = AutoModelForCausalLM.from_pretrained

    def record(place: Any, **options: Any) -> Any:
        read.append(options.get("gguf_file") or Path(place).name)
        return load(place, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    file = weights.locate(smollm.config.model)
    assert file.gguf_file
    weights.load(smollm.config)
    kept = gguf_cache.folder_for(Path(file.place, file.gguf_file), "float32")
    assert read == [kept.name]


def test_who_comes_second_leaves_the_first_folder_alone(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "kept"
    gguf_cache.keep(folder, tiny_model("llama"), tokenizer)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    gguf_cache.keep(folder, tiny_model("llama", seed=1), tokenizer)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_disk_that_refuses_is_no_error(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        gguf_cache.keep(tmp_path / "file" / "kept", tiny_model("llama"), tokenizer)
    assert "is not kept" in caplog.text


def test_a_folder_is_named_for_all_that_decides_its_content(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = gguf_cache.folder_for(file, "float32")
    assert gguf_cache.folder_for(file, "float32") == first
    assert gguf_cache.folder_for(file, "bfloat16") != first
    file.write_bytes(b"other")
    assert gguf_cache.folder_for(file, "float32") != first


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOGWILD_CACHE", "/own")
    assert gguf_cache.cache_folder() == Path("/own")
    monkeypatch.delenv("HOGWILD_CACHE")
    assert gguf_cache.cache_folder() == Path("/xdg/hogwild")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_cache.cache_folder() == Path.home() / ".cache" / "hogwild"


# Packed layers


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_layers_give_the_same_logits(family: str) -> None:
    model = tiny_model(family)
    wanted = logits(model)
    assert linear_packing.pack(model, "none", {}) > 0
    torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=2e-4)


# The compiled forms want AVX-512.
HAS_NATIVE = not any(
    matrix.refusal(torch.zeros((16, 64), dtype=dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.int8)
)
NATIVE = (linear_layers.NativeLinear,) if HAS_NATIVE else ()
FORMS = (*NATIVE, linear_layers.PackedLinear)
INT8_FORMS = (
    *((linear_layers.NativeInt8Linear,) if HAS_NATIVE else ()),
    linear_layers.PackedInt8Linear,
)
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no compiler, or no AVX-512 here")


def without(monkeypatch: pytest.MonkeyPatch, *forms: Any) -> None:
    """Make forms of matrices that cannot be had."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such operator here")

    for form in forms:
        monkeypatch.setattr(linear_packing, form.__name__, refuse)
    linear_packing._say_once.cache_clear()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_form_takes_any_number_of_rows(
    form: Any, rows: int, dtype: torch.dtype, bias: bool
) -> None:
    plain = torch.nn.Linear(64, 80, bias=bias).to(dtype).requires_grad_(False)
    made = form(plain.weight, plain.bias)
    x = torch.randn(1, rows, 64, dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(made(x), plain(x), atol=tolerance, rtol=tolerance)


@needs_native
def test_many_rows_without_tiles_take_the_plain_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_backend, "has_tiles", lambda: False)
    plain = torch.nn.Linear(64, 80).bfloat16().requires_grad_(False)
    made = linear_layers.NativeLinear(plain.weight, plain.bias)
    x = torch.randn(matrix.MAX_MATRIX_ROWS + 1, 64).bfloat16()
    assert torch.equal(made(x), plain(x))


@pytest.mark.parametrize("form", FORMS)
def test_the_next_form_serves_where_one_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    without(monkeypatch, *(other for other in FORMS if other is not form))
    model = tiny_model("llama")
    wanted = logits(model)
    assert linear_packing.pack(model, "none", {}) > 0
    assert {type(m) for m in model.modules() if isinstance(m, FORMS)} == {form}
    torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=2e-4)


@needs_native
def test_a_form_over_the_weight_as_it_lies_copies_nothing() -> None:
    weight = torch.randn(80, 64)
    linear_layers.NativeLinear(weight, None)
    made = linear_packing.matrix(weight, None, "none")
    assert isinstance(made, linear_layers.NativeLinear)
    weight.zero_()
    assert (made(torch.randn(3, 64)) == 0).all()


def test_a_dtype_that_cannot_be_packed_stays_plain() -> None:
    model = tiny_model("llama").half()
    assert linear_packing.pack(model, "none", {}) == 0
    assert not any(isinstance(layer, FORMS) for layer in model.modules())


@pytest.mark.parametrize("form", INT8_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_columns_that_reach_far_cost_the_others_little(dtype: torch.dtype, form: Any) -> None:
    plain = torch.nn.Linear(64, 80).to(dtype).requires_grad_(False)
    x = torch.randn(3, 64).to(dtype)
    x[:, 5] *= 300
    wanted = plain(x).float()
    with linear_packing.measured(plain) as reaches:
        plain(x)
    assert torch.equal(reaches[plain], x.abs().amax(0))
    errors = [
        float((form(plain.weight, plain.bias, reach)(x).float() - wanted).norm())
        for reach in (None, reaches[plain])
    ]
    assert errors[1] < errors[0] / 3
    assert errors[1] < 0.02 * float(wanted.norm())


@needs_native
def test_both_forms_of_int8_give_the_same_numbers() -> None:
    weight, bias, x = torch.randn(80, 64), torch.randn(80), torch.randn(9, 64)
    ours, theirs = (form(weight, bias)(x) for form in INT8_FORMS)
    torch.testing.assert_close(ours, theirs, atol=0.2, rtol=0)
    assert float((ours - theirs).norm() / theirs.norm()) < 4e-3


def test_matrices_that_cannot_be_packed_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, *FORMS)
    model = tiny_model("llama")
    assert linear_packing.pack(model, "none", {}) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "matrices are not packed: no such operator here"
    ]


def test_measuring_leaves_no_hook_behind() -> None:
    plain = torch.nn.Linear(64, 80)
    with linear_packing.measured(plain):
        pass
    assert not plain._forward_pre_hooks


# What a model says about itself


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 8192),
        ({"rope_type": "default"}, 8192),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, 8192),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 512),
        ({"rope_type": "dynamic"}, 8192),
    ],
    ids=str,
)
def test_frequencies_that_change_with_length_bound_the_context(rope: Any, length: int) -> None:
    config = SimpleNamespace(max_position_embeddings=8192, rope_parameters=rope)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert weights.context_len(model) == length


@pytest.mark.parametrize(
    ("stated", "of_tokenizer", "ends"),
    [(2, 7, {2}), ([2, 5], 7, {2, 5}), (None, 7, {7}), (None, None, set()), (-1, 7, set())],
)
def test_turns_end_as_generate_ends_them(stated: Any, of_tokenizer: Any, ends: set[int]) -> None:
    generation = SimpleNamespace(eos_token_id=stated)
    assert weights.end_tokens(generation, SimpleNamespace(eos_token_id=of_tokenizer)) == ends


def test_sampling_defaults_are_the_models_own() -> None:
    stated = SimpleNamespace(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)
    assert weights.default_sampling(stated) == SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.0, repetition_penalty=1.0
    )
    greedy = SimpleNamespace(do_sample=False, temperature=0.7, repetition_penalty=1.1)
    assert weights.default_sampling(greedy) == SamplingParams(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.1
    )
