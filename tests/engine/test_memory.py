"""Memory: what the machine or the container leaves, what the pool takes, and what close frees."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hogwild_engine import Engine, EngineConfig, Request, make_workers
from hogwild_engine.loading import memory
from hogwild_engine.loading.memory import available_memory, return_freed_memory
from hogwild_engine.loading.pretrained import Pretrained
from tiny import fused_model, tiny_model

MIB = 2**20
V1 = "31 24 0:27 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
V2 = "29 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = (
    "24 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


def machine(root: Path, groups: str, mounts: str, files: dict[str, dict[str, Any]]) -> Path:
    """Make the folders of a machine's control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(OTHER + mounts)
    for folder, contents in files.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (root / folder / name).write_text(f"{content}\n")
    return root


def v1(limit: int, used: int, files: int = 0) -> dict[str, Any]:
    stat = f"cache 5\ntotal_inactive_file {files}"
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": stat,
    }


def v2(limit: int | str, used: int, files: int = 0) -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {files}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


SEEN = {
    "version 2, a container": ("0::/\n", V2.format(root="/"), {"": v2(90 * MIB, 50 * MIB)}, 40),
    "version 2, files that the kernel caches": (
        "0::/\n",
        V2.format(root="/"),
        {"": v2(90 * MIB, 50 * MIB, 20 * MIB)},
        60,
    ),
    "version 2, a service in a slice that is tighter": (
        "0::/app.slice/x.service\n",
        V2.format(root="/"),
        {"app.slice": v2(70 * MIB, 60 * MIB), "app.slice/x.service": v2("max", 5 * MIB)},
        10,
    ),
    "version 1, a group of a host": (
        "4:memory:/jobs/7\n2:cpu,cpuacct:/\n0::/\n",
        V1.format(root="/"),
        {"memory": v1(2**63 - 4096, 0), "memory/jobs/7": v1(30 * MIB, 10 * MIB)},
        20,
    ),
    "version 1, a container that sees its group as the top": (
        "4:memory:/docker/abc\n",
        V1.format(root="/docker/abc"),
        {"memory": v1(30 * MIB, 25 * MIB)},
        5,
    ),
    "version 1, a path that the mount does not show": (
        "4:memory:/docker/abc\n",
        V1.format(root="/"),
        {"memory": v1(30 * MIB, 25 * MIB)},
        5,
    ),
    "a group beyond its limit": ("0::/\n", V2.format(root="/"), {"": v2(10 * MIB, 11 * MIB)}, 0),
}


@pytest.mark.parametrize("what", SEEN)
def test_a_control_groups_limit_bounds_the_available_memory(tmp_path: Path, what: str) -> None:
    groups, mounts, files, free = SEEN[what]
    files = {f"sys/fs/cgroup/{folder}": contents for folder, contents in files.items()}
    assert available_memory(machine(tmp_path, groups, mounts, files)) == free * MIB


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    mounts, files = V2.format(root="/"), {"sys/fs/cgroup": v2("max", 5)}
    wide = machine(tmp_path / "a", "0::/\n", mounts, files)
    for root in (wide, tmp_path / "no such machine"):
        assert abs(available_memory(root) - psutil.virtual_memory().available) < 500 * MIB


def small_engine(tokenizer: Any, **options: Any) -> Engine:
    return Engine(
        EngineConfig(model="tiny", page_size=8, **options),
        loaded=Pretrained(tiny_model("llama"), tokenizer),
    )


def test_the_default_pool_holds_a_context_and_fits_the_container(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "hogwild_engine"), small_engine(tokenizer) as engine:
        stats, per_token = engine.stats(), engine._cache.bytes_per_token
        assert stats.num_pages * 8 == memory.MIN_POOL_TOKENS >= engine.context_len
        assert stats.cache_bytes == memory.MIN_POOL_TOKENS * per_token
        assert stats.cache_mb == stats.cache_bytes / 1e6
    assert f"the KV cache takes up to {stats.cache_mb:.0f} MB" in caplog.text
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000 * per_token)
    with small_engine(tokenizer) as engine:
        assert engine.stats().num_pages * 8 == 2_000  # the default share is a fifth
    monkeypatch.undo()
    monkeypatch.setattr(memory, "MIN_POOL_TOKENS", 8)
    with small_engine(tokenizer) as engine:
        tokens = engine.stats().num_pages * 8
        assert engine.context_len < tokens < 1.2 * engine.context_len


def rss() -> int:
    return_freed_memory()
    return psutil.Process().memory_info().rss


def test_memory_is_flat_once_the_pool_is_full(tokenizer: Any) -> None:
    with small_engine(tokenizer, num_pages=400) as engine:

        def serve(first: int) -> None:
            texts = [f"{number} " * 120 for number in range(first, first + 20)]
            requests = [
                Request(({"role": "user", "content": text},), make_workers(1), max_tokens=3)
                for text in texts
            ]
            for handle in [engine.submit(request) for request in requests]:
                handle.result(60)

        serve(0)
        serve(20)
        before = rss()
        for first in (40, 60, 80):
            serve(first)
        assert rss() - before < 2 * MIB


@pytest.mark.parametrize("make", [tiny_model, fused_model], ids=["transformers", "fused"])
def test_closing_an_engine_frees_its_model_and_its_cache(
    tokenizer: Any, make: Callable[[str], Any]
) -> None:
    model = make("llama")
    config = EngineConfig(model="tiny", num_pages=4000, page_size=32)
    engine = Engine(config, loaded=Pretrained(model, tokenizer))
    handle = engine.submit(Request(({"role": "user", "content": "Hello"},), max_tokens=3))
    handle.result(60)
    engine._cache.groups[0].keys.zero_()
    kept = [weakref.ref(engine._runner), weakref.ref(engine._runner.forward), weakref.ref(model)]
    cache_bytes, before = engine.stats().cache_bytes, rss()
    del model
    engine.close()
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]
    assert before - rss() > 0.4 * cache_bytes > 5 * MIB
    assert engine.stats().num_pages == 4000
