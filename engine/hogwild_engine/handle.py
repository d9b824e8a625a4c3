"""A caller's end of a session: read its events from any thread or event loop, and cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from time import monotonic

from hogwild_engine.api.events import Event, Failed, Finished
from hogwild_engine.origin import Origin


class Handle:
    """Reads one session's events. Events queue here, so a slow reader never delays the engine.

    Args:
        id: identifies the session.
        cancel: asks the engine to end it.
    """

    def __init__(self, id: str, cancel: Callable[[], None]) -> None:
        self.id = id
        self._cancel = cancel
        self._origin = Origin()
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
        """Yield events as they come, the last one `Finished`.

        Raises:
            HogwildError: the session failed or was cancelled, or belongs to another process.
        """
        while True:
            event = self._next(None)
            yield _checked(event)
            if isinstance(event, Finished):
                return

    def result(self, timeout_s: float | None = None) -> Finished:
        """Read all remaining events and return the last one.

        Args:
            timeout_s: seconds to wait; ``None`` waits without a limit. The session runs on after
                a timeout.

        Raises:
            TimeoutError: the session is not finished in time.
            HogwildError: the session failed or was cancelled, or belongs to another process.
        """
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            event = _checked(self._next(deadline))
            if isinstance(event, Finished):
                return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events as `__iter__` does, without blocking the running event loop."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the loop is closed, and its reader with it
                self._cancel()

        self._wake = wake
        try:
            while True:
                self._origin.require_here("session")
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
        """Add events; called by the engine."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()
        if wake := self._wake:
            wake()

    def _next(self, deadline: float | None) -> Event:
        self._origin.require_here("session")
        with self._changed:
            while not self._events:
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"session {self.id} is not finished yet")
                self._changed.wait(left)
            return self._take()

    def _take(self) -> Event:
        """Return the next event. The last one stays, so that it can be read again."""
        event = self._events[0]
        if not isinstance(event, Finished | Failed):
            self._events.popleft()
        return event


def _checked(event: Event) -> Event:
    if isinstance(event, Failed):
        raise event.error
    return event
