"""`Engine`: one thread owns the model; callers submit requests from any thread and read events."""

from __future__ import annotations

import atexit
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import psutil
import torch

from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import (
    EngineClosedError,
    HogwildError,
    SessionFailedError,
    require,
)
from hogwild_engine.api.events import Event, Failed
from hogwild_engine.api.request import Request
from hogwild_engine.cache.kv_cache import KVCache, LayerShape
from hogwild_engine.fresh_thread import run_in_fresh_thread
from hogwild_engine.handle import Handle
from hogwild_engine.loading.load import load_model
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.scheduler import Scheduler
from hogwild_engine.sessions.budget import SessionLimits
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.session import Cancel, Session
from hogwild_engine.stats import EngineStats, Recorder
from hogwild_engine.step.batch import build_batch
from hogwild_engine.step.cuda_graphs import CudaCapture, DecodeGraphs
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_engine.step.sampling import ResolvedSampling, sample

LINGER_S = 0.3
"""Seconds that an idle engine keeps its OpenMP workers. They slow other computation in the process,
and new ones cost the next request some ten milliseconds.
"""

MAX_CONTEXTS = 64
"""The pool holds at most this many full contexts unless ``num_pages`` says otherwise."""


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
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model = run_in_fresh_thread(lambda: load_model(config, loaded))
        self.tokenizer, self.chat = model.tokenizer, model.chat
        self.default_sampling = model.default_sampling
        self.context_len, self.check_error = model.context_len, model.validation_error
        num_pages = self._pages(model.shapes, model.device)
        self._cache = KVCache(
            model.shapes,
            num_pages,
            config.page_size,
            model.backends,
            keeps_pages=config.prefix_cache,
        )
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

    def _pages(self, shapes: Sequence[LayerShape], device: torch.device) -> int:
        if self.config.num_pages is not None:
            return self.config.num_pages
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = psutil.virtual_memory().available
        page_bytes = self.config.page_size * sum(shape.bytes_per_token for shape in shapes)
        affordable = int(free * self.config.memory_fraction) // page_bytes
        useful = MAX_CONTEXTS * -(-self.context_len // self.config.page_size)
        return max(1, min(affordable, useful))

    @property
    def closed(self) -> bool:
        return self._closed

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
        """
        return len(self.chat.render(messages, tools))

    def submit(self, request: Request) -> Handle:
        """Queue a request. It runs beside those that run already.

        Rendering, grammars and checks happen in the caller's thread.

        Raises:
            EngineClosedError: the engine was closed.
            PromptTooLongError: the prompt does not fit the context, or the page pool.
            RequestError: the template refuses the messages, or a tool or grammar is wrong.
            NoChatTemplateError: the model's tokenizer has no chat template.
        """
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

    def stats(self) -> EngineStats:
        """Return the engine's numbers of this moment."""
        pool, scheduler = self._cache.pool, self._scheduler
        return EngineStats(
            **self._recorder.totals(),
            num_pages=pool.num_pages,
            free_pages=pool.num_free,
            page_size=pool.page_size,
            cache_bytes=pool.num_pages * pool.page_size * self._cache.bytes_per_token,
            sessions=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )

    def close(self) -> None:
        """End all sessions with `EngineClosedError` and stop the thread. Safe to call again."""
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
            except Exception as error:  # an engine fault must not leave readers waiting
                for session in list(self._handles):
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
            if session in self._handles:  # else it failed with all others before it was seen here
                self._scheduler.add(session)
        for session in list(self._handles) if has_messages else ():
            try:
                session.read_inbox()
            except HogwildError as error:
                self._end(session, error)
        return self._scheduler.has_work and not self._closed

    def _begin(self, session: Session) -> None:
        try:
            session.begin()
        except Exception as error:
            self._fail(session, error)
        else:
            self._hand_over(session, session.drain_events())

    def _step(self) -> None:
        """Make one step: schedule, forward, sample, postprocess."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            assert not self._scheduler.running, "a session runs but has no pending token"
            return
        try:
            batch = build_batch([step.chunks for step in scheduled])
            logits = self._runner.run(batch)
            rows = [row for step in scheduled for row in step.rows]
            sampled = iter(sample(logits, rows) if rows else [])
        except Exception as error:
            for step in scheduled:
                self._fail(step.session, error)
            return
        self._recorder.add_step(len(batch.tokens), self._runner.forward_s)
        for session, _, rows in scheduled:
            tokens = list(islice(sampled, len(rows)))
            try:
                events = session.postprocess(tokens)
            except Exception as error:
                self._fail(session, error)
            else:
                self._hand_over(session, events)

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
        self._scheduler.remove(session)
        self._handles.pop(session).push([Failed(error)])


def _close_if_alive(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
