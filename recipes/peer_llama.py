"""llama.cpp as a system of the benchmark: independent sequences that answer one prompt.

Runs through llama-cpp-python.
"""

import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hogwild_agents.bench.measurement import TEMPERATURE, TOP_P, Measured
from hogwild_engine.threads import run_in_fresh_thread

MAX_NUM_BATCHED_TOKENS = 512

_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)

Render = Callable[[str], list[int]]


def is_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def load_model(gguf: Path) -> Any:
    """The file's model, on the CPU.

    Raises:
        ValueError: llama.cpp cannot load it.
    """
    llama_cpp: Any = importlib.import_module("llama_cpp")
    llama_cpp.llama_log_set(_SILENT, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), params)
    if not model:
        raise ValueError(f"llama.cpp cannot load {str(gguf)!r}")
    return model


class LlamaSystem:
    """Writes ``sequences`` answers in one batch; the prompt is encoded once.

    Args:
        model: of `load_model`.
        render: a task to token ids.
        sequences: how many.
        context: tokens that each may hold, prompt included.
        threads: of the CPU; ``None``: all.
    """

    def __init__(
        self, model: Any, render: Render, sequences: int, context: int, threads: int | None
    ) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        self._cpp = llama_cpp
        self._render = render
        self._sequences = sequences
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context * sequences
        params.n_batch = params.n_ubatch = MAX_NUM_BATCHED_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_NUM_BATCHED_TOKENS, 0, 1)

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured:
        """Answer the only task: prefill, then ``steps`` steps of all sequences.

        Apart: it shares OpenMP with torch, where helpers that its thread left behind would slow the
        other systems.
        """
        (task,) = tasks
        return run_in_fresh_thread(lambda: self._measure(task, steps, seed))

    def _measure(self, task: str, steps: int, seed: int) -> Measured:
        ids = self._render(task)
        samplers = [self._sampler(seed + place) for place in range(self._sequences)]
        started = time.perf_counter()
        last = self._prefill(ids)
        sampled = [self._cpp.llama_sampler_sample(s, self._context, last) for s in samplers]
        prefill_s = time.perf_counter() - started
        # The first step copies the prompt's cache to all sequences: it does not count.
        sampled = self._step(sampled, len(ids), samplers)
        started = time.perf_counter()
        for position in range(len(ids) + 1, len(ids) + 1 + steps):
            sampled = self._step(sampled, position, samplers)
        decode_s = time.perf_counter() - started
        for sampler in samplers:
            self._cpp.llama_sampler_free(sampler)
        tokens = steps * self._sequences
        return Measured(len(ids), len(ids), prefill_s, steps, tokens, decode_s)

    def _step(self, tokens: Sequence[int], position: int, samplers: Sequence[Any]) -> list[int]:
        """Decode one token of each sequence; returns the next ones."""
        self._decode([(token, position, place, True) for place, token in enumerate(tokens)])
        return [
            self._cpp.llama_sampler_sample(sampler, self._context, place)
            for place, sampler in enumerate(samplers)
        ]

    def _prefill(self, ids: Sequence[int]) -> int:
        """Encode the prompt for all sequences; returns the row of its last token."""
        self._cpp.llama_memory_clear(self._memory, True)
        last = len(ids) - 1
        count = 0
        for start in range(0, len(ids), MAX_NUM_BATCHED_TOKENS):
            part = ids[start : start + MAX_NUM_BATCHED_TOKENS]
            count = len(part)
            self._decode([(t, start + i, 0, start + i == last) for i, t in enumerate(part)])
        for place in range(1, self._sequences):
            self._cpp.llama_memory_seq_cp(self._memory, 0, place, -1, -1)
        return count - 1

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One pass over rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, sampled) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = sampled
        if self._cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp failed to decode {len(rows)} tokens")

    def _sampler(self, seed: int) -> Any:
        cpp = self._cpp
        chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
        for part in (
            cpp.llama_sampler_init_temp(TEMPERATURE),
            cpp.llama_sampler_init_top_p(TOP_P, 1),
            cpp.llama_sampler_init_dist(seed),
        ):
            cpp.llama_sampler_chain_add(chain, part)
        return chain
