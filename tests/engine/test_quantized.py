"""Models that another library quantized: their layers are left as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from generation import generated
from hogwild_engine import Engine, EngineConfig, Request, make_workers
from hogwild_engine.api.errors import ConfigError, ModelError, ModelRefusedError
from hogwild_engine.api.request import SamplingParams
from hogwild_engine.loading import quantized
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.step import linear_packing
from model_harness import model_of, plain, sampled_by_writer
from tiny import save_tiny, tiny_model

QUESTION = ({"role": "user", "content": "Tell me about the sea, and why it is not blue."},)
GREEDY = SamplingParams(temperature=0)


class Int8Linear(nn.Linear):
    """Simulates int8 weights with a scale for each row, as quantization libraries have them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale = self.weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / 127
        return nn.functional.linear(input, (self.weight / scale).round() * scale)


def quantized_model(*, stated: bool = True) -> Any:
    """Return a model of such layers, with the attribute of a model quantized by transformers if
    ``stated``.
    """
    model = tiny_model("llama")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                layer = Int8Linear(child.in_features, child.out_features, bias=False)
                layer.weight = child.weight
                setattr(parent, name, layer)
    if stated:
        config = SimpleNamespace(quant_method="simulated")
        model.hf_quantizer = SimpleNamespace(quantization_config=config)
    return model


@pytest.fixture
def load(tokenizer: Any) -> Callable[..., Engine]:
    def make(model: Any, **options: Any) -> Engine:
        config = EngineConfig(model="tiny", num_pages=64, page_size=8, **options)
        return Engine(config, loaded=Pretrained(model, tokenizer))

    return make


def written(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, count: int, workers: int = 1
) -> dict[int, list[int]]:
    """Greedy tokens by writer."""
    tokens = count if workers == 1 else 4
    team = make_workers(workers)
    request = Request(QUESTION, team, max_steps=count, max_tokens=tokens, sampling=GREEDY)
    with sampled_by_writer(monkeypatch) as sampled:
        engine.submit(request).result(120)
    return sampled


def prompt_of(engine: Engine) -> list[int]:
    return engine.chat.render(list(QUESTION))


def test_quantized_layers_stay_and_write_what_generate_writes(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantized_model()
    with load(model) as engine:
        kinds = {type(layer.mlp.up_proj) for layer in model_of(engine).model.layers}
        assert kinds == {Int8Linear}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        wanted = generated(quantized_model(stated=False), prompt_of(engine), 12)
        assert written(monkeypatch, engine, 12) == {0: wanted}
        assert {0, 1} <= set(written(monkeypatch, engine, 12, workers=2))


def test_a_quantized_model_is_not_quantized_again(load: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match=r"^quantization: wanted 'none' .*simulated.*'int8'"):
        load(quantized_model(), quantization="int8")


def test_a_model_that_was_dequantized_at_load_counts_as_plain() -> None:
    model = tiny_model("llama")
    assert quantized.method_of(model) is None
    stated = SimpleNamespace(quant_method="fp8", dequantize=True)
    model.hf_quantizer = SimpleNamespace(quantization_config=stated)
    assert quantized.method_of(model) is None


def test_layers_that_do_not_run_in_the_dtype_are_refused_with_their_method(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.setattr(Int8Linear, "forward", fail)
    with pytest.raises(ModelRefusedError, match=r"simulated layers .* same dtype; try another"):
        load(quantized_model())


class TensorSubclass(torch.Tensor):
    """What torchao uses as a weight."""


def with_tensor_subclass(layer: nn.Linear) -> None:
    weight = layer.weight.detach().as_subclass(TensorSubclass)
    layer.weight = nn.Parameter(weight, requires_grad=False)


def with_own_forward(layer: nn.Linear) -> None:
    layer.forward = lambda x: x  # pyright: ignore[reportAttributeAccessIssue]


def with_hook(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda module, given: None)


def with_int8_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    "change", [with_tensor_subclass, with_own_forward, with_hook, with_int8_weight]
)
def test_a_linear_layer_that_a_library_changed_is_not_packed(
    change: Callable[[nn.Linear], None],
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    changed: Any = model[1]
    assert linear_packing.is_plain(changed)
    change(changed)
    linear_packing.pack(model, "none", {})
    assert model[1] is changed
    assert model[0] is not changed


# Folders


def folder(path: Path, tokenizer: Any, stated: dict[str, Any]) -> str:
    """Save a model whose configuration says that it is quantized, and return its path."""
    name = save_tiny(path, tokenizer, 512)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return name


@pytest.mark.parametrize(
    ("stated", "command"),
    [
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "gptqmodel optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "gptqmodel"),
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "hqq"}, "hqq"),
    ],
)
def test_the_error_names_the_command_that_installs_missing_packages(
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    stated: dict[str, Any],
    command: str,
) -> None:
    monkeypatch.setattr(quantized, "_installed", lambda package: False)
    name = folder(tmp_path, tokenizer, stated)
    with pytest.raises(ModelError, match=rf"^model: wanted .*; run: pip install {command}$"):
        Engine(EngineConfig(model=name))


def test_a_method_that_transformers_would_ignore_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    name = folder(tmp_path, tokenizer, {"quant_method": "of-tomorrow"})
    with pytest.raises(ModelError, match=r"^model: wanted .*'of-tomorrow'; use another copy"):
        Engine(EngineConfig(model=name))


def _torchao() -> Any:
    torchao: Any = pytest.importorskip("torchao.quantization", reason="no requirement of the tests")
    from transformers import TorchAoConfig

    return TorchAoConfig(torchao.Int8WeightOnlyConfig())


@pytest.mark.filterwarnings("ignore")
def test_a_model_quantized_by_torchao_writes_what_generate_writes(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    made = _torchao()
    exact, name = tmp_path / "exact", str(tmp_path / "quantized")
    save_tiny(exact, tokenizer, 512)
    model = AutoModelForCausalLM.from_pretrained(
        exact, dtype=torch.float32, quantization_config=made
    )
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    with Engine(EngineConfig(model=name, num_pages=64)) as engine:
        with plain(AutoModelForCausalLM.from_pretrained(name)) as again:
            wanted = generated(again, prompt_of(engine), 20)
        assert written(monkeypatch, engine, 20) == {0: wanted}
        assert {0, 1} <= set(written(monkeypatch, engine, 12, workers=2))
