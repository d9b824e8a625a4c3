"""The engines of this process: one per configuration, loaded once, closed at exit."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hogwild_agents.langchain.imports import import_engine
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import EngineClosedError
from hogwild_engine.threads import start_thread

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine


class EngineRegistry:
    """Loads engines on first use. Safe to use from any thread, any event loop and forked processes.

    A load that failed is tried again by the next caller; a closed engine is replaced.

    Args:
        load: makes an engine; may block.
    """

    def __init__(self, load: Callable[[EngineConfig], Engine]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._engines: dict[EngineConfig, Future[Engine]] = {}
        self._num_loading = 0
        self._forked_while_loading = False

    def get(self, config: EngineConfig) -> Engine:
        """Return the engine for ``config``; wait for it to load.

        Raises:
            EngineClosedError: the process was forked while a model was loading.
            HogwildError: the load failed; see `hogwild_engine.engine.Engine`.
        """
        return self._future(config).result()

    def loaded(self, config: EngineConfig) -> Engine | None:
        """Return the engine for ``config`` if it is loaded already."""
        with self._lock:
            future = self._engines.get(config)
        if future is None or not future.done() or _is_spent(future):
            return None
        return future.result()

    async def aget(self, config: EngineConfig) -> Engine:
        """Do as `get` without blocking the event loop or its thread pool."""
        return await asyncio.wrap_future(self._future(config))

    def close(self) -> None:
        """Close every loaded engine."""
        with self._lock:
            futures = list(self._engines.values())
            self._engines.clear()
        for future in futures:
            if future.done() and future.exception() is None:
                future.result().close()

    def put(self, config: EngineConfig, engine: Engine) -> None:
        """Serve ``config`` by an engine that is loaded already."""
        future: Future[Engine] = Future()
        future.set_result(engine)
        with self._lock:
            self._engines[config] = future

    def start_anew(self) -> None:
        """Forget all engines, in a forked child: their threads are in the parent, and so are the
        threads that hold locks. A load that the fork cut short leaves half-imported modules and
        locked imports behind: no model can be loaded in such a child.
        """
        self._forked_while_loading = self._num_loading > 0
        self._lock = threading.Lock()
        self._engines = {}

    def _future(self, config: EngineConfig) -> Future[Engine]:
        if self._forked_while_loading:
            raise EngineClosedError(
                "engine: wanted a process that loads models, got one that was forked while a model "
                "loaded; fork before or after that, or start processes by 'spawn'"
            )
        with self._lock:
            future = self._engines.get(config)
            if future is None or _is_spent(future):
                future = self._engines[config] = Future()
                # A caller that is cancelled must not cancel the load for the others.
                future.set_running_or_notify_cancel()
                self._num_loading += 1
                start_thread(lambda: self._fill(future, config), "hogwild-load")
            return future

    def _fill(self, future: Future[Engine], config: EngineConfig) -> None:
        try:
            engine = self._load(config)
        except BaseException as error:
            self._end_load()
            future.set_exception(error)
        else:
            self._end_load()
            future.set_result(engine)

    def _end_load(self) -> None:
        with self._lock:
            self._num_loading -= 1


def _is_spent(future: Future[Engine]) -> bool:
    return future.done() and (future.exception() is not None or future.result().closed)


def _load(config: EngineConfig) -> Engine:
    return import_engine()(config)


REGISTRY = EngineRegistry(_load)
atexit.register(REGISTRY.close)
os.register_at_fork(after_in_child=REGISTRY.start_anew)
