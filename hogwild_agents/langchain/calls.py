"""One call to an engine: submit the request, read its events, and free the session in any case."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from hogwild_agents.langchain import engines
from hogwild_agents.langchain.errors import ModelTimeoutError, translated
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import SessionCancelledError
from hogwild_engine.api.events import Event
from hogwild_engine.api.request import Request

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine, Handle

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A request and the engine that serves it.

    Args:
        config: the engine.
        request: the task.
        timeout_s: seconds from submission to the end; loading the engine does not count.
        include_raw: return an answer even if it does not fit its schema.
    """

    config: EngineConfig
    request: Request
    timeout_s: float | None = None
    include_raw: bool = False


def events(call: Call) -> Generator[Event]:
    """Run the call and yield its events. Closing the iterator cancels the session.

    Raises:
        HogwildError: a class of `hogwild_agents.langchain.errors`.
    """
    with translated():
        engine = engines.REGISTRY.get(call.config)
        _advise(engine, call.request)
        handle = engine.submit(call.request)
        with _served(handle, call.timeout_s, _start_timer):
            yield from handle


async def aevents(call: Call) -> AsyncGenerator[Event]:
    """Do as `events` without blocking the event loop, not even to load the model.

    Raises:
        HogwildError: a class of `hogwild_agents.langchain.errors`.
    """
    with translated():
        engine = await engines.REGISTRY.aget(call.config)
        _advise(engine, call.request)
        handle = await _submit(engine, call.request)
        with _served(handle, call.timeout_s, asyncio.get_running_loop().call_later):
            async for event in handle:
                yield event


def _advise(engine: Engine, request: Request) -> None:
    """Log once that the model is too small for what the request asks, if it is."""
    if advice := engine.advice(request):
        _warn_once(advice)


@cache
def _warn_once(advice: str) -> None:
    _log.warning(advice)


async def _submit(engine: Engine, request: Request) -> Handle:
    submitted = asyncio.get_running_loop().run_in_executor(None, engine.submit, request)
    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:
        submitted.add_done_callback(_cancel_session)
        raise


def _cancel_session(submitted: asyncio.Future[Handle]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()


class _Timer(Protocol):
    def cancel(self) -> None: ...


def _start_timer(delay_s: float, act: Callable[[], None]) -> _Timer:
    timer = threading.Timer(delay_s, act)
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def _served(
    handle: Handle,
    timeout_s: float | None,
    later: Callable[[float, Callable[[], None]], _Timer],
) -> Iterator[None]:
    """Cancel the session at the end of the block, and when its time is up."""
    late = threading.Event()

    def expire() -> None:
        late.set()
        handle.cancel()

    timer = None if timeout_s is None else later(timeout_s, expire)
    try:
        yield
    except SessionCancelledError as error:
        if not late.is_set():
            raise
        problem = f"timeout: wanted an answer within {timeout_s} s, and it is not finished; "
        todo = "allow more time, or lower max_steps or max_tokens"
        raise ModelTimeoutError(problem + todo) from error
    finally:
        if timer is not None:
            timer.cancel()
        handle.cancel()
