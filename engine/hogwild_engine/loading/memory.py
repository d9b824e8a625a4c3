"""How much memory there is, how much of it the KV cache takes, and giving memory back.

What there is: the machine's memory, or the container's where it is less. Containers and services
are control groups; psutil reads the machine's memory alone.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from hogwild_engine.api.config import EngineConfig
from hogwild_engine.cache.kv_cache import LayerShape

MIN_POOL_TOKENS = 32_768
"""The pool on the CPU holds so many tokens, or a full context if that is longer. A team with the
default settings and a short prompt reserves about 4,000.
"""

SPARE_SHARE = 1 / 8
"""Pages beside a full context: partly filled ones, and paragraphs that stand twice while they move.
"""

MAX_CONTEXTS = 64
"""The pool on another device holds at most so many full contexts."""


def pool_pages(config: EngineConfig, shapes: Sequence[LayerShape], context_len: int) -> int:
    """Return how many pages the KV cache has.

    Args:
        config: ``num_pages`` decides if it is set; else ``memory_fraction`` bounds the number.
        shapes: what each layer stores.
        context_len: tokens that a view may hold.
    """
    if config.num_pages is not None:
        return config.num_pages
    context, device = int(context_len * (1 + SPARE_SHARE)), shapes[0].device
    if device.type == "cuda":
        free, tokens = torch.cuda.mem_get_info(device)[0], MAX_CONTEXTS * context
    else:
        free, tokens = available_memory(), max(MIN_POOL_TOKENS, context)
    page_bytes = config.page_size * sum(shape.bytes_per_token for shape in shapes)
    affordable = int(free * config.memory_fraction) // page_bytes
    return max(1, min(affordable, -(-tokens // config.page_size)))


def return_freed_memory() -> None:
    """Return to the system what the process has freed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # glibc keeps freed memory for later allocations
        ctypes.CDLL(None).malloc_trim(0)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can take before the machine or its control group is full.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    free = psutil.virtual_memory().available
    for folder in _control_groups(root):
        free = min(free, _left(folder, free))
    return max(0, free)


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it, cgroup v1 and v2.

    A container sees its own group at the mount point, whatever path ``/proc/self/cgroup`` has.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {}  # of version 1's memory controller, and of version 2, which has no names
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup2" if not controllers else "cgroup"] = path
    for line in mounts:
        own, _, kind = line.partition(" - ")
        (_, _, _, mounted, place, *_), (name, _, options) = own.split(), kind.split(maxsplit=2)
        is_memory = name == "cgroup2" or (name == "cgroup" and "memory" in options.split(","))
        if not is_memory or name not in paths:
            continue
        top = root / place.lstrip("/")
        path = paths[name].removeprefix(mounted.rstrip("/")).strip("/")
        folder = top / path
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _left(folder: Path, most: int) -> int:
    """Return the bytes until a control group's limit; ``most`` if it has none.

    Files that the kernel caches for the group count as used, but go when memory is short.
    """
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            numbers = [int((folder / name).read_text()) for name in (limit, used)]
            stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
            return numbers[0] - numbers[1] + int(stat.get(files, 0))
        except (OSError, ValueError):  # no such file, or the limit is "max"
            continue
    return most
