"""`load_model`: from a model's name to a validated forward with packed matrices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hogwild_engine.api.config import EngineConfig, SamplingParams
from hogwild_engine.api.errors import ConfigError, ModelRefusedError, require
from hogwild_engine.cache.kv_cache import KVCache, LayerShape
from hogwild_engine.loading import quantized, rope_probe, validation
from hogwild_engine.loading.calibration_text import calibration_ids
from hogwild_engine.loading.model_config import (
    context_len,
    default_sampling,
    end_tokens,
    sampling_source,
)
from hogwild_engine.loading.pretrained import Pretrained, load_pretrained
from hogwild_engine.step import attention_hook, linear_packing
from hogwild_engine.step.activations import replace_activations
from hogwild_engine.step.forward import Forward, TransformersForward
from hogwild_engine.step.fused_llama import FusedLlamaForward
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_kernels.api import AttentionBackend, KernelArgumentError
from hogwild_kernels.backends import choose_backends
from hogwild_kernels.cuda.long_runs import LongPromptBackend

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A validated model, ready to decode over a shared cache.

    Args:
        forward: runs its layers over the cache.
        shapes: what each layer stores.
        windows: the sliding window of each layer, ``None`` for full attention.
        context_len: tokens that a view may hold.
        tokenizer: of transformers.
        chat: its chat template, which also holds the end-of-turn ids.
        default_sampling: what the model samples with unless a request says otherwise.
        sampling_source: who states it.
        num_parameters: of the model as it came.
        validation_error: relative error of block-wise logits against a plain forward.
        backends: attend over the cache, one a layer.
    """

    forward: Forward
    shapes: list[LayerShape]
    windows: list[int | None]
    context_len: int
    tokenizer: Any
    chat: ChatTemplate
    default_sampling: SamplingParams
    sampling_source: str
    num_parameters: int
    validation_error: float
    backends: list[AttentionBackend]

    @property
    def device(self) -> torch.device:
        """The device of the first layer."""
        return self.shapes[0].device


def load_model(config: EngineConfig, pretrained: Pretrained | None = None) -> LoadedModel:
    """Load the model that ``config`` names, validate it and pack its matrices.

    Args:
        config: the engine's settings.
        pretrained: a model and tokenizer that are in memory already, used instead of
            ``config.model``. Packing frees the model's own weights.

    Raises:
        ModelNotFoundError: no model has this name.
        ModelError: the model cannot be loaded.
        ModelRefusedError: the model failed a check.
        ConfigError: the kernels that ``config`` asks for cannot run here, or it asks for
            quantization of a model that is quantized already.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    attention_hook.register()
    _log.info("reading the weights")
    model, tokenizer = pretrained or load_pretrained(config)
    generation = model.generation_config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    chat = ChatTemplate(tokenizer, config.model, end_tokens(generation, tokenizer))
    _log.info("comparing logits with transformers'")
    ids = validation.validation_ids(chat, model.config.get_text_config().vocab_size)
    shapes, windows = _layer_shapes(model, config)
    length = context_len(model, windows)
    validation.check_positions(model, ids, length)
    num_pages = validation.num_pages(config.page_size)
    cache = KVCache(shapes, num_pages, config.page_size, _backends(config, shapes))
    unfused = ModelRunner(TransformersForward(model), cache, windows)
    logits, error = validation.check_logits(model, unfused, ids)
    backends = _checked_prefill(model, unfused, ids, config.prefill_attention)
    # The fused forward always attends in C.
    may_fuse = config.attention in ("auto", "native")
    fused = _fused_llama(model, cache, windows, ids, logits) if may_fuse else None
    absmax: linear_packing.ActivationAbsmax = {}
    if config.quantization == "int8":
        _log.info("measuring activations")
        with linear_packing.recorded_absmax(model) as absmax, _one_thread():
            validation.plain_logits(model, calibration_ids(chat))
    _log.info("packing the matrices")
    if fused is None:
        replace_activations(model)
        linear_packing.pack(model, config.quantization, absmax)
    else:
        fused.pack(config.quantization, absmax)
    return LoadedModel(
        forward=fused or unfused.forward,
        shapes=shapes,
        windows=windows,
        context_len=length,
        tokenizer=tokenizer,
        chat=chat,
        default_sampling=default_sampling(generation),
        sampling_source=sampling_source(generation),
        num_parameters=num_parameters,
        validation_error=error,
        backends=backends,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread, so that what is measured does not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _layer_shapes(model: Any, config: EngineConfig) -> tuple[list[LayerShape], list[int | None]]:
    """Return `rope_probe.layer_shapes` with errors that name a quantized model's method."""
    method = quantized.method_of(model)
    device = next(model.parameters()).device
    if method is None:
        return rope_probe.layer_shapes(model, device)
    wanted = f"'none' for a model that {method} has quantized already"
    todo = "leave it out, or use a copy that is not quantized"
    require(config.quantization == "none", "quantization", wanted, config.quantization, todo)
    try:
        return rope_probe.layer_shapes(model, device)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        detail = f"its {method} layers do not run in {model.dtype}: {reason}; try another dtype"
        raise ModelRefusedError("forward", detail) from error


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


def _fused_llama(
    model: Any,
    cache: KVCache,
    windows: list[int | None],
    ids: Sequence[int],
    expected: torch.Tensor,
) -> FusedLlamaForward | None:
    """Return the fused forward if the model has the Llama shape and the logits agree."""
    shapes = list(cache.shapes)
    if not FusedLlamaForward.fits(model, shapes):
        return None
    fused = FusedLlamaForward(model, shapes, windows)
    error = validation.fused_error(ModelRunner(fused, cache, windows), expected, ids)
    bound = validation.FUSED_BOUND[shapes[0].dtype]
    if error < bound:
        return fused
    _log.info(
        "transformers' forward runs: the fused Llama forward is off by %.2g, wanted under %.2g",
        error,
        bound,
    )
    return None
