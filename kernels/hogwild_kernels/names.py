"""The names of the attention backends, for settings and docs. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

AttentionName = Literal["auto", "reference", "cpu", "native", "triton"]
PrefillName = Literal["auto", "flash", "varlen", "same"]

ATTENTIONS: tuple[str, ...] = get_args(AttentionName)
"""Backends that attend over the cache.

"triton" runs on CUDA, "native" is C on the CPU, "cpu" uses torch's operators on the CPU, and
"reference" is plain PyTorch on any device. "auto" is "triton" on CUDA and "native" on the CPU where
they can run, else "cpu" on the CPU and "reference" on all other devices.
"""

PREFILLS: tuple[str, ...] = get_args(PrefillName)
"""Backends that attend for long prompts.

"flash" is the package flash-attn, "varlen" is torch's attention over variable lengths, and "same"
is the backend of all other query tokens. "auto" is the first of them that can run where that
backend was chosen as "auto" or "triton", else "same".
"""
