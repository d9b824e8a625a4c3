"""Tiny random models of many families, made from a config without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 49_152  # that of the embedded model's tokenizer
CONTEXT = 512

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def _rope(theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _maker(name: str, shape: Mapping[str, Any], **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        model_class = getattr(transformers, f"{name}ForCausalLM")
        # A copy: configurations change their dicts.
        return model_class(getattr(transformers, f"{name}Config")(**deepcopy({**shape, **config})))

    return make


_FAMILIES = {
    "llama": _maker("Llama", _SHAPE, head_dim=16, **_rope()),
    "qwen2": _maker(
        "Qwen2",
        _SHAPE,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        **_rope(1_000_000.0),
    ),
    "qwen3": _maker("Qwen3", _SHAPE, head_dim=20, **_rope(1_000_000.0)),
    "mistral": _maker("Mistral", _SHAPE, head_dim=24, sliding_window=7, **_rope()),
    "gemma2": _maker(
        "Gemma2",
        _SHAPE,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        attn_logit_softcapping=4.0,
        **_rope(),
    ),
    "glm4": _maker("Glm4", _SHAPE, head_dim=16, **_rope(partial_rotary_factor=0.5)),
    "smollm3": _maker("SmolLM3", _SHAPE, no_rope_layers=[1, 0, 1], **_rope()),
    "gpt_oss": _maker(
        "GptOss",
        _SHAPE,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_rope(**_YARN),
    ),
}

_FUSED_SHAPE = {**_SHAPE, "hidden_size": 64, "head_dim": 32}

# Sizes that the C code takes: head dims are multiples of 32, widths of 16.
_FUSED_FAMILIES = {
    "llama": _maker("Llama", _FUSED_SHAPE, attention_bias=True, **_rope()),
    "qwen2": _maker("Qwen2", _FUSED_SHAPE, **_rope(1_000_000.0)),
    "qwen3": _maker("Qwen3", _FUSED_SHAPE, **_rope(1_000_000.0)),
    "mistral": _maker("Mistral", _FUSED_SHAPE, sliding_window=7, **_rope()),
    "smollm3": _maker("SmolLM3", _FUSED_SHAPE, no_rope_layers=[1, 0, 1], **_rope()),
    "yarn": _maker("Llama", _FUSED_SHAPE, **_rope(**_YARN)),
}

# The same sizes in a longer context, for sessions of several hundred tokens.
_SCHEDULED_SHAPE = {**_FUSED_SHAPE, "max_position_embeddings": 4 * CONTEXT}

_SCHEDULED_FAMILIES = {
    "llama": _maker("Llama", _SCHEDULED_SHAPE, **_rope()),
    # Layer norms, biases, a sliding window, GELU.
    "starcoder2": _maker("Starcoder2", _SCHEDULED_SHAPE, sliding_window=100, **_rope()),
    # Soft caps on scores and logits, norms around each part.
    "gemma2": _maker(
        "Gemma2",
        _SCHEDULED_SHAPE,
        query_pre_attn_scalar=32,
        sliding_window=100,
        attn_logit_softcapping=4.0,
        **_rope(),
    ),
}

MAIN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, seed: int = 0, loud: Mapping[int, float] | None = None) -> Any:
    """Return a model whose attention matters: scores differ, norms are not 1, biases not 0.

    Args:
        family: one of `FAMILIES`.
        seed: of the weights.
        loud: factors on the logits of some tokens, which it then writes more often.
    """
    torch.manual_seed(seed)
    model = _with_random_weights(_FAMILIES[family](), seed)
    for token, factor in (loud or {}).items():
        model.get_output_embeddings().weight[token] *= factor
    return model


def fused_model(family: str, seed: int = 0) -> Any:
    """Return a model like `tiny_model`'s that fits the fused Llama forward."""
    torch.manual_seed(seed)
    return _with_random_weights(_FUSED_FAMILIES[family](), seed, spread=0.1)


def schedule_model(family: str, seed: int = 0) -> Any:
    """Return a model for `schedules`: "llama", "starcoder2" or "gemma2"."""
    torch.manual_seed(seed)
    return _with_random_weights(_SCHEDULED_FAMILIES[family](), seed, spread=0.1)


def _with_random_weights(model: Any, seed: int, spread: float = 0.2) -> Any:
    model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            if name.endswith("bias"):
                weight.sub_(1.0)
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return model


def save_tiny(folder: Path, tokenizer: Any, context_len: int) -> str:
    """Save a tiny random model with its tokenizer to ``folder`` and return its path."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context_len,
        initializer_range=0.2,  # attention must matter, or validation in bfloat16 fails
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
