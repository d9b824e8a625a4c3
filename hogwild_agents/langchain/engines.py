"""The engines of this process: one a configuration, loaded once, closed at exit."""

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
    """Loads engines when they are first asked for. Safe to use from any thread and any event loop.

    A load that failed is tried again by the next caller; an engine that was closed is replaced.

    Args:
        load: makes an engine; may block for as long as it needs.
    """

    def __init__(self, load: Callable[[EngineConfig], Engine]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._engines: dict[EngineConfig, Future[Engine]] = {}

    def get(self, config: EngineConfig) -> Engine:
        """The engine for ``config``; waits for it where it is not loaded yet."""
        return self._future(config).result()

    async def aget(self, config: EngineConfig) -> Engine:
        """`get` that leaves the event loop, and its thread pool, free."""
        return await asyncio.wrap_future(self._future(config))

    def close(self) -> None:
        """Close every engine that is loaded."""
        with self._lock:
            futures = list(self._engines.values())
            self._engines.clear()
        for future in futures:
            if future.done() and future.exception() is None:
                future.result().close()

    def _future(self, config: EngineConfig) -> Future[Engine]:
        with self._lock:
            future = self._engines.get(config)
            if future is None or _is_spent(future):
                future = self._engines[config] = Future()
                # A waiter that is cancelled must not cancel the load for the others.
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
