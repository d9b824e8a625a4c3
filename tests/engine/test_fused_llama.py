"""The lean forward gives the hooked one's logits, or is not used."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from hogwild_engine import EngineConfig
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.loading import load, validation
from hogwild_engine.step import attention_hook, linear_packing
from hogwild_engine.step.batch import Chunk
from hogwild_engine.step.forward import TransformersForward
from hogwild_engine.step.fused_llama import FusedLlamaForward
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_kernels.cpu import c_backend, matrix
from model_harness import ModelHarness
from tiny import VOCABULARY, lean_model, tiny_model

pytestmark = pytest.mark.skipif(
    c_backend.build_error() is not None, reason="the lean forward needs a C compiler"
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "yarn")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
IDS = random.Random(3).sample(range(VOCABULARY), 40)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def passes(rig: ModelHarness, seed: int = 0) -> torch.Tensor:
    """Logits of some passes of three workers over a prompt: ragged prefill, then decoding."""
    rng = random.Random(seed)
    common = rig.block()
    own = [rig.block() for _ in range(3)]
    logits = []
    for lengths in ((11, 0, 0, 0), (0, 5, 1, 0), (2, 1, 3, 1), (0, 1, 1, 1), (0, 1, 1, 1)):
        feeds = []
        for block, length in zip((common, *own), lengths, strict=True):
            start = len(block)
            block.append([rng.randrange(VOCABULARY) for _ in range(length)])
            others = [o for o in own if o is not block and len(o)]
            view = [common] if block is common else [common, *others, block]
            if length:
                feeds.append(Chunk(block, start, length, view))
        logits.append(rig.run(feeds))
    for block in (common, *own):
        block.release()
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_it_gives_the_hooked_forwards_logits(family: str, dtype: torch.dtype, packed: bool) -> None:
    model = lean_model(family).to(dtype)
    wanted = passes(ModelHarness(model))
    rig = ModelHarness(model, lean=True)
    if packed:
        rig.runner.forward.pack("none", {})  # pyright: ignore[reportAttributeAccessIssue]
    assert relative(passes(rig), wanted) < TOLERANCE[dtype]
    assert rig.all_free


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_layers_in_one_call_give_what_they_give_one_by_one(
    family: str, dtype: torch.dtype, quantization: linear_packing.Quantization
) -> None:
    rig = ModelHarness(lean_model(family).to(dtype), lean=True)
    forward: Any = rig.runner.forward
    forward.pack(quantization, {})
    kind = torch.int8 if quantization == "int8" else dtype
    assert (forward._in_c is None) == bool(matrix.refusal(torch.zeros((16, 64), dtype=kind)))
    together = passes(rig)
    forward._in_c = None
    assert torch.equal(passes(rig), together)


def test_it_gives_them_on_the_embedded_model(smollm_model: Any) -> None:
    assert (
        relative(passes(ModelHarness(smollm_model, lean=True)), passes(ModelHarness(smollm_model)))
        < 2e-5
    )


def test_int8_stays_close() -> None:
    model = lean_model("llama")
    wanted = passes(ModelHarness(model))
    rig = ModelHarness(model, lean=True)
    rig.runner.forward.pack("int8", {})  # pyright: ignore[reportAttributeAccessIssue]
    assert 1e-4 < relative(passes(rig), wanted) < 0.1


def test_packing_gives_the_models_own_weights_up() -> None:
    model = lean_model("qwen2")
    rig = ModelHarness(model, lean=True)
    rig.runner.forward.pack("none", {})  # pyright: ignore[reportAttributeAccessIssue]
    layer = model.model.layers[0]
    matrices = [*layer.self_attn.children(), layer.mlp.up_proj, layer.mlp.down_proj]
    assert [m.weight.numel() for m in matrices] == [0] * len(matrices)


def chosen(model: Any, quantization: linear_packing.Quantization = "none") -> Any:
    attention_hook.register()
    config = EngineConfig(model="tiny", page_size=8, quantization=quantization)
    return load.check(model, IDS, IDS, config).forward


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_the_llama_shape_run_lean(family: str) -> None:
    assert isinstance(chosen(lean_model(family)), FusedLlamaForward)


def scaled_embeddings(model: Any) -> Any:
    """Structure and names of Llama, and other mathematics: only the logits tell."""
    plain = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: plain(ids) * 3
    return model


def with_gelu(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    return model


OTHER_SHAPES: dict[str, Callable[[], Any]] = {
    "heads of 16 dims": lambda: tiny_model("llama"),
    "two more norms": lambda: tiny_model("gemma2"),
    "experts": lambda: tiny_model("gpt_oss"),
    "another activation": lambda: with_gelu(lean_model("llama")),
    "scaled embeddings": lambda: scaled_embeddings(lean_model("llama")),
    "half precision": lambda: lean_model("llama").half(),
    "residuals with a factor": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**lean_model("llama").config.to_dict(), residual_multiplier=0.5)
    ).eval(),
}


@pytest.mark.parametrize("shape", list(OTHER_SHAPES))
def test_models_of_other_shapes_run_hooked(shape: str) -> None:
    assert isinstance(chosen(OTHER_SHAPES[shape]()), TransformersForward)


def test_without_a_compiler_models_run_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_backend, "build_error", lambda: "no C compiler")
    assert isinstance(chosen(lean_model("llama")), TransformersForward)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_checked_model_decodes_in_its_quantization(
    quantization: linear_packing.Quantization,
) -> None:
    wanted = chosen(lean_model("qwen3"))
    got = chosen(lean_model("qwen3"), quantization)
    model = lean_model("qwen3")
    shapes, windows = validation.layer_shapes(model, torch.device("cpu"))
    logits = []
    for forward in (wanted, got):
        cache = KVCache(shapes, 16, 8)
        block = Block(cache)
        block.append(IDS)
        rig = ModelHarness(model)
        rig.runner = ModelRunner(forward, cache, windows)
        logits.append(rig.run([Chunk(block, 0, len(IDS), [block])]))
    assert (relative(logits[1], logits[0]) < 1e-6) == (quantization == "none")
    assert relative(logits[1], logits[0]) < 0.1
    assert replace(EngineConfig(), quantization=quantization).quantization == quantization
