"""From a loaded model to a forward pass that has been checked, its matrices packed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import ConfigError, ModelRefusedError, require
from hogwild_engine.cache.kv_cache import KVCache, LayerShape
from hogwild_engine.loading import quantized, validation, weights
from hogwild_engine.step import linear_packing
from hogwild_engine.step.forward import Forward, TransformersForward
from hogwild_engine.step.fused_llama import FusedLlamaForward
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_kernels.api import AttentionBackend, KernelArgumentError
from hogwild_kernels.backends import choose_backends
from hogwild_kernels.cuda.long_runs import LongPromptBackend

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that may decode over a shared cache.

    Args:
        forward: its layers.
        shapes: what each layer stores.
        windows: each layer's sliding window, ``None`` where it sees everything.
        context_len: tokens that a view may hold.
        error: relative error of block-wise logits against the plain forward's.
        backends: attend over the cache, one a layer.
    """

    forward: Forward
    shapes: list[LayerShape]
    windows: list[int | None]
    context_len: int
    error: float
    backends: list[AttentionBackend]


def check(
    model: Any, ids: Sequence[int], calibration: Sequence[int], config: EngineConfig
) -> LoadedModel:
    """Check ``model`` and pack it; it is used up.

    Args:
        model: a causal language model of transformers.
        ids: the text of the checks, at least 24 tokens.
        calibration: a text that shows how far activations reach, for quantization.
        config: the engine's settings.

    Raises:
        ConfigError: kernels that ``config`` asks for cannot run here, or the model is quantised
            already and ``config`` asks for it again.
        ModelRefusedError: a check failed.
    """
    method = quantized.method_of(model)
    if method is not None:
        wanted = f"'none' for a model that {method} has quantised already"
        todo = "leave it out, or use a copy that is not quantised"
        require(config.quantization == "none", "quantization", wanted, config.quantization, todo)
    device = next(model.parameters()).device
    try:
        shapes, windows = validation.layer_shapes(model, device)
    except RuntimeError as error:
        if method is None:
            raise
        said = " ".join(str(error).split())[:300]
        detail = f"its {method} layers do not run in {model.dtype}: {said}; try another dtype"
        raise ModelRefusedError("forward", detail) from error
    context_len = weights.context_len(model, windows)
    validation.check_positions(model, ids, context_len)
    num_pages = validation.num_pages(config.page_size)
    cache = KVCache(shapes, num_pages, config.page_size, _backends(config, shapes))
    hooked = ModelRunner(TransformersForward(model), cache, windows)
    fed = validation.check_logits(model, hooked, ids)
    backends = _checked_prefill(model, hooked, ids, config.prefill_attention)
    # The lean forward holds compiled attention of its own.
    takes_lean = config.attention in ("auto", "native")
    lean = _lean(model, hooked.cache, windows, ids, fed.logits) if takes_lean else None
    reaches: linear_packing.Reaches = {}
    if config.quantization == "int8":
        with linear_packing.measured(model) as reaches:
            validation.plain_logits(model, calibration)
    if lean is None:
        linear_packing.pack(model, config.quantization, reaches)
    else:
        lean.pack(config.quantization, reaches)
    return LoadedModel(lean or hooked.forward, shapes, windows, context_len, fed.error, backends)


def _backends(config: EngineConfig, shapes: Sequence[LayerShape]) -> list[AttentionBackend]:
    """Choose each layer's attention backend."""
    specs = [shape.spec for shape in shapes]
    try:
        return choose_backends(config.attention, config.prefill_attention, specs)
    except KernelArgumentError as error:
        raise ConfigError(str(error)) from error


def _checked_prefill(
    model: Any, runner: ModelRunner, ids: Sequence[int], name: str
) -> list[AttentionBackend]:
    """Return the runner's backends, without a prefill backend that "auto" chose and that fails."""
    backends = runner.cache.backends
    if not any(isinstance(backend, LongPromptBackend) for backend in backends):
        return backends
    try:
        validation.check_logits(model, runner, ids, long=True)
    except (ModelRefusedError, RuntimeError) as error:  # kernels that were built for other devices
        if name != "auto":
            raise
        _log.warning("long prompts attend through the attention backend: %s", error)
        return [
            backend.attention if isinstance(backend, LongPromptBackend) else backend
            for backend in backends
        ]
    return backends


def _lean(
    model: Any,
    cache: KVCache,
    windows: list[int | None],
    ids: Sequence[int],
    hooked: torch.Tensor,
) -> FusedLlamaForward | None:
    """The lean forward where the model has its shape and it gives the hooked one's logits."""
    shapes = list(cache.shapes)
    if not FusedLlamaForward.fits(model, shapes):
        return None
    lean = FusedLlamaForward(model, shapes, windows)
    error = validation.fused_error(ModelRunner(lean, cache, windows), hooked, ids)
    bound = validation.FUSED_BOUND[shapes[0].dtype]
    if error < bound:
        return lean
    _log.info(
        "the lean forward is off by %.2g, wanted under %.2g: transformers' own runs", error, bound
    )
    return None
