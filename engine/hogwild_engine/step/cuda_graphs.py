"""Decode passes as CUDA graphs: a pass of a size that was seen before is one launch.

Sizes are rounded up, so that few graphs serve all decode passes. A graph reads one buffer of
integers and leaves its logits in another; everything else that it touches is weights and cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from hogwild_engine.step.batch import Batch
from hogwild_engine.step.packed_batch import Sizes, pack

_log = logging.getLogger(__name__)

MAX_ROWS = 32
MAX_ENTRIES = 128
"""Passes with more of either run uncaptured: they take long enough to hide their launches."""

Work = Callable[[], torch.Tensor]
RunPacked = Callable[[torch.Tensor, Sizes], torch.Tensor]


class Captured(NamedTuple):
    """A pass that can be run again: fill ``numbers``, replay, read ``logits``."""

    numbers: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """Graphs of the passes that one runner ran, one a rounded size.

    Args:
        device: where all layers are.
        capture: turns work into the tensor that it writes and something that does it again.
    """

    def __init__(
        self,
        device: torch.device,
        capture: Callable[[Work], tuple[torch.Tensor, Callable[[], object]]],
    ) -> None:
        self._device = device
        self._capture = capture
        self._captured: dict[Sizes, Captured] = {}
        self._works = True

    def run(self, batch: Batch, run: RunPacked) -> torch.Tensor | None:
        """The logits of the batch's sampled rows; ``None`` where the batch must run uncaptured.

        Args:
            batch: what to run.
            run: runs a batch's packed numbers of any size.
        """
        needed = Sizes.of(batch)
        if not self._works or needed.rows > MAX_ROWS or needed.entries >= MAX_ENTRIES:
            return None
        sizes = rounded_up(needed)
        numbers = pack(batch, sizes)
        if sizes not in self._captured:
            try:
                self._captured[sizes] = self._captured_pass(numbers, sizes, run)
            except RuntimeError as error:
                self._works = False
                _log.warning("decode runs without CUDA graphs, this model defies them: %s", error)
                return None
        captured = self._captured[sizes]
        captured.numbers.copy_(numbers)
        captured.replay()
        return captured.logits[: needed.sampled].clone()

    def _captured_pass(self, numbers: torch.Tensor, sizes: Sizes, run: RunPacked) -> Captured:
        # The batch's own numbers: passes that warm up write the same keys as the one that counts.
        kept = numbers.to(self._device, copy=True)
        logits, replay = self._capture(lambda: run(kept, sizes))
        return Captured(kept, logits, replay)


class CudaCapture:
    """Captures work as a CUDA graph. All graphs share one memory pool: they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> tuple[torch.Tensor, Callable[[], object]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and workspaces made outside of the graph
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        return output, graph.replay


def rounded_up(sizes: Sizes) -> Sizes:
    """The size that a pass is padded to: powers of two, and one entry for spare pairs."""
    return Sizes(
        rows=_power(sizes.rows, 1),
        sampled=_power(sizes.rows, 1),
        entries=_power(sizes.entries + 1, 8),
        pages=_power(sizes.pages, 16),
        pairs=_power(sizes.pairs, 16),
    )


def _power(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())
