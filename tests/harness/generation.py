"""Tokens of transformers' ``generate``, the reference for a single worker."""

from __future__ import annotations

from typing import Any

import torch


def generated(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return the tokens that ``generate`` appends to ``prompt``, the end of turn included."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    return out[0, len(prompt) :].tolist()
