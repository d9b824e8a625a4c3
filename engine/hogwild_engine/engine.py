"""`Engine`: one thread owns the model; callers submit requests from any thread and read events."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from math import isnan
from typing import Any

import torch

from hogwild_engine.advice import describe_sampling, size_advice
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import (
    EngineClosedError,
    HogwildError,
    SessionFailedError,
    require,
)
from hogwild_engine.api.events import Event, Failed
from hogwild_engine.api.protocol import resolve
from hogwild_engine.api.request import Request
from hogwild_engine.cache.kv_cache import KVCache, LayerShape
from hogwild_engine.handle import Handle
from hogwild_engine.loading.load import load_model
from hogwild_engine.loading.memory import pool_pages, return_freed_memory
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.origin import Origin
from hogwild_engine.scheduler import Scheduler
from hogwild_engine.sessions.budget import SessionLimits
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.session import Cancel, ScheduledStep, Session
from hogwild_engine.stats import EngineStats, Recorder
from hogwild_engine.step.batch import Batch, build_batch
from hogwild_engine.step.cuda_graphs import CudaCapture, DecodeGraphs
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_engine.step.sampling import ResolvedSampling, SampledToken, sample
from hogwild_engine.threads import run_in_fresh_thread

LINGER_S = 0.3
"""Seconds that an idle engine keeps its OpenMP workers. They slow other computation in the process,
and new ones cost the next request some ten milliseconds.
"""

_log = logging.getLogger(__name__)


class Engine:
    """Decodes any number of sessions in the same forward steps of one model.

    Example:
        >>> with Engine(EngineConfig()) as engine:
        ...     request = Request(({"role": "user", "content": "Name three colors."},))
        ...     for event in engine.submit(request):
        ...         print(event)

    Args:
        config: what to load, and how much memory and how many threads to use.
        loaded: a model and tokenizer in memory, used instead of ``config.model``. The engine frees
            the model's own weights.

    Raises:
        ModelNotFoundError: no model has this name.
        ModelRefusedError: the model failed a check at load.
        ModelError: the model cannot be loaded.
        ConfigError: this machine or model cannot run with these settings.
    """

    def __init__(self, config: EngineConfig, loaded: Pretrained | None = None) -> None:
        self.config = config
        self._origin = Origin()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model = run_in_fresh_thread(lambda: load_model(config, loaded))
        self.tokenizer, self.chat = model.tokenizer, model.chat
        self.default_sampling = model.default_sampling
        self._sampling_source = model.sampling_source
        self._num_parameters = model.num_parameters
        self.context_len, self.check_error = model.context_len, model.validation_error
        num_pages = pool_pages(config, model.shapes, model.context_len)
        self._cache = KVCache(
            model.shapes,
            num_pages,
            config.page_size,
            model.backends,
            keeps_pages=config.prefix_cache,
        )
        _log.info(
            "%s: the KV cache takes up to %.0f MB for %d tokens; num_pages changes that",
            config.model,
            self._cache.num_bytes / 1e6,
            num_pages * config.page_size,
        )
        _log.info("%s", self.describe_sampling())
        graphs = self._graphs(model.shapes) if config.cuda_graphs else None
        self._runner = ModelRunner(model.forward, self._cache, model.windows, graphs)
        self._scheduler = Scheduler(self._cache, config.max_num_batched_tokens)
        self._handles: dict[Session, Handle] = {}
        self._submitted: deque[Session] = deque()
        self._has_messages = False
        self._wake = threading.Condition()
        self._closed = False
        self._recorder = Recorder()
        self._thread = threading.Thread(target=self._run, name="hogwild-engine", daemon=True)
        self._working: threading.Thread | None = None
        self._thread.start()
        atexit.register(_close_if_alive, weakref.ref(self))

    def _graphs(self, shapes: Sequence[LayerShape]) -> DecodeGraphs:
        devices = {str(shape.device) for shape in shapes}
        fits = len(devices) == 1 and shapes[0].device.type == "cuda"
        require(fits, "cuda_graphs", "a CUDA device that holds all layers", sorted(devices))
        return DecodeGraphs(shapes[0].device, CudaCapture())

    @property
    def closed(self) -> bool:
        """Whether it serves no more requests, because of `close` or in a forked process."""
        return self._closed or not self._origin.is_here

    @property
    def thinking(self) -> bool:
        """Whether the chat template has a thinking section before the answer."""
        return self.chat.thinking

    @property
    def max_tokens(self) -> int:
        """Most tokens that a prompt and its answer may hold, by the context and the page pool."""
        return min(self.context_len, self._cache.pool.num_pages * self.config.page_size)

    def count_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """Return the number of tokens of the rendered chat template.

        Raises:
            NoChatTemplateError: the tokenizer has no chat template.
            RequestError: the template refuses the messages.
            EngineClosedError: the engine belongs to another process.
        """
        self._origin.require_here("engine")
        return len(self.chat.render(messages, tools))

    def submit(self, request: Request) -> Handle:
        """Queue a request. It runs beside those that run already.

        Rendering, grammars and checks happen in the caller's thread.

        Raises:
            EngineClosedError: the engine was closed, or belongs to another process.
            PromptTooLongError: the prompt does not fit the context, or the page pool.
            RequestError: the template refuses the messages, or a tool or grammar is wrong.
            NoChatTemplateError: the model's tokenizer has no chat template.
        """
        self._origin.require_here("engine")
        limits = SessionLimits(self.context_len, self._cache.pool.num_pages, self.config.page_size)
        sampling = ResolvedSampling.resolve(request.sampling, self.default_sampling)
        session = Session(SessionContext(request, self.chat, sampling, self._cache, limits))
        handle = Handle(secrets.token_hex(8), lambda: self._send(session, Cancel()))
        with self._wake:
            if self._closed:
                raise EngineClosedError(
                    "engine: wanted an open one, got a closed one; make a new one"
                )
            self._handles[session] = handle
            self._submitted.append(session)
            self._wake.notify()
        return handle

    def advice(self, request: Request) -> str | None:
        """Return a sentence about a request that this model is too small for, else ``None``.

        Raises:
            ConfigError: the request names no protocol.
        """
        if len(request.workers) == 1:
            return None
        protocol = resolve(request.protocol, thinking=self.chat.thinking)
        return size_advice(self.config.model, self._num_parameters, protocol)

    def describe_sampling(self) -> str:
        """Return one line: how calls sample that say nothing of it, and who states that."""
        return describe_sampling(self.default_sampling, self._sampling_source)

    def stats(self) -> EngineStats:
        """Return the engine's numbers of this moment."""
        pool, scheduler = self._cache.pool, self._scheduler
        return EngineStats(
            **self._recorder.totals(),
            num_pages=pool.num_pages,
            free_pages=pool.num_free,
            page_size=pool.page_size,
            cache_bytes=self._cache.num_bytes,
            sessions=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )

    def close(self) -> None:
        """End all sessions with `EngineClosedError`, stop the thread, and free the memory of the
        model and the KV cache. Safe to call again.

        In a forked process it does nothing.
        """
        if not self._origin.is_here:
            return
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() not in (self._thread, self._working):
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The engine's threads: one that waits, and while there is work another one

    def _send(self, session: Session, message: Cancel) -> None:
        if not self._origin.is_here:
            return
        with self._wake:
            session.send(message)
            self._has_messages = True
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                run_in_fresh_thread(self._work)  # OpenMP's workers end with that thread
        finally:
            with self._wake:
                self._closed = True
            for session in list(self._handles):
                self._end(session, EngineClosedError("the engine was closed; make a new one"))
            self._free()

    def _free(self) -> None:
        """Drop the model and the cache, and return their memory to the system."""
        self._cache.release()
        del self._runner
        return_freed_memory()

    def _wait(self) -> bool:
        """Sleep until there is something to do. ``False`` once closed."""
        with self._wake:
            while not (self._closed or self._submitted or self._has_messages):
                self._wake.wait()
        self._recorder.wake()
        return not self._closed

    def _work(self) -> None:
        """Make steps until there is nothing to do for a while."""
        self._working = threading.current_thread()
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        while self._receive():
            try:
                for session in self._scheduler.admit():
                    self._begin(session)
                self._step()
            except Exception as error:  # a fault of no session that is known
                scheduler = self._scheduler
                for session in list(scheduler.running) or list(scheduler.waiting)[:1]:
                    self._fail(session, error)

    def _receive(self) -> bool:
        """Take in new sessions, and let all read their inboxes.

        Returns:
            ``False`` once closed, or after `LINGER_S` without work.
        """
        with self._wake:
            idle = not (self._closed or self._submitted or self._has_messages)
            if idle and not self._scheduler.has_work:
                self._wake.wait(LINGER_S)
                self._recorder.wake()
            submitted, has_messages = list(self._submitted), self._has_messages
            self._submitted.clear()
            self._has_messages = False
        for session in submitted:
            if session in self._handles:  # else it was cancelled before it was seen here
                self._scheduler.add(session)
        for session in list(self._handles) if has_messages else ():
            try:
                session.read_inbox()
            except Exception as error:
                self._fail(session, error)
        return self._scheduler.has_work and not self._closed

    def _begin(self, session: Session) -> None:
        try:
            session.begin()
            self._hand_over(session, session.drain_events())
        except Exception as error:
            self._fail(session, error)

    def _step(self) -> None:
        """Make one step: schedule, forward, sample, postprocess.

        A fault of one session, in any part but the forward, ends that session alone.
        """
        scheduled = self._scheduler.schedule()
        for session, error in self._scheduler.take_faults():
            self._fail(session, error)
        batch, scheduled = self._build_batch(scheduled)
        if not scheduled:
            return
        try:
            logits = self._runner.run(batch)
        except Exception as error:
            for step in scheduled:
                self._fail(step.session, error)
            return
        self._recorder.add_step(len(batch.tokens), self._runner.forward_s)
        for session, tokens in self._sample(logits, scheduled):
            try:
                if any(isnan(token.probability) for token in tokens):
                    session.forget_prefix()  # what it has stored may be wrong
                    raise FloatingPointError(
                        "the model's logits are not finite; try dtype='float32'"
                    )
                self._hand_over(session, session.postprocess(tokens))
            except Exception as error:
                self._fail(session, error)

    def _sample(
        self, logits: torch.Tensor, scheduled: Sequence[ScheduledStep]
    ) -> list[tuple[Session, list[SampledToken]]]:
        """Return the tokens of each session, without sessions whose rows cannot be sampled."""
        counts = [len(step.rows) for step in scheduled]
        try:
            rows = [row for step in scheduled for row in step.rows]
            sampled = iter(sample(logits, rows) if rows else [])
            return [
                (step.session, list(islice(sampled, count)))
                for step, count in zip(scheduled, counts, strict=True)
            ]
        except Exception as error:
            if len(scheduled) == 1:
                self._fail(scheduled[0].session, error)
                return []
            parts = zip(logits.split(counts), scheduled, strict=True)
            return [pair for part, step in parts for pair in self._sample(part, [step])]

    def _build_batch(self, scheduled: list[ScheduledStep]) -> tuple[Batch, list[ScheduledStep]]:
        """Return the batch of the step, without sessions whose part cannot be built."""
        try:
            return build_batch([step.chunks for step in scheduled]), scheduled
        except Exception:
            sound = []
            for step in scheduled:
                try:
                    build_batch([step.chunks])
                    sound.append(step)
                except Exception as error:
                    self._fail(step.session, error)
            return build_batch([step.chunks for step in sound]), sound

    def _hand_over(self, session: Session, events: list[Event]) -> None:
        if not events:
            return
        handle = self._handles[session]
        if finished := session.finished:
            self._recorder.add_session(finished.usage)
            self._scheduler.remove(session)
            del self._handles[session]
        handle.push(events)

    def _fail(self, session: Session, cause: Exception) -> None:
        if isinstance(cause, HogwildError):
            self._end(session, cause)
            return
        description = f"{type(cause).__name__}: {cause}"
        error = SessionFailedError(f"the engine failed while it served the session: {description}")
        error.__cause__ = cause
        self._end(session, error)

    def _end(self, session: Session, error: HogwildError) -> None:
        handle = self._handles.pop(session, None)
        try:
            self._scheduler.remove(session)
        finally:
            if handle is not None:  # else its end was told already
                handle.push([Failed(error)])


def _close_if_alive(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
