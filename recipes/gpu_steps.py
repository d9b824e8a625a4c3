"""The steps' part of `gpu_check.py`: a decode step of several workers over one cache, against
transformers on one sequence. Weights and cached tokens are random; only their shapes matter.
"""

from __future__ import annotations

import importlib.util
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.loading import rope_probe
from hogwild_engine.step import attention_hook
from hogwild_engine.step.batch import Chunk, build_batch
from hogwild_engine.step.cuda_graphs import CudaCapture, DecodeGraphs
from hogwild_engine.step.forward import TransformersForward
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_kernels.backends import choose_backends

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
TINY: dict[str, Any] = QWEN3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PAGE_SIZE = 32


def random_model(device: str, *, tiny: bool, layers: int | None) -> Any:
    """Return a model of Qwen3-8B's shape."""
    shape = dict(TINY if tiny else QWEN3_8B)
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    config = transformers.Qwen3Config(**shape, dtype="float32" if tiny else "bfloat16")
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


class Bench:
    """A model runner over a cache of random numbers.

    Args:
        model: runs the steps.
        device: holds the model and the cache.
        context: maximum tokens of the common block.
        graphs: replay decode steps as CUDA graphs.
    """

    def __init__(self, model: Any, device: str, context: int, *, graphs: bool) -> None:
        attention_hook.register()
        shapes, windows = rope_probe.layer_shapes(model, torch.device(device))
        self.cache = KVCache(
            shapes,
            context // PAGE_SIZE + 64,
            PAGE_SIZE,
            choose_backends("triton", "auto", [s.spec for s in shapes]),
        )
        for group in self.cache.groups:
            group.keys.normal_()
            group.values.normal_()
        captures = DecodeGraphs(torch.device(device), CudaCapture()) if graphs else None
        self.runner = ModelRunner(TransformersForward(model), self.cache, windows, captures)

    def step_s(self, workers: int, context: int, rounds: int) -> float:
        """Return seconds of one step: batch, forward, greedy tokens on the host."""
        common = Block(self.cache)
        common.append([1] * context)
        common.publish()
        blocks = [Block(self.cache) for _ in range(workers)]

        def step() -> None:
            chunks = []
            for block in blocks:
                block.append([1])
                block.publish()
            for block in blocks:
                others = [other for other in blocks if other is not block]
                chunks.append(
                    Chunk(block, len(block) - 1, 1, [common, *others, block], samples=True)
                )
            self.runner.run(build_batch([chunks])).argmax(dim=-1).tolist()

        try:
            return _mean_s(step, rounds)
        finally:
            for block in (common, *blocks):
                block.release()


def baseline(model: Any, device: str, context: int, rounds: int) -> tuple[str, float]:
    """Return the attention that transformers used on one sequence, and seconds of one step."""
    has_flash = device != "cpu" and importlib.util.find_spec("flash_attn") is not None
    name = "flash_attention_2" if has_flash else "sdpa"
    model.set_attn_implementation(name)
    config = model.config
    cache = transformers.DynamicCache()
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=device, dtype=model.dtype) for _ in "kv")
        cache.update(k, v, layer)
    token = torch.ones((1, 1), dtype=torch.int64, device=device)
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def step() -> None:
        model(input_ids=token, **{named: cache}).logits.argmax(dim=-1).tolist()

    return name, _mean_s(step, rounds)


def _mean_s(step: Callable[[], None], rounds: int) -> float:
    for _ in range(min(3, rounds)):  # compiles, captures, warms up
        step()
    start = time.perf_counter()
    for _ in range(rounds):
        step()  # ends in a copy to the host, which waits for the device
    return (time.perf_counter() - start) / rounds
