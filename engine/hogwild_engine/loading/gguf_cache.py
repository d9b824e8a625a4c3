"""Convert each GGUF file once: keep it as a folder that transformers loads in a second or two.

A folder is loaded only if it is this user's alone (`hogwild_kernels.cache_folder`) and its files
have the lengths and checksums that its manifest says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hogwild_kernels.cache_folder import cache_folder, require_private, sync

_MANIFEST = "manifest.json"

_log = logging.getLogger(__name__)


def folder_for(file: Path, dtype: str) -> Path | None:
    """Return the folder for ``file`` converted to ``dtype``, whether it exists yet or not.

    Its name has a hash of the file's path, size and time, the dtype and the version of
    transformers. Without a cache that is this user's alone, log a warning and return ``None``.
    """
    import transformers

    stat = file.stat()
    key = (file.resolve(), stat.st_size, stat.st_mtime_ns, dtype, transformers.__version__)
    digest = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    try:
        return cache_folder("converted") / f"{file.stem}-{dtype}-{digest}"
    except OSError as error:
        _log.warning("the converted model is not kept: %s", error)
        return None


def check(folder: Path) -> None:
    """Refuse a folder that is not as `save` wrote it.

    Raises:
        OSError: another user can write to it, or a file is missing.
        ValueError: a file is cut or changed.
    """
    for path in (folder, *folder.rglob("*")):
        require_private(path)
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest != _manifest(folder):
        raise ValueError("its files differ from its manifest")


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
        (scratch / _MANIFEST).write_text(json.dumps(_manifest(scratch)))
        for path in (*scratch.rglob("*"), scratch):
            path.chmod(0o700 if path.is_dir() else 0o600)
            sync(path)
        scratch.rename(folder)
        sync(folder.parent)
    except Exception as error:  # the libraries that write have errors of their own for a full disk
        if not folder.is_dir():  # else another process was faster
            _log.warning(
                "the converted model is not kept and will be converted again; set HOGWILD_CACHE to "
                "a folder with room: %s",
                error,
            )
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: Path, error: Exception) -> None:
    """Remove a folder that `check` refused, or transformers failed to load, with ``error``."""
    _log.warning("the converted model in %s is damaged and is converted again: %s", folder, error)
    shutil.rmtree(folder, ignore_errors=True)


def _manifest(folder: Path) -> dict[str, list[int]]:
    """Length and CRC-32 of each file. It finds damage; owner and mode keep others out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)
    return {str(path.relative_to(folder)): _checksum(path) for path in files}


def _checksum(path: Path) -> list[int]:
    length, checksum = 0, 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            length, checksum = length + len(part), zlib.crc32(part, checksum)
    return [length, checksum]
