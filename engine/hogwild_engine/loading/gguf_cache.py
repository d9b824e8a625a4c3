"""Convert each GGUF file once: keep it as a folder that transformers loads in a second or two.

The folders are in ``$HOGWILD_CACHE``, else ``$XDG_CACHE_HOME/hogwild``, else ``~/.cache/hogwild``;
they may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder of all converted models."""
    if own := os.environ.get("HOGWILD_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hogwild"


def folder_for(file: Path, dtype: str) -> Path:
    """Return the folder for ``file`` converted to ``dtype``, whether it exists yet or not.

    Its name has a hash of the file's path, size and time, the dtype and the version of
    transformers.
    """
    import transformers

    stat = file.stat()
    key = (file.resolve(), stat.st_size, stat.st_mtime_ns, dtype, transformers.__version__)
    digest = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    return cache_folder() / "converted" / f"{file.stem}-{dtype}-{digest}"


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model that was read from a GGUF file to ``folder``, atomically.

    Logs a warning if the disk cannot be written.
    """
    from safetensors.torch import save_model

    scratch = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        config = model.config.__class__(**model.config.to_dict())
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(model).__name__]
        config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        save_model(model, str(scratch / "model.safetensors"), metadata={"format": "pt"})
        scratch.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            _log.warning("the converted model is not kept and will be converted again: %s", error)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: Path, error: Exception) -> None:
    """Remove a folder that transformers failed to load with ``error``."""
    _log.warning("the converted model in %s is damaged and is converted again: %s", folder, error)
    shutil.rmtree(folder, ignore_errors=True)
