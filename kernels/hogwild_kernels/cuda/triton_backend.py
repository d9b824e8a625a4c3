"""The Triton backend, which can be asked whether it runs where Triton is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hogwild_kernels.api import AttentionBackend, AttentionSpec, States


class TritonBackend(AttentionBackend):
    """Attention, writes and moves by the Triton kernels. See `AttentionBackend` for shapes."""

    name = "triton"

    def supports(self, spec: AttentionSpec) -> str | None:
        try:
            interpreted = _kernels("triton_attention").INTERPRETED
        except ImportError:
            return "Triton 3.6 or newer (pip install triton)"
        if spec.device.type == "cuda" or (spec.device.type == "cpu" and interpreted):
            return None
        return "CUDA tensors, or TRITON_INTERPRET=1 in the environment"

    def _attend(self, *tensors: Any, **options: Any) -> States:
        return _kernels("triton_attention").block_attention(*tensors, **options)

    def _write(self, *tensors: Any) -> None:
        _kernels("triton_cache").write_kv(*tensors)

    def _move(self, *tensors: Any) -> None:
        _kernels("triton_cache").move_kv(*tensors)


def _kernels(name: str) -> Any:
    return import_module(f"hogwild_kernels.cuda.{name}")
