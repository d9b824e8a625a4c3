"""Read the engine's defaults from a model's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hogwild_engine.api.config import SamplingParams

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_GENERATE_TOP_K = 50


def context_len(model: Any, windows: Sequence[int | None] = ()) -> int:
    """Return how many tokens a view may hold.

    Args:
        model: a transformers model.
        windows: the sliding windows that its layers pass to attention.
    """
    config = model.config.get_text_config()
    length: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    # These types change the frequencies of cached keys once a text is longer: stay below that.
    if rope.get("rope_type") in ("longrope", "dynamic"):
        length = min(length, rope.get("original_max_position_embeddings") or length)
    # Our attention ignores masks, so it misses a window that is only in the mask: stay within it.
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0 and size not in windows:
            length = min(length, size)
    return length


def end_tokens(generation: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-turn ids that ``generate`` would stop at. Configurations use -1 for none.

    Args:
        generation: the model's ``generation_config``.
        tokenizer: its ``eos_token_id`` is the default.
    """
    ends = generation.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(end for end in ([ends] if isinstance(ends, int) else ends) if end >= 0)


def default_sampling(generation: Any) -> SamplingParams:
    """Return the sampling settings of a ``generation_config``, all of them set.

    The temperature is 0 (greedy) if ``do_sample`` is off. A configuration that samples and states
    no ``top_k``, such as Llama-3.2's, has 50, as in ``generate``.
    """
    stated = {name: getattr(generation, name, None) for name in _NEUTRAL}
    if not generation.do_sample:
        stated["temperature"] = 0.0
    elif stated["top_k"] is None:
        stated["top_k"] = _GENERATE_TOP_K
    given = {name: value for name, value in stated.items() if value is not None}
    return SamplingParams(**_NEUTRAL | given)
