"""The benchmark's own arm: an engine that serves real requests, a team each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from hogwild_engine.config import SamplingParams
from hogwild_engine.errors import HogwildError, SessionCancelledError, complaint
from hogwild_engine.events import AnswerToken, Event, Finished, Step, Usage
from hogwild_engine.measured import TEMPERATURE, TOP_P, Measured
from hogwild_engine.protocol import Protocol
from hogwild_engine.request import Request, make_workers

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine, EngineStats
    from hogwild_engine.handle import Handle

# Paragraphs never end and all workers start at once: every step draws one token of each.
PROTOCOL = Protocol(name="bench", rules="", stagger=0, min_chars=10**9, guards_headers=False)


class EngineArm:
    """Answers each request by ``workers`` workers over one cache.

    Args:
        engine: serves all requests at once.
        workers: of each request.
    """

    def __init__(self, engine: Engine, workers: int) -> None:
        self._engine = engine
        self._workers = workers

    def measure(self, tasks: Sequence[str], steps: int, seed: int) -> Measured:
        """Prefill the tasks, one request each, and decode ``steps`` steps once all have begun."""
        context = self._engine.count_tokens([_message(tasks[0])])
        budget = steps + 1 + lead_steps(len(tasks), context, self._engine.config.max_pass_tokens)
        asked = [self._request(task, budget, seed + i) for i, task in enumerate(tasks)]
        started = time.perf_counter()
        handles = [self._engine.submit(request) for request in asked]
        try:
            streams = [iter(handle) for handle in handles]
            for stream in streams:
                _read_first_token(stream)
            prefill_s = time.perf_counter() - started
            return self._decode(streams[0], len(tasks), prefill_s, steps)
        finally:
            _end(handles)

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

    def _decode(
        self, stream: Iterator[Event], requests: int, prefill_s: float, steps: int
    ) -> Measured:
        before = after = self._engine.stats()
        held, usage = _held(before), Usage()
        for event in stream:
            if isinstance(event, Finished):
                usage = event.usage
            elif after.steps - before.steps < steps:
                after = self._engine.stats()
                held = max(held, _held(after))
        if after.steps == before.steps:
            todo = "the requests were over before all of them had begun: give more steps"
            raise HogwildError(complaint("steps", "time to measure", steps, todo))
        token_bytes = before.cache_bytes // (before.num_pages * before.page_size)
        return Measured(
            prompt_tokens=usage.prompt_tokens,
            prefilled=requests * (usage.prompt_tokens - usage.cached_tokens),
            prefill_s=prefill_s,
            steps=after.steps - before.steps,
            tokens=after.encoded_tokens - before.encoded_tokens,
            decode_s=after.busy_s - before.busy_s,
            forward_s=after.forward_s - before.forward_s,
            cache_bytes=held,
            private_cache_bytes=requests * usage.private_tokens * token_bytes,
        )


def lead_steps(requests: int, context: int, max_pass_tokens: int) -> int:
    """Steps that the first request may have made before the last one's prompt is read."""
    return (requests - 1) * -(-2 * context // max_pass_tokens)


def _message(task: str) -> dict[str, str]:
    return {"role": "user", "content": task}


def _read_first_token(stream: Iterator[Event]) -> None:
    for event in stream:
        if isinstance(event, Step | AnswerToken):
            return


def _held(stats: EngineStats) -> int:
    used = stats.num_pages - stats.free_pages
    return used * (stats.cache_bytes // stats.num_pages)


def _end(handles: Sequence[Handle]) -> None:
    """Cancel what still runs and wait until it is gone: the next arm has the machine to itself."""
    for handle in handles:
        handle.cancel()
    for handle in handles:
        with suppress(SessionCancelledError):
            handle.result()
