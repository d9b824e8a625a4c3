"""Import torch and transformers beside a running event loop.

An import holds Python's global lock, which an event loop needs to run, mostly for moments: modules
are many and small. Two things hold it for a fifth of a second each: loading torch's largest
library, and a full garbage collection over the objects of all modules.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

_importing = threading.Lock()


def import_engine() -> type[Engine]:
    """Return the class `Engine`. The first call imports torch and transformers, which takes a few
    seconds; other threads go on meanwhile.
    """
    with _importing:
        if "hogwild_engine.engine" not in sys.modules:
            _load_torch_library()
            with _uncollected():
                importlib.import_module("transformers.modeling_utils")
                importlib.import_module("hogwild_engine.engine")
    from hogwild_engine.engine import Engine

    return Engine


def _load_torch_library() -> None:
    """Load torch's largest library, so that ``import torch`` finds it loaded.

    The C library's ``dlopen``, called as a foreign function, runs without the global lock;
    `ctypes.CDLL` and the import hold it. Where that is not possible the import does all of it.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not sys.platform.startswith("linux"):
        return
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    with suppress(OSError, AttributeError):
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        dlopen(os.fsencode(library), os.RTLD_LAZY)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Run no garbage collection, and keep what exists afterwards out of later ones: modules stay
    until the process ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
