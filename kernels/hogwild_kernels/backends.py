"""Choose attention backends at load, from devices, dtypes and installed packages."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hogwild_kernels.api import AttentionBackend, AttentionSpec, check
from hogwild_kernels.cpu.c_backend import NativeBackend
from hogwild_kernels.cpu.torch_backend import TorchBackend
from hogwild_kernels.cuda.long_runs import LongPromptBackend
from hogwild_kernels.cuda.triton_backend import TritonBackend
from hogwild_kernels.cuda.varlen import FlashAttention, PrefillBackend, TorchVarlen
from hogwild_kernels.names import ATTENTIONS, PREFILLS
from hogwild_kernels.reference import ReferenceBackend

BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (ReferenceBackend(), TorchBackend(), NativeBackend(), TritonBackend())
}
PREFILL_BACKENDS: dict[str, PrefillBackend] = {
    backend.name: backend for backend in (FlashAttention(), TorchVarlen())
}
_AUTO = {"cuda": ("triton", "reference"), "cpu": ("native", "cpu")}

_log = logging.getLogger(__name__)


def choose_backends(
    attention: str, prefill: str, specs: Sequence[AttentionSpec]
) -> list[AttentionBackend]:
    """Return the attention backend of each layer; equal layers share one.

    Args:
        attention: one of `hogwild_kernels.names.ATTENTIONS`.
        prefill: one of `hogwild_kernels.names.PREFILLS`.
        specs: one a layer.

    Raises:
        KernelArgumentError: a name is unknown, or its backend cannot run such layers. The message
            starts with the engine's setting, ``attention`` or ``prefill_attention``.
    """
    check(attention in ATTENTIONS, "attention", f"one of {ATTENTIONS}", attention)
    check(prefill in PREFILLS, "prefill_attention", f"one of {PREFILLS}", prefill)
    chosen: dict[AttentionSpec, AttentionBackend] = {}
    for spec in dict.fromkeys(specs):
        backend = _attention_backend(attention, spec)
        if prefill == "auto" and attention not in ("auto", "triton"):
            library = None  # another backend was requested for every query token
        else:
            library = _prefill_backend(prefill, spec)
        chosen[spec] = LongPromptBackend(backend, library) if library else backend
        _log.info("attention runs by %s (%s)", chosen[spec].name, spec)
    return [chosen[spec] for spec in specs]


def _attention_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    if name != "auto":
        reason = BACKENDS[name].supports(spec)
        check(reason is None, "attention", f"for {name!r} {reason}", spec)
        return BACKENDS[name]
    candidates = [BACKENDS[known] for known in _AUTO.get(spec.device.type, ("reference",))]
    backend = next(candidate for candidate in candidates if candidate.supports(spec) is None)
    if spec.device.type == "cuda" and backend.name == "reference":
        reason = candidates[0].supports(spec)
        _log.warning("attention runs in plain PyTorch, which is slow: Triton wants %s", reason)
    return backend


def _prefill_backend(name: str, spec: AttentionSpec) -> PrefillBackend | None:
    if name in PREFILL_BACKENDS:
        reason = PREFILL_BACKENDS[name].supports(spec)
        check(reason is None, "prefill_attention", f"for {name!r} {reason}", spec)
        return PREFILL_BACKENDS[name]
    candidates = PREFILL_BACKENDS.values() if name == "auto" else ()
    return next((library for library in candidates if library.supports(spec) is None), None)
