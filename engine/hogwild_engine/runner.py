"""Plan in, logits out. Knows the model's forward and the cache; not sessions."""

from __future__ import annotations

import time
from typing import Any

import torch

from hogwild_engine.cache import KVCache
from hogwild_engine.forward import Forward
from hogwild_engine.hook import PassTensors
from hogwild_engine.plan import Plan
from hogwild_engine.rope import Rotation
from hogwild_kernels import BlockTable


class Runner:
    """Runs passes of a model over the shared cache.

    Args:
        forward: the model's layers.
        cache: where keys and values live.
        windows: the sliding window of each layer, ``None`` where it sees everything.

    Attributes:
        forward_s: seconds that the last pass spent inside the model's forward.
    """

    def __init__(self, forward: Forward, cache: KVCache, windows: list[int | None]) -> None:
        self.cache = cache
        self.forward = forward
        self.forward_s = 0.0
        self._kinds = [
            (shape.rotation, window, shape.device)
            for shape, window in zip(cache.shapes, windows, strict=True)
        ]

    @torch.inference_mode()
    def run(self, plan: Plan) -> torch.Tensor:
        """Write the plan's rows to the cache and return the logits of its sampled rows, float32
        ``[R, V]``.
        """
        tables = {kind: _table(plan, *kind) for kind in dict.fromkeys(self._kinds)}
        slots = torch.tensor(plan.slots)
        tensors = PassTensors(
            self.cache,
            {device: slots.to(device) for _, _, device in tables},
            [tables[kind] for kind in self._kinds],
        )
        keep = plan.sampled or [len(plan.tokens) - 1]
        started = time.perf_counter()
        logits = self.forward(plan.tokens, plan.positions, tensors, keep)
        self.forward_s = time.perf_counter() - started
        return logits[: len(plan.sampled)].float()


def _table(plan: Plan, rotation: Rotation, window: int | None, device: torch.device) -> BlockTable:
    """The plan's entries as the table of layers with this rotation and window."""
    entries = plan.entries
    counts = [len(entry.hi) for entry in entries]
    first_pair = [sum(counts[:i]) for i in range(len(counts))]
    width = max(len(entry.pages) for entry in entries)
    deltas = [delta for entry in entries for delta in entry.deltas]
    hi = [end for entry in entries for end in entry.hi]
    lo = [0] * len(hi)
    if window is not None:
        offsets = [offset for entry in entries for offset in entry.offsets]
        lo = [max(0, offset - window + 1) for offset in offsets]
    cos, sin = rotation.table(deltas, device)

    def ints(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return BlockTable(
        pages=ints([entry.pages + [0] * (width - len(entry.pages)) for entry in entries]),
        first_row=ints([entry.first_row for entry in entries]),
        num_rows=ints(counts),
        first_pair=ints(first_pair),
        lo=ints(lo),
        hi=ints(hi),
        cos=cos,
        sin=sin,
    )
