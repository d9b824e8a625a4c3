"""Batch in, logits out. Knows the model's forward and the cache; not sessions."""

from __future__ import annotations

import time

import torch

from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.step.attention_hook import StepTensors
from hogwild_engine.step.batch import Batch
from hogwild_engine.step.cuda_graphs import DecodeGraphs
from hogwild_engine.step.forward import Forward
from hogwild_engine.step.packed_batch import Sizes, pack, unpack


class ModelRunner:
    """Runs the steps of a model over the shared cache.

    Args:
        forward: the model's layers.
        cache: where keys and values live.
        windows: the sliding window of each layer, ``None`` for full attention.
        graphs: replays steps of few query tokens as CUDA graphs; ``None`` runs every step eagerly.

    Attributes:
        forward_s: seconds that the last step spent inside the model's forward.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        windows: list[int | None],
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.cache = cache
        self.forward = forward
        self.forward_s = 0.0
        self._graphs = graphs
        kinds = [
            (shape.rotation, window, shape.device)
            for shape, window in zip(cache.shapes, windows, strict=True)
        ]
        self._kinds = list(dict.fromkeys(kinds))
        self._kind_of_layer = [self._kinds.index(kind) for kind in kinds]
        self._devices = list(dict.fromkeys(device for _, _, device in kinds))

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Write keys and values of the batch to the cache and return the logits that it wants.

        Returns:
            ``[R, V]`` in the model's dtype, one row an index of ``batch.logit_indices``.
        """
        started = time.perf_counter()
        logits = self._graphs.run(batch, self._run) if self._graphs else None
        self.forward_s = time.perf_counter() - started
        if logits is None:
            sizes = Sizes.of(batch)
            logits = self._run(pack(batch, sizes), sizes, batch)
        return logits[: len(batch.logit_indices)]

    def _run(self, numbers: torch.Tensor, sizes: Sizes, batch: Batch | None = None) -> torch.Tensor:
        """Run a packed batch; return the logits ``[R, V]``.

        Args:
            numbers: the packed batch.
            sizes: of its parts.
            batch: the same as plain integers; ``None`` if the numbers are padded for a CUDA graph.
        """
        parts = {device: unpack(numbers.to(device), sizes) for device in self._devices}
        tables = [
            parts[device].table(rotation, window, batch) for rotation, window, device in self._kinds
        ]
        tensors = StepTensors(
            self.cache,
            {device: packed.slots for device, packed in parts.items()},
            [tables[kind] for kind in self._kind_of_layer],
        )
        first = parts[self._devices[0]]
        started = time.perf_counter()
        logits = self.forward(first.tokens, first.positions, tensors, first.logit_indices)
        self.forward_s = time.perf_counter() - started
        return logits
