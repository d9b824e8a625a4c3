"""GGUF files as folders that transformers loads in a second or two, each converted once and kept.

A folder's name depends on the file's path, size and time, on the dtype and on the release of
transformers. Folders lie under ``$HOGWILD_CACHE``, else ``$XDG_CACHE_HOME/hogwild``, else
``~/.cache/hogwild``; they may be deleted at any time.
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
    """Where converted models are kept."""
    if own := os.environ.get("HOGWILD_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hogwild"


def folder_for(file: Path, dtype: str) -> Path:
    """The folder that holds ``file`` in ``dtype``, whether it exists yet or not."""
    import transformers

    stat = file.stat()
    facts = (file.resolve(), stat.st_size, stat.st_mtime_ns, dtype, transformers.__version__)
    digest = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]
    return cache_folder() / "converted" / f"{file.stem}-{dtype}-{digest}"


def keep(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model that came from GGUF to ``folder``, whole or not at all; a disk that refuses is
    no error.
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
        if folder.is_dir():  # another process was faster
            return
        _log.warning("the converted model is not kept and will be converted again: %s", error)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: Path, error: Exception) -> None:
    """Remove a folder that cannot be loaded."""
    _log.warning("the converted model in %s is damaged and is made anew: %s", folder, error)
    shutil.rmtree(folder, ignore_errors=True)
