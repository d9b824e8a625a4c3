"""OpenVINO GenAI as a system of the benchmark: independent sequences that answer one prompt."""

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hogwild_agents.bench.measurement import TEMPERATURE, TOP_P, Measured

CACHE_GB = 2
MAX_NUM_BATCHED_TOKENS = 2**15

Render = Callable[[str], list[int]]


def is_installed() -> bool:
    return importlib.util.find_spec("openvino_genai") is not None


def load_pipeline(gguf: Path, threads: int | None) -> Any:
    """A pipeline with continuous batching, which a caller can step by hand."""
    openvino_genai: Any = importlib.import_module("openvino_genai")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    options = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    return openvino_genai.ContinuousBatchingPipeline(str(gguf), scheduler, "CPU", options)


class OpenVinoSystem:
    """Writes ``sequences`` answers in one batch; the prompt is encoded once.

    Args:
        pipeline: of `load_pipeline`.
        render: a task to token ids.
        sequences: how many.
    """

    def __init__(self, pipeline: Any, render: Render, sequences: int) -> None:
        self._pipeline = pipeline
        self._render = render
        self._sequences = sequences

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured:
        """Answer the only task; the last ``steps`` steps are decoding."""
        openvino: Any = importlib.import_module("openvino")
        (task,) = tasks
        ids = self._render(task)
        started = time.perf_counter()
        tokens = openvino.Tensor(np.array([ids], dtype=np.int64))
        handle = self._pipeline.add_request(seed, tokens, self._generation(steps + 1, seed))
        times = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            times.append(time.perf_counter())
        written = [len(result.generated_ids) for result in handle.read_all()]
        assert written == [steps + 1] * self._sequences, written
        first = times[-1 - steps]
        return Measured(
            prompt_tokens=len(ids),
            prefilled=len(ids),
            prefill_s=first - started,
            steps=steps,
            tokens=steps * self._sequences,
            decode_s=times[-1] - first,
        )

    def _generation(self, tokens: int, seed: int) -> Any:
        openvino_genai: Any = importlib.import_module("openvino_genai")
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = tokens
        generation.ignore_eos = True
        generation.do_sample = True
        generation.temperature = TEMPERATURE
        generation.top_p = TOP_P
        generation.num_return_sequences = self._sequences
        generation.rng_seed = seed
        return generation
