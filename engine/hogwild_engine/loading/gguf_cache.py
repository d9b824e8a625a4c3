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
    """Return the folder of all converted models.

    Raises:
        RuntimeError: the user has no home, and no variable names a folder.
    """
    if own := os.environ.get("HOGWILD_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hogwild"


def folder_for(file: Path, dtype: str) -> Path | None:
    """Return the folder for ``file`` converted to ``dtype``, whether it exists yet or not; ``None``
    if the user has no folder for caches.

    Its name has a hash of the file's path, size and time, the dtype and the version of
    transformers.
    """
    import transformers

    stat = file.stat()
    key = (file.resolve(), stat.st_size, stat.st_mtime_ns, dtype, transformers.__version__)
    digest = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    try:
        return cache_folder() / "converted" / f"{file.stem}-{dtype}-{digest}"
    except RuntimeError as error:
        _warn_not_kept(error)
        return None


def exists(folder: Path) -> bool:
    """Return whether the folder is there and may be read."""
    return os.access(folder, os.R_OK | os.X_OK) and folder.is_dir()


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model that was read from a GGUF file to ``folder``, atomically.

    Logs a warning if it cannot be written: no room, no right, or a part that cannot be saved.
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
    except Exception as error:  # the libraries that write have errors of their own for a full disk
        if not exists(folder):  # else another process was faster
            _warn_not_kept(error)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _warn_not_kept(error: Exception) -> None:
    _log.warning(
        "the converted model is not kept and will be converted again; set HOGWILD_CACHE to a "
        "folder with room: %s",
        error,
    )


def discard(folder: Path, error: Exception) -> None:
    """Remove a folder that transformers failed to load with ``error``."""
    _log.warning("the converted model in %s is damaged and is converted again: %s", folder, error)
    shutil.rmtree(folder, ignore_errors=True)
