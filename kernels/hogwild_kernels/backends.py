"""Which implementation runs, decided from devices, types and what is installed; never by trying."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from hogwild_kernels.cuda import varlen
from hogwild_kernels.table import KVScales

IMPLEMENTATIONS = ("auto", "reference", "cpu", "native", "triton")
"""What ``impl`` may be. "auto" is "triton" on CUDA where it is installed, "native" or else "cpu"
on the CPU, "reference" for all other devices and for an fp8 cache on the CPU.
"""

PREFILLS = ("auto", "flash", "varlen", "same")
"""What ``prefill`` may be: who attends for the long runs of a table. "flash" is the package
flash-attn, "varlen" is torch's own attention over variable lengths, "same" is what ``impl`` says.
"auto" is the first of them that can run where ``impl`` is "auto" or "triton", else "same".
"""

_MODULES = {
    "reference": "hogwild_kernels.reference",
    "cpu": "hogwild_kernels.cpu.torch_backend",
    "native": "hogwild_kernels.cpu.c_backend",
    "triton": "hogwild_kernels.cuda.triton_attention",
}
_FP8_CAPABILITY = (8, 9)

_log = logging.getLogger(__name__)


class KernelArgumentError(ValueError):
    """An argument has the wrong shape, type or device, or a requested implementation cannot run."""


def implementation(impl: str, tensor: torch.Tensor, scales: KVScales | None = None) -> ModuleType:
    """The module that runs the four operations on tensors like this one.

    Raises:
        KernelArgumentError: ``impl`` is unknown, or cannot run on such tensors.
    """
    check(impl in IMPLEMENTATIONS, "impl", f"one of {IMPLEMENTATIONS}", impl)
    device = tensor.device
    if impl == "auto":
        impl = _automatic(device.type, scales is not None)
    if impl in ("cpu", "native"):
        check(device.type == "cpu", "impl", f"tensors on the CPU for {impl!r}", device)
        check(scales is None, "impl", "'reference' or 'triton' for an fp8 cache", impl)
    if impl == "triton":
        _check_triton(device, scales is not None)
    return import_module(_MODULES[impl])


def _automatic(device_type: str, is_fp8: bool) -> str:
    if device_type == "cuda":
        return _automatic_on_cuda()
    return "cpu" if device_type == "cpu" and not is_fp8 else "reference"


@cache
def _automatic_on_cuda() -> str:
    try:
        import_module("triton")
    except ImportError:
        _log.warning("attention runs in plain PyTorch, which is slow: Triton is not installed")
        return "reference"
    return "triton"


def _check_triton(device: torch.device, is_fp8: bool) -> None:
    try:
        module = import_module(_MODULES["triton"])
    except ImportError as error:
        raise KernelArgumentError(
            "impl: wanted Triton 3.6 or newer for 'triton' (pip install triton), got none"
        ) from error
    wanted = "CUDA tensors for 'triton', or TRITON_INTERPRET=1 in the environment"
    runs = device.type == "cuda" or (device.type == "cpu" and module.INTERPRETED)
    check(runs, "impl", wanted, device)
    if is_fp8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        check(capability >= _FP8_CAPABILITY, "impl", "sm_89 or newer for fp8", capability)


@cache
def prefill_implementation(
    prefill: str,
    impl: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    softcap: float | None = None,
) -> str:
    """Who attends for long runs of rows: a name of `PREFILLS`, and never "auto".

    Args:
        prefill: one of `PREFILLS`.
        impl: who attends for all other rows, one of `IMPLEMENTATIONS`.
        device: where the cache is.
        dtype: the cache's.
        dim: D.
        softcap: as in `block_attention`.

    Raises:
        KernelArgumentError: ``prefill`` names what cannot run on such a cache.
    """
    check(prefill in PREFILLS, "prefill", f"one of {PREFILLS}", prefill)
    kind = (device, dtype, dim, softcap)
    chosen = "same"
    if prefill in varlen.BACKENDS:
        refusal = varlen.refusal(prefill, *kind)
        check(refusal is None, "prefill", f"for {prefill!r} {refusal}", kind)
        chosen = prefill
    elif prefill == "auto" and impl in ("auto", "triton"):
        able = (name for name in varlen.BACKENDS if varlen.refusal(name, *kind) is None)
        chosen = next(able, chosen)
    who = "the kernels of all other rows" if chosen == "same" else repr(chosen)
    _log.info("long prompts attend through %s (device, dtype, head dim, softcap: %s)", who, kind)
    return chosen


def check(holds: bool, name: str, wanted: str, came: object) -> None:
    """Raise `KernelArgumentError` naming the argument unless ``holds``."""
    if not holds:
        raise KernelArgumentError(f"{name}: wanted {wanted}, got {came!r}")
