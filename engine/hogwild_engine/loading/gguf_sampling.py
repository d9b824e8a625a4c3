"""Sampling defaults of a GGUF file: what its metadata states, else defaults that do not loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hogwild_engine.loading.gguf_metadata import metadata

_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "top_k": 40}
"""Greedy decoding makes small models repeat themselves; other local chat models sample so too."""


def set_sampling(generation: Any, file: Path) -> None:
    """Set the sampling of a ``generation_config`` that states none.

    Args:
        generation: what transformers made of the file, which says nothing of sampling.
        file: the GGUF file.
    """
    stated = stated_sampling(file)
    generation.sampling_source = "the file's metadata" if stated else "hogwild's default for GGUF"
    settings = stated or DEFAULTS
    generation.do_sample = settings.get("temperature", 1.0) > 0
    for name, value in settings.items():
        setattr(generation, name, value)


def stated_sampling(file: Path) -> dict[str, float | int]:
    """Return the settings that llama.cpp's ``general.sampling`` keys state, by our names."""
    found = {_KEYS[key]: value for key, value in metadata(file) if key in _KEYS}
    return {name: int(value) if name == "top_k" else float(value) for name, value in found.items()}
