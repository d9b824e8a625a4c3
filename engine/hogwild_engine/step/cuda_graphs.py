"""Decode steps as CUDA graphs: a step of a size that was captured before is one launch.

Sizes are rounded up, so that a few graphs serve all decode steps. A graph reads one buffer of
integers and writes its logits to another; everything else that it touches is weights and cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from hogwild_engine.step.batch import Batch
from hogwild_engine.step.packed_batch import Sizes, pack

_log = logging.getLogger(__name__)

MAX_QUERY_TOKENS = 32
MAX_BLOCK_READS = 128
"""Larger batches run without a graph: they take long enough to hide their kernel launches."""

Step = Callable[[], torch.Tensor]
RunPacked = Callable[[torch.Tensor, Sizes], torch.Tensor]


class CapturedStep(NamedTuple):
    """A captured step: copy to ``numbers``, call ``replay``, read ``logits``."""

    numbers: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """The graphs of one runner, one for each rounded size.

    Args:
        device: the device of all layers.
        capture: runs a step, and returns its output tensor and a function that replays it.
    """

    def __init__(
        self,
        device: torch.device,
        capture: Callable[[Step], tuple[torch.Tensor, Callable[[], object]]],
    ) -> None:
        self._device = device
        self._capture = capture
        self._captured: dict[Sizes, CapturedStep] = {}
        self._works = True

    def run(self, batch: Batch, run: RunPacked) -> torch.Tensor | None:
        """Return the logits of the batch's sampled tokens, ``None`` if it must run without a graph.

        Args:
            batch: what to run.
            run: runs the packed numbers of a batch of any size.
        """
        needed = Sizes.of(batch)
        too_large = needed.query_tokens > MAX_QUERY_TOKENS or needed.reads >= MAX_BLOCK_READS
        if not self._works or too_large:
            return None
        sizes = rounded_up(needed)
        numbers = pack(batch, sizes)
        if sizes not in self._captured:
            try:
                self._captured[sizes] = self._capture_step(numbers, sizes, run)
            except RuntimeError as error:
                self._works = False
                _log.warning("decode runs without CUDA graphs: capture failed: %s", error)
                return None
        captured = self._captured[sizes]
        captured.numbers.copy_(numbers)
        captured.replay()
        return captured.logits[: needed.logits].clone()

    def _capture_step(self, numbers: torch.Tensor, sizes: Sizes, run: RunPacked) -> CapturedStep:
        # Capture on the batch's own numbers: warm-up runs then write the same keys to the cache.
        buffer = numbers.to(self._device, copy=True)
        logits, replay = self._capture(lambda: run(buffer, sizes))
        return CapturedStep(buffer, logits, replay)


class CudaCapture:
    """Captures a step as a CUDA graph. All graphs share a memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> tuple[torch.Tensor, Callable[[], object]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile kernels and allocate workspaces outside of the graph
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return output, graph.replay


def rounded_up(sizes: Sizes) -> Sizes:
    """Round up to powers of two; one block read more, for the pairs that are padding."""
    return Sizes(
        query_tokens=_power_of_two(sizes.query_tokens, 1),
        logits=_power_of_two(sizes.query_tokens, 1),
        reads=_power_of_two(sizes.reads + 1, 8),
        pages=_power_of_two(sizes.pages, 16),
        pairs=_power_of_two(sizes.pairs, 16),
    )


def _power_of_two(number: int, minimum: int) -> int:
    return max(minimum, 1 << (number - 1).bit_length())
