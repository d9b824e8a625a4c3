"""The kernels' part of `gpu_check.py`: right answers, and bytes per second of the read ceiling."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hogwild_kernels.api import AttentionSpec
from hogwild_kernels.backends import BACKENDS, PREFILL_BACKENDS, choose_backends
from recipes.gpu_problem import Heads, Problem

BOUND = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative error (norm of the difference over norm) of a kernel against the reference."""

L2_BYTES = 512 * 2**20
"""Layers are cycled over at least this much, so that nothing stays in the L2 cache."""

PREFILL_HEADS = Heads(32, 8, 128)


class Case(NamedTuple):
    """One check of attention."""

    name: str
    heads: Heads
    rows: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case("decode", Heads(32, 8, 128)),
    Case("prefill", Heads(32, 8, 128), rows=150),
    Case("head dim 64", Heads(24, 8, 64)),
    Case("head dim 80", Heads(8, 8, 80)),
    Case("head dim 96", Heads(12, 4, 96), rows=40),
    Case("head dim 256", Heads(8, 2, 256), rows=40),
    Case("one head for all", Heads(71, 1, 64)),
    Case("window", Heads(8, 2, 128), rows=40, window=50),
    Case("softcap", Heads(8, 2, 128), softcap=5.0),
    Case("sinks", Heads(64, 8, 64), sinks=True),
)


def check_kernels(device: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Compare each kernel with the reference on the same tensors."""
    found = []
    for case, dtype in itertools.product(CASES, BOUND):
        if tiny and dtype is not torch.float32:
            continue
        heads = case.heads
        if tiny:
            group = min(4, heads.num_heads // heads.num_kv_heads)
            heads = Heads(group, 1, heads.dim)
        rows = min(case.rows, 3) if tiny else case.rows
        problem = Problem(
            workers=2 if tiny else 4,
            context=70 if tiny else 2_000,
            heads=heads,
            rows=rows,
            dtype=dtype,
            device=device,
            window=case.window,
        )
        sinks = torch.randn(heads.num_heads, device=device, dtype=dtype) if case.sinks else None
        got, wanted = (
            problem.attend(0, BACKENDS[name], softcap=case.softcap, sinks=sinks)
            for name in ("triton", "reference")
        )
        found.append(_compared(f"attention, {case.name}", dtype, got, wanted))
    for name, dtype in itertools.product(PREFILL_BACKENDS, BOUND):
        spec = prefill_spec(device, dtype)
        if PREFILL_BACKENDS[name].supports(spec) is None:
            problem = Problem(2, 2_000, PREFILL_HEADS, rows=300, dtype=dtype, device=device)
            got, wanted = (
                problem.attend(0, choose_backends("triton", prefill, [spec])[0])
                for prefill in (name, "same")
            )
            found.append(_compared(f"long prompt, {name} and triton", dtype, got, wanted))
    for dtype in BOUND:
        if not tiny or dtype is torch.float32:
            found += _check_cache(device, dtype)
    return found


def prefill_spec(device: str, dtype: torch.dtype = torch.bfloat16) -> AttentionSpec:
    """Return what layers of `PREFILL_HEADS` ask of a backend."""
    num_heads, num_kv_heads, dim = PREFILL_HEADS
    return AttentionSpec(torch.device(device), dtype, dim, num_heads // num_kv_heads)


def measure_prefill(device: str, prefill: str, context: int, *, tiny: bool) -> dict[str, Any]:
    """Return milliseconds of one layer's attention for a chunk behind ``context`` tokens."""
    rows = 3 if tiny else 2_048
    heads = Heads(4, 1, 64) if tiny else PREFILL_HEADS
    problem = Problem(1, context, heads, rows=rows, device=device)
    (backend,) = choose_backends("triton", prefill, [prefill_spec(device)])
    attend = partial(problem.attend, 0, backend)
    seconds = timed(attend, device, rounds=1 if tiny else 20)
    return {"attends": prefill, "rows": rows, "context": context, "ms": seconds * 1e3}


def _check_cache(device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    shape = (2, 9, 32, 4, 128)
    order = torch.randperm(9 * 32, device=device)
    source, target = order[:20], order[20:40]
    k, v = (torch.randn(20, 4, 128, device=device, dtype=dtype) for _ in "kv")
    angle = torch.randn(20, 64, device=device) * 10
    start = [torch.randn(shape, device=device).to(dtype) for _ in "kv"]
    written, moved = [], []
    for backend in (BACKENDS["triton"], BACKENDS["reference"]):
        keys, values = (pages.clone() for pages in start)
        backend.write(k, v, keys[0], values[0], source)
        written.append(torch.stack((keys, values)))
        backend.move(keys, values, source, target, angle.cos(), angle.sin())
        moved.append(torch.stack((keys, values)))
    return [_compared("write", dtype, *written), _compared("move", dtype, *moved)]


def _compared(
    name: str, dtype: torch.dtype, got: torch.Tensor, wanted: torch.Tensor
) -> dict[str, Any]:
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    right = error < BOUND[dtype]
    return {"check": name, "dtype": str(dtype)[6:], "error": error, "right": right}


def read_ceiling(device: str, *, tiny: bool) -> float:
    """Return bytes per second at which the device reads memory, by plain sums."""
    numbers = torch.ones(2**16 if tiny else 2**29, device=device)
    return numbers.nbytes / timed(numbers.sum, device, rounds=2 if tiny else 10)


def measure_attention(device: str, workers: int, context: int, *, tiny: bool) -> dict[str, Any]:
    """Measure one decode step's attention over Qwen3-8B's heads, the reduce kernel included."""
    heads = Heads(4, 1, 64) if tiny else Heads(32, 8, 128)
    problem = Problem(workers, context, heads, device=device)
    layers = 2 if tiny else max(2, min(64, -(-L2_BYTES // problem.bytes_read)))
    problem = Problem(workers, context, heads, layers=layers, device=device)

    def all_layers() -> None:
        for layer in range(layers):
            problem.attend(layer, BACKENDS["triton"])

    seconds = timed(all_layers, device, rounds=1 if tiny else 20) / layers
    rate = problem.bytes_read / seconds
    return {"workers": workers, "context": context, "us": seconds * 1e6, "bytes_per_s": rate}


def timed(work: Callable[[], object], device: str, rounds: int) -> float:
    """Return seconds of one call, on a GPU as a CUDA graph, so that launches cost nothing."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        return (time.perf_counter() - start) / rounds
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds
