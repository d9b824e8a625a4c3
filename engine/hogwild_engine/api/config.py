"""Settings of the engine and of sampling, checked when built. Knows no tensors and imports no
torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, get_args

from hogwild_engine.api.errors import require
from hogwild_kernels.names import ATTENTIONS, PREFILLS, AttentionName, PrefillName

EMBEDDED_MODEL = "smollm2-135m"
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8"]
DTYPES = get_args(DtypeName)
QUANTIZATIONS = get_args(QuantizationName)
MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine loads and how much it may use. One engine serves one configuration.

    Args:
        model: a hub id, a folder, a ``.gguf`` file, or the embedded ``smollm2-135m``.
        revision: branch, tag or commit of a hub model.
        dtype: "auto" (bfloat16 where the device computes it fast, else float32), "float32",
            "bfloat16", "float16".
        quantization: "int8" multiplies by 8-bit weights and activations on the CPU: up to twice as
            fast as bfloat16, and less exact. "none" keeps the dtype's numbers.
        device: "auto" (CUDA where there is one, else the CPU), or a torch device string.
        attention: which kernels attend over the cache. "auto" takes the fastest that can run:
            Triton on CUDA, C on the CPU. Otherwise "triton", "native" (C), "cpu" (torch's
            operators) or "reference" (plain PyTorch on any device, slow).
        prefill_attention: which kernels attend for prompts of 256 tokens or more in a pass. "auto"
            takes, on CUDA, "flash" (the package flash-attn) where it is installed, else "varlen"
            (torch's own) where it can run; otherwise, and by "same", those of ``attention``.
        cuda_graphs: replay passes of few rows as CUDA graphs. Off, because it has not been measured
            yet; wants a CUDA device that holds all layers.
        num_pages: pages in the cache pool. ``None``: as many as ``memory_fraction`` allows.
        memory_fraction: share of the device's free memory for the pool where ``num_pages`` is not
            given.
        page_size: tokens a page holds.
        max_num_batched_tokens: most prompt tokens in one forward step; beside sessions that decode,
            an eighth of it.
        prefix_cache: keep what prompts start with in free pages, so that a session whose prompt
            starts alike need not encode it again.
        num_threads: CPU threads of torch. ``None``: torch's default.
        trust_remote_code: run code that comes with a model. Off unless asked for.

    Raises:
        ConfigError: a value is out of range.
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
        require(
            isinstance(self.model, str) and bool(self.model.strip()),
            "model",
            "a hub id, a folder, a .gguf file or 'smollm2-135m'",
            self.model,
        )
        require(self.dtype in DTYPES, "dtype", f"one of {DTYPES}", self.dtype)
        wanted = f"one of {QUANTIZATIONS}"
        require(self.quantization in QUANTIZATIONS, "quantization", wanted, self.quantization)
        require(self.attention in ATTENTIONS, "attention", f"one of {ATTENTIONS}", self.attention)
        known = self.prefill_attention in PREFILLS
        require(known, "prefill_attention", f"one of {PREFILLS}", self.prefill_attention)
        _require_count("page_size", self.page_size)
        _require_count("max_num_batched_tokens", self.max_num_batched_tokens)
        for name in ("num_pages", "num_threads"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        require(
            0 < self.memory_fraction <= 1,
            "memory_fraction",
            "a share in (0, 1]",
            self.memory_fraction,
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from logits. ``None`` takes the model's ``generation_config``, else the
    neutral value.

    The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        temperature: 0 is greedy. Neutral: 1.
        top_p: keep the smallest set of tokens whose probability reaches this. Neutral: 1.
        top_k: keep this many most probable tokens; 0 keeps all.
        min_p: drop tokens less probable than this share of the most probable one. Neutral: 0.
        repetition_penalty: divides the logits of tokens in the prompt and in the worker's own text.
            Neutral: 1.
        seed: with the worker and the token's index it decides every draw. ``None``: drawn anew for
            each session.

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
        _require_range("temperature", self.temperature, "a number from 0 to 1e6", 0, 1e6)
        _require_range("top_p", self.top_p, "a share in (0, 1]", 0, 1, open_below=True)
        _require_range("top_k", self.top_k, "a whole number from 0 to 2**63 - 1", 0, MAX_INT64)
        _require_range("min_p", self.min_p, "a share in [0, 1]", 0, 1)
        _require_range(
            "repetition_penalty", self.repetition_penalty, "a number above 0", 0, open_below=True
        )
        _require_range("seed", self.seed, "a whole number from 0 to 2**63 - 1", 0, MAX_INT64)
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            require(value is None or type(value) is int, name, "a whole number", value)


def _require_count(name: str, value: object) -> None:
    require(type(value) is int and value > 0, name, "a whole number above 0", value)


def _require_range(
    name: str,
    value: float | None,
    wanted: str,
    low: float,
    high: float = float("inf"),
    *,
    open_below: bool = False,
) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = number and abs(value) < sys.float_info.max
    require(
        number and low <= value <= high and not (open_below and value == low), name, wanted, value
    )
