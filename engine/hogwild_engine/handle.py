"""A caller's end of a session: events across threads, blocking or asynchronous, and cancel."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from time import monotonic

from hogwild_engine.api.events import Event, Failed, Finished


class Handle:
    """Reads one session's events. A slow reader never delays the engine: events queue here.

    Args:
        id: names the session.
        cancel: tells the engine to end it.
    """

    def __init__(self, id: str, cancel: Callable[[], None]) -> None:
        self.id = id
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None

    def cancel(self) -> None:
        """End the session within one step; its pages are free then. Its reader gets
        `SessionCancelledError`.

        May be called from any thread, again, and after the end.
        """
        self._cancel()

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, the last one `Finished`.

        Raises:
            HogwildError: the session failed or was cancelled.
        """
        while True:
            event = self._next(None)
            yield _checked(event)
            if isinstance(event, Finished):
                return

    def result(self, timeout_s: float | None = None) -> Finished:
        """Read on to the end.

        Args:
            timeout_s: seconds to wait; the session runs on when they are over.

        Raises:
            TimeoutError: the time is over.
            HogwildError: the session failed or was cancelled.
        """
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            event = _checked(self._next(deadline))
            if isinstance(event, Finished):
                return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        """As `__iter__`, without blocking the running event loop."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self._cancel()

        self._wake = wake
        try:
            while True:
                changed.clear()
                while self._events:
                    event = self._take()
                    yield _checked(event)
                    if isinstance(event, Finished):
                        return
                await changed.wait()
        finally:
            self._wake = None

    def push(self, events: Iterable[Event]) -> None:
        """The engine's end: hand events over."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()
        if wake := self._wake:
            wake()

    def _next(self, deadline: float | None) -> Event:
        with self._changed:
            while not self._events:
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"session {self.id} is not finished yet")
                self._changed.wait(left)
            return self._take()

    def _take(self) -> Event:
        """The next event; the last one stays, for whoever reads again."""
        event = self._events[0]
        if not isinstance(event, Finished | Failed):
            self._events.popleft()
        return event


def _checked(event: Event) -> Event:
    if isinstance(event, Failed):
        raise event.error
    return event
