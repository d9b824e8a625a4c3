"""This project as a system of the benchmark: an engine that serves real requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hogwild_agents.bench.measurement import TEMPERATURE, TOP_P, Measured
from hogwild_engine.api.config import SamplingParams
from hogwild_engine.api.errors import HogwildError, SessionCancelledError, error_text
from hogwild_engine.api.events import AnswerToken, Event, Finished, Step, Usage
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request, make_workers

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine
    from hogwild_engine.handle import Handle
    from hogwild_engine.stats import EngineStats

# Paragraphs never end and all workers start at once: every step samples one token of each.
PROTOCOL = Protocol(name="bench", rules="", stagger=0, min_chars=10**9, forbids_headers=False)


class EngineSystem:
    """Answers each request with ``workers`` workers over one cache.

    Args:
        engine: serves all requests at once.
        workers: of each request.
    """

    def __init__(self, engine: Engine, workers: int) -> None:
        self._engine = engine
        self._workers = workers

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured:
        """Prefill the tasks, one request each; then decode ``steps`` steps of all of them."""
        started = time.perf_counter()
        with self._submitted(tasks, 1, seed) as handles:
            usages = [handle.result().usage for handle in handles]
        prefill_s = time.perf_counter() - started
        # The prompts come from the prefix cache now, so that all requests begin together.
        with self._submitted(tasks, steps + 1 + lead_steps(len(tasks)), seed) as handles:
            decoded = self._decode(handles, steps)
        return Measured(
            prompt_tokens=usages[0].prompt_tokens,
            prefilled=sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
            prefill_s=prefill_s,
            **decoded,
        )

    @contextmanager
    def _submitted(self, tasks: Sequence[str], steps: int, seed: int) -> Iterator[list[Handle]]:
        """Run requests at once and cancel them at the end, so that the next system runs alone."""
        handles = []
        try:
            for place, task in enumerate(tasks):
                handles.append(self._engine.submit(self._request(task, steps, seed + place)))
            yield handles
        finally:
            for handle in handles:
                handle.cancel()
            for handle in handles:
                with suppress(SessionCancelledError):
                    handle.result()

    def _request(self, task: str, steps: int, seed: int) -> Request:
        return Request(
            (_message(task),),
            make_workers(self._workers),
            protocol=PROTOCOL,
            answer="join",
            max_steps=steps,
            max_tokens=steps,
            sampling=SamplingParams(
                temperature=TEMPERATURE,
                top_p=TOP_P,
                top_k=0,
                min_p=0.0,
                repetition_penalty=1.0,
                seed=seed,
            ),
            ignore_eos=True,
        )

    def _decode(self, handles: Sequence[Handle], steps: int) -> dict[str, Any]:
        """Watch from the step in which the last request begins until the first one ends."""
        streams = [iter(handle) for handle in handles]
        for stream in streams:
            _read_first_token(stream)
        before = after = self._engine.stats()
        held, usage = _held(before), Usage()
        for event in streams[0]:
            if isinstance(event, Finished):
                usage = event.usage
            elif after.steps - before.steps < steps:
                after = self._engine.stats()
                held = max(held, _held(after))
        if after.steps == before.steps:
            todo = "the requests were over before all of them had begun: give more steps"
            raise HogwildError(error_text("steps", "time to measure", steps, todo))
        page_bytes = before.cache_bytes // before.num_pages
        team = max(len(usage.worker_tokens), 1)
        private_pages = team * -(-usage.private_tokens // (team * before.page_size))
        return {
            "steps": after.steps - before.steps,
            "tokens": after.encoded_tokens - before.encoded_tokens,
            "decode_s": after.busy_s - before.busy_s,
            "forward_s": after.forward_s - before.forward_s,
            "cache_bytes": held,
            "private_cache_bytes": len(handles) * private_pages * page_bytes,
        }


def lead_steps(requests: int) -> int:
    """Steps that the first request may make before the last one begins."""
    return 2 * (requests - 1)


def _message(task: str) -> dict[str, str]:
    return {"role": "user", "content": task}


def _read_first_token(stream: Iterator[Event]) -> None:
    for event in stream:
        if isinstance(event, Step | AnswerToken):
            return


def _held(stats: EngineStats) -> int:
    used = stats.num_pages - stats.free_pages
    return used * (stats.cache_bytes // stats.num_pages)
