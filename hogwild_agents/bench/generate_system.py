"""The benchmark's baseline: transformers' ``generate`` on the model as transformers loads it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import StoppingCriteria, StoppingCriteriaList

from hogwild_agents.bench.measurement import TEMPERATURE, TOP_P, Measured
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.loading.pretrained import load_pretrained
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.threads import run_in_fresh_thread


class GenerateSystem:
    """Answers each request with one sequence, all requests in one batch.

    Args:
        config: its model, dtype, device and threads are used.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._num_threads = config.num_threads
        loaded = run_in_fresh_thread(lambda: load_pretrained(config))
        self._model: Any = loaded.model
        self._chat = ChatTemplate(loaded.tokenizer, config.model)
        self._pad = loaded.tokenizer.eos_token_id or 0

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured:
        """Prefill the tasks, one request each, and decode ``steps`` steps after the first token."""
        started = time.perf_counter()
        prompts = [self._chat.render([{"role": "user", "content": task}]) for task in tasks]
        # Padding would disable the fast path of attention: cut prompts to one length.
        length = min(map(len, prompts))
        ids = torch.tensor([prompt[-length:] for prompt in prompts], device=self._model.device)
        clock = _Clock()
        run_in_fresh_thread(lambda: self._generate(ids, clock, steps, seed))
        first, last = clock.times[0], clock.times[-1]
        return Measured(
            prompt_tokens=length,
            prefilled=ids.numel(),
            prefill_s=first - started,
            steps=len(clock.times) - 1,
            tokens=(len(clock.times) - 1) * len(tasks),
            decode_s=last - first,
        )

    def _generate(self, ids: torch.Tensor, clock: _Clock, steps: int, seed: int) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        torch.manual_seed(seed)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=StoppingCriteriaList([clock]),
            min_new_tokens=steps + 1,
            max_new_tokens=steps + 1,
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            top_k=0,
            repetition_penalty=1.0,
            pad_token_id=self._pad,
        )


class _Clock(StoppingCriteria):
    """Records the time of each sampled token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def machine() -> dict[str, Any]:
    """Return what a benchmark's figures depend on beside its settings."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
