"""The fused Llama forward gives the logits of transformers' forward, or is not used."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hogwild_engine import EngineConfig
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.loading.load import LoadedModel, load_model
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.step import linear_packing
from hogwild_engine.step.batch import Chunk, build_batch
from hogwild_engine.step.forward import TransformersForward
from hogwild_engine.step.fused_llama import FusedLlamaForward
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_kernels.cpu import c_backend, matrix
from model_harness import ModelHarness
from tiny import VOCABULARY, fused_model, tiny_model

pytestmark = pytest.mark.skipif(
    c_backend.build_error() is not None, reason="the fused forward needs a C compiler"
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "yarn")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
IDS = random.Random(3).sample(range(VOCABULARY), 40)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def logits_of_steps(harness: ModelHarness) -> torch.Tensor:
    """Logits of three workers over a prompt: a ragged prefill, then decode steps."""
    rng = random.Random(0)
    common = harness.block()
    own = [harness.block() for _ in range(3)]
    logits = []
    for lengths in ((11, 0, 0, 0), (0, 5, 1, 0), (2, 1, 3, 1), (0, 1, 1, 1), (0, 1, 1, 1)):
        chunks = []
        for block, length in zip((common, *own), lengths, strict=True):
            start = len(block)
            block.append([rng.randrange(VOCABULARY) for _ in range(length)])
            others = [o for o in own if o is not block and len(o)]
            view = [common] if block is common else [common, *others, block]
            if length:
                chunks.append(Chunk(block, start, length, view))
        logits.append(harness.run(chunks))
    for block in (common, *own):
        block.release()
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_it_gives_the_logits_of_transformers_forward(
    family: str, dtype: torch.dtype, packed: bool
) -> None:
    model = fused_model(family).to(dtype)
    wanted = logits_of_steps(ModelHarness(model))
    harness = ModelHarness(model, fused=True)
    if packed:
        harness.runner.forward.pack("none", {})  # pyright: ignore[reportAttributeAccessIssue]
    assert relative(logits_of_steps(harness), wanted) < TOLERANCE[dtype]
    assert harness.all_free


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_one_call_of_all_layers_gives_the_same_logits_as_single_operations(
    family: str, dtype: torch.dtype, quantization: linear_packing.Quantization
) -> None:
    harness = ModelHarness(fused_model(family).to(dtype), fused=True)
    forward: Any = harness.runner.forward
    forward.pack(quantization, {})
    kind = torch.int8 if quantization == "int8" else dtype
    assert (forward._in_c is None) == bool(
        matrix.unsupported_reason(torch.zeros((16, 64), dtype=kind))
    )
    together = logits_of_steps(harness)
    forward._in_c = None
    assert torch.equal(logits_of_steps(harness), together)


def test_it_gives_the_same_logits_on_the_embedded_model(smollm_model: Any) -> None:
    assert (
        relative(
            logits_of_steps(ModelHarness(smollm_model, fused=True)),
            logits_of_steps(ModelHarness(smollm_model)),
        )
        < 2e-5
    )


def test_int8_logits_are_close() -> None:
    model = fused_model("llama")
    wanted = logits_of_steps(ModelHarness(model))
    harness = ModelHarness(model, fused=True)
    harness.runner.forward.pack("int8", {})  # pyright: ignore[reportAttributeAccessIssue]
    assert 1e-4 < relative(logits_of_steps(harness), wanted) < 0.1


def test_packing_frees_the_models_own_weights() -> None:
    model = fused_model("qwen2")
    harness = ModelHarness(model, fused=True)
    harness.runner.forward.pack("none", {})  # pyright: ignore[reportAttributeAccessIssue]
    layer = model.model.layers[0]
    matrices = [*layer.self_attn.children(), layer.mlp.up_proj, layer.mlp.down_proj]
    assert [m.weight.numel() for m in matrices] == [0] * len(matrices)


@pytest.fixture
def load(tokenizer: Any) -> Callable[..., LoadedModel]:
    def make(model: Any, quantization: linear_packing.Quantization = "none") -> LoadedModel:
        config = EngineConfig(model="tiny", page_size=8, quantization=quantization)
        return load_model(config, Pretrained(model, tokenizer))

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_the_llama_shape_are_fused(load: Callable[..., LoadedModel], family: str) -> None:
    assert isinstance(load(fused_model(family)).forward, FusedLlamaForward)


def scaled_embeddings(model: Any) -> Any:
    """A model with the modules of Llama and other mathematics: only its logits differ."""
    plain = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: plain(ids) * 3
    return model


def with_gelu(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    return model


def with_two_epsilons(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.k_norm.variance_epsilon *= 2
    return model


def without_key_norms(model: Any) -> Any:
    for layer in model.model.layers:
        del layer.self_attn.k_norm
        layer.self_attn.k_norm = lambda x: x
    return model


OTHER_SHAPES: dict[str, Callable[[], Any]] = {
    "heads of 16 dims": lambda: tiny_model("llama"),
    "two more norms": lambda: tiny_model("gemma2"),
    "experts": lambda: tiny_model("gpt_oss"),
    "another activation": lambda: with_gelu(fused_model("llama")),
    "scaled embeddings": lambda: scaled_embeddings(fused_model("llama")),
    "two epsilons": lambda: with_two_epsilons(fused_model("qwen3")),
    "queries alone have a norm": lambda: without_key_norms(fused_model("qwen3")),
    "half precision": lambda: fused_model("llama").half(),
    "residuals with a factor": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**fused_model("llama").config.to_dict(), residual_multiplier=0.5)
    ).eval(),
}


@pytest.mark.parametrize("shape", list(OTHER_SHAPES))
def test_models_of_other_shapes_use_transformers_forward(
    load: Callable[..., LoadedModel], shape: str
) -> None:
    assert isinstance(load(OTHER_SHAPES[shape]()).forward, TransformersForward)


def test_without_a_compiler_models_use_transformers_forward(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_backend, "build_error", lambda: "no C compiler")
    assert isinstance(load(fused_model("llama")).forward, TransformersForward)


def test_the_config_decides_whether_a_loaded_model_is_int8(
    load: Callable[..., LoadedModel],
) -> None:
    logits = []
    for quantization in ("none", "none", "int8"):
        model = load(fused_model("qwen3"), quantization)
        cache = KVCache(model.shapes, 16, 8)
        block = Block(cache)
        block.append(IDS)
        batch = build_batch([[Chunk(block, 0, len(IDS), [block])]])
        batch.logit_indices = list(range(len(IDS)))
        logits.append(ModelRunner(model.forward, cache, model.windows).run(batch))
    assert relative(logits[1], logits[0]) < 1e-6
    assert 1e-6 < relative(logits[2], logits[0]) < 0.1
