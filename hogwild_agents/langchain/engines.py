"""The engines of this process: one per configuration, loaded once, closed at exit."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hogwild_engine.api.config import EngineConfig

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine


class EngineRegistry:
    """Loads engines on first use. Safe to use from any thread and any event loop.

    A load that failed is tried again by the next caller; a closed engine is replaced.

    Args:
        load: makes an engine; may block.
    """

    def __init__(self, load: Callable[[EngineConfig], Engine]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._engines: dict[EngineConfig, Future[Engine]] = {}

    def get(self, config: EngineConfig) -> Engine:
        """Return the engine for ``config``; wait for it to load."""
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

    def _future(self, config: EngineConfig) -> Future[Engine]:
        with self._lock:
            future = self._engines.get(config)
            if future is None or _is_spent(future):
                future = self._engines[config] = Future()
                # A caller that is cancelled must not cancel the load for the others.
                future.set_running_or_notify_cancel()
                threading.Thread(
                    target=self._fill, args=(future, config), name="hogwild-load", daemon=True
                ).start()
            return future

    def _fill(self, future: Future[Engine], config: EngineConfig) -> None:
        try:
            engine = self._load(config)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(engine)


def _is_spent(future: Future[Engine]) -> bool:
    return future.done() and (future.exception() is not None or future.result().closed)


def _load(config: EngineConfig) -> Engine:
    from hogwild_engine.engine import Engine

    return Engine(config)


REGISTRY = EngineRegistry(_load)
atexit.register(REGISTRY.close)
