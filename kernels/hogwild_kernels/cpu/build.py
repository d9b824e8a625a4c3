"""The C code of this package, compiled for this processor on first use and loaded through ctypes.

The library is kept under ``$HOGWILD_CACHE``, else ``$XDG_CACHE_HOME/hogwild``, else
``~/.cache/hogwild``, and may be deleted at any time.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fPIC", "-w")
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The C code cannot be compiled or loaded here."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled code.

    Raises:
        BuildError: there is no compiler, or it refuses.
    """
    sources = sorted((Path(__file__).parent / "csrc").glob("*.[ch]"))
    found = shutil.which("cc") or shutil.which("gcc")
    compiler = shlex.split(os.environ.get("CC") or "") or ([found] if found else [])
    if not compiler:
        raise BuildError("no C compiler: install gcc or clang, or set CC")
    facts = [*compiler, *_FLAGS, torch.__version__, _processor()]
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    name = f"native-{digest.hexdigest()[:16]}.so"
    try:
        return _load(_built(compiler, Path(__file__).parent / "csrc" / "native.c", name))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BuildError(
            f"{shlex.join(compiler)} cannot build the native kernels: {said}"
        ) from error


@functools.cache
def build_error() -> str | None:
    """Why the compiled code cannot be used here; ``None`` where it can. Said once in the log."""
    try:
        library()
    except BuildError as error:
        _log.warning("attention on the CPU runs on plain torch operators: %s", error)
        return str(error)
    return None


def _folder() -> Path:
    """Beside what the engine keeps, whose own rule for the place loads without torch."""
    if own := os.environ.get("HOGWILD_CACHE"):
        return Path(own).expanduser() / "native"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hogwild" / "native"


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _openmp() -> Path | None:
    """torch's own OpenMP, whose threads are then shared; a second one would fight it for cores."""
    folder = Path(torch.__file__).parent
    found = sorted(folder.glob("lib/libgomp*.so*")) + sorted(
        folder.parent.glob("torch.libs/libgomp*.so*")
    )
    return found[0] if found else None


def _load(file: Path) -> ctypes.CDLL:
    openmp = _openmp()
    if openmp is not None:
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(file))


def _built(compiler: list[str], source: Path, name: str) -> Path:
    """The library's file, from the cache, or from a new folder of this process where the cache
    cannot be written.
    """
    try:
        file = _folder() / name
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, source, file)
    except (OSError, RuntimeError):  # no home, no room, no right to write
        folder = tempfile.mkdtemp(prefix="hogwild-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = Path(folder, name)
        _compile(compiler, source, file)
    return file


def _compile(compiler: list[str], source: Path, file: Path) -> None:
    """Build ``file``, whole or not at all. OpenMP's symbols are left to the loaded library."""
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        made = Path(scratch, "native.o"), Path(scratch, "native.so")
        openmp = ["-fopenmp"] if _openmp() is not None else []
        steps = (
            [*compiler, *_FLAGS, *openmp, "-c", str(source), "-o", str(made[0])],
            [*compiler, "-shared", str(made[0]), "-o", str(made[1]), "-lm"],
        )
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)
        made[1].replace(file)
