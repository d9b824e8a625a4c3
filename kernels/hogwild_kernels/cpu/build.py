"""Compile csrc/ for this processor on first use, cache it, and load it through ctypes.

Each dtype has its own library, with the same functions. Their names in the cache end in a hash of
their content: one that is empty, cut or changed is compiled again, never loaded.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hogwild_kernels.cache_folder import cache_folder, require_private, sync

_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)
_SOURCES = Path(__file__).parent / "csrc"
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Dtypes that the C code computes in, and their names in file names and macros."""

_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The C code cannot be compiled or loaded here."""


@functools.cache
def libraries() -> dict[torch.dtype, ctypes.CDLL]:
    """Return the compiled code for each dtype; compilers run at the same time.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    found = shutil.which("cc") or shutil.which("gcc")
    compiler = shlex.split(os.environ.get("CC") or "") or ([found] if found else [])
    if not compiler:
        raise BuildError("no C compiler: install gcc or clang, or set CC")
    inputs = [*compiler, *_FLAGS, torch.__version__, _processor()]
    digest = hashlib.sha256("\n".join(inputs).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    key = digest.hexdigest()[:16]
    try:
        with ThreadPoolExecutor() as pool:
            files = list(pool.map(lambda name: _cached(compiler, name, key), DTYPES.values()))
        return dict(zip(DTYPES, map(_load, files), strict=True))
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        raise BuildError(
            f"{shlex.join(compiler)} cannot build the native kernels: {message}"
        ) from error


@functools.cache
def build_error() -> str | None:
    """Why the compiled code cannot be used here; ``None`` where it can. Logged once."""
    try:
        libraries()
    except BuildError as error:
        _log.warning("attention on the CPU runs on plain torch operators: %s", error)
        return str(error)
    return None


def _processor() -> str:
    """Return the features of the processor, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _openmp() -> Path | None:
    """Return torch's own OpenMP library: with a second one, two sets of threads share the cores."""
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


def _cached(compiler: list[str], dtype: str, key: str) -> Path:
    """Return the library's file in the cache, or in a temporary folder of this process if the cache
    cannot be written or is not this user's alone.
    """
    try:
        folder = cache_folder("native")
        for file in sorted(folder.glob(f"{dtype}-{key}-*.so")):
            if _is_intact(file):
                return file
            file.unlink(missing_ok=True)
        return _compile(compiler, dtype, key, folder)
    except OSError as error:  # no home, no room, no right to write
        return _compile(compiler, dtype, key, _temporary_folder(str(error)))


@functools.cache
def _temporary_folder(reason: str) -> Path:
    """A folder of this process, where the cache cannot be used for ``reason``."""
    _log.warning("the compiled kernels are not kept: %s", reason)
    folder = tempfile.mkdtemp(prefix="hogwild-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _is_intact(file: Path) -> bool:
    """Whether a library is this user's alone, and has the content that its name says."""
    try:
        require_private(file)
    except PermissionError:
        return False
    return file.is_file() and file.stem.rpartition("-")[2] == _digest(file.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _compile(compiler: list[str], dtype: str, key: str, target: Path) -> Path:
    """Compile to a temporary folder, then rename. The loaded OpenMP resolves its symbols later."""
    source, macro = str(_SOURCES / "kernels.c"), f"-DDTYPE_{dtype.upper()}"
    with tempfile.TemporaryDirectory(dir=target) as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        openmp = ["-fopenmp"] if _openmp() is not None else []
        steps = (
            [*compiler, *_FLAGS, *openmp, macro, "-c", source, "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"],
        )
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=120)
        linked.chmod(0o700)
        file = target / f"{dtype}-{key}-{_digest(linked.read_bytes())}.so"
        sync(linked)
        linked.replace(file)
    sync(target)
    return file
