"""Context length that a model's files state: for a model's profile, without loading anything.

The loaded engine may know better: some layers need a shorter context; see
`model_config.context_len`.
"""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from hogwild_engine.api.config import EngineConfig
from hogwild_engine.loading.gguf_metadata import metadata
from hogwild_engine.loading.source import locate


def stated_context(config: EngineConfig) -> int | None:
    """Return how many tokens a prompt and its answer may hold; ``None`` if no local file says so.

    A bound on the pool of pages, ``num_pages``, bounds it too. Makes no request to the hub.
    """
    source = locate(config.model)
    folder = Path(source.place)
    if not source.local:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source.place, "config.json", revision=config.revision)
        file = Path(found) if isinstance(found, str) else None
    else:
        file = folder / (source.gguf_file or "config.json")
    if file is None or not file.is_file():
        return None
    length = _read(file, file.stat().st_mtime_ns)
    if length is not None and config.num_pages is not None:
        length = min(length, config.num_pages * config.page_size)
    return length


@lru_cache(maxsize=32)
def _read(file: Path, _changed_ns: int) -> int | None:
    try:
        if file.suffix == ".gguf":
            return _from_gguf(file)
        return _from_config(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, struct.error):  # loading says what is wrong
        return None


def _from_config(config: Any) -> int | None:
    """Do as `model_config.context_len` on a ``config.json``."""
    if not isinstance(config, dict):
        return None
    text: dict[str, Any] = config.get("text_config") or config
    length: Any = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "dynamic"):
        named = "original_max_position_embeddings"
        original: Any = rope.get(named) or text.get(named) or length
        length = min(length, original)
    return length if isinstance(length, int) else None


def _from_gguf(file: Path) -> int | None:
    """Read the context length, which stands before the long vocabulary."""
    lengths = (value for key, value in metadata(file) if key.endswith(".context_length"))
    length = next(lengths, None)
    return length if isinstance(length, int) else None
