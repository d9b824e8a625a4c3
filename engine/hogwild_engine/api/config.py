"""Settings of the engine and of sampling, checked at construction. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hogwild_engine.api.checks import require_choice, require_int, require_number
from hogwild_engine.api.errors import require
from hogwild_kernels.names import ATTENTIONS, PREFILLS, AttentionName, PrefillName

EMBEDDED_MODEL = "smollm2-135m"
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8"]
MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which model an engine loads, on which device, and how much memory it uses.

    Args:
        model: a Hugging Face hub id, a folder, a ``.gguf`` file, or ``smollm2-135m`` (the embedded
            model).
        revision: branch, tag or commit of a hub model. ``None``: the default branch.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on devices that compute it
            fast, float32 on others.
        quantization: "int8" multiplies 8-bit weights by 8-bit activations on the CPU: up to twice
            as fast as bfloat16, and less exact. "none" multiplies in ``dtype``.
        device: a torch device string, or "auto": CUDA if available, else the CPU.
        attention: attention backend for decoding: "triton" (CUDA), "native" (C), "cpu" (torch
            operators), "reference" (plain PyTorch on any device, slow), or "auto": the fastest one
            that runs on the device.
        prefill_attention: attention backend for steps with 256 or more prompt tokens: "flash" (the
            package flash-attn), "varlen" (torch's own), "same" (that of ``attention``), or "auto":
            on CUDA, the first of these that runs; "same" elsewhere.
        cuda_graphs: replay small steps as CUDA graphs. Needs a CUDA device that holds all layers.
            Off by default: the gain is not measured yet.
        num_pages: pages in the KV cache. ``None``, on the CPU: 32,768 tokens, or a full context and
            an eighth; on CUDA: up to 64 contexts; within ``memory_fraction``.
        memory_fraction: largest share of the device's free memory for the KV cache, in (0, 1]. On
            the CPU that is the container's, if it has less. Ignored if ``num_pages`` is set.
        page_size: tokens per page.
        max_num_batched_tokens: maximum number of prompt tokens in one forward step. While other
            sessions decode, it is an eighth of this.
        prefix_cache: keep the keys and values of prompts in free pages, so that later prompts with
            the same prefix skip its prefill.
        num_threads: CPU threads that torch uses. ``None``: torch's default.
        trust_remote_code: run Python code that comes with a hub model.

    Raises:
        ConfigError: a value is out of range or unknown.
    """

    model: str = EMBEDDED_MODEL
    revision: str | None = None
    dtype: DtypeName = "auto"
    quantization: QuantizationName = "none"
    device: str = "auto"
    attention: AttentionName = "auto"
    prefill_attention: PrefillName = "auto"
    cuda_graphs: bool = False
    num_pages: int | None = None
    memory_fraction: float = 0.2
    page_size: int = 32
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    num_threads: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        wanted = "a hub id, a folder, a .gguf file or 'smollm2-135m'"
        is_name = isinstance(self.model, str) and bool(self.model.strip())
        require(is_name, "model", wanted, self.model)
        require_choice("dtype", self.dtype, get_args(DtypeName))
        require_choice("quantization", self.quantization, get_args(QuantizationName))
        require_choice("attention", self.attention, ATTENTIONS)
        require_choice("prefill_attention", self.prefill_attention, PREFILLS)
        require_int("page_size", self.page_size, 1)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        require_int("num_pages", self.num_pages, 1, optional=True)
        require_int("num_threads", self.num_threads, 1, optional=True)
        require_number("memory_fraction", self.memory_fraction, 0, 1, open_low=True)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled from logits.

    ``None`` takes the value of the model's ``generation_config``, or the neutral value that changes
    nothing. Filters apply in the order of transformers: repetition penalty, temperature, top-k,
    top-p, min-p.

    Args:
        temperature: divides the logits; 0 is greedy decoding. From 0 to 1e6; neutral: 1.
        top_p: sample from the smallest set of tokens with at least this total probability. In
            (0, 1]; neutral: 1.
        top_k: sample from this many most probable tokens; 0 for all. Neutral: 0.
        min_p: drop tokens with less than this share of the highest probability. In [0, 1]; neutral:
            0.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            occur in the prompt or in the worker's own text. Above 0; neutral: 1.
        seed: from 0 to 2**63 - 1. A sampled token depends on the seed, the worker and the token's
            index in the worker's text. ``None``: a random seed for each session.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0, 1e6, optional=True)
        require_number("top_p", self.top_p, 0, 1, open_low=True, optional=True)
        require_int("top_k", self.top_k, 0, MAX_INT64, optional=True)
        require_number("min_p", self.min_p, 0, 1, optional=True)
        penalty = self.repetition_penalty
        require_number("repetition_penalty", penalty, 0, open_low=True, optional=True)
        require_int("seed", self.seed, 0, MAX_INT64, optional=True)
