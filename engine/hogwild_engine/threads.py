"""Threads of our own: with a stack for C code, stopped before the interpreter ends, and one for
each piece of work, so that its OpenMP workers end with it.

OpenMP keeps a team of workers for every thread that has computed anything. If all teams together
are larger than the machine, workers sleep between two operations, and waking them costs a decoding
step a quarter of its time.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 16 * 2**20
"""Stack of each thread: attention in C needs a third of a megabyte, torch and imports more.
Programs with many threads lower the default (`threading.stack_size`).
"""

STOP_S = 10.0
"""Longest wait for a thread that was told to stop."""

_running: dict[threading.Thread, threading.Event] = {}
"""Threads that work, and the events that are set when they have ended. `threading.Thread.join`
cannot tell: interrupted by Ctrl-C, it takes the thread for ended (CPython up to 3.12).
"""
_starting = threading.Lock()


def start_thread(work: Callable[[], None], name: str) -> threading.Event:
    """Call ``work`` in a new daemon thread; return an event that is set at its end.

    When the interpreter ends, `SystemExit` is raised in ``work``, and the interpreter waits for it:
    a thread that Python kills while it is inside torch aborts the whole process. So ``work`` must
    not wait without end.
    """
    ended = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            _running.pop(thread, None)
            ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _starting:  # the stack's size is a setting of the whole process
        before = threading.stack_size(STACK_BYTES)
        try:
            _running[thread] = ended
            thread.start()
        except BaseException:
            _running.pop(thread, None)
            raise
        finally:
            threading.stack_size(before)
    return ended


def run_in_fresh_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a new thread, wait for it, and return its result or raise its error.

    An exception in the waiting thread, such as `KeyboardInterrupt`, stops the work.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # raised again by the caller's thread
            failed.append(error)

    ended = start_thread(run, "hogwild-fresh-thread")
    try:
        ended.wait()
    except BaseException:
        _stop({thread: event for thread, event in _running.items() if event is ended})
        raise
    if failed:
        raise failed[0]
    return done[0]


def _stop(threads: dict[threading.Thread, threading.Event]) -> None:
    """Raise `SystemExit` in the threads, and wait for them, at most `STOP_S` seconds.

    It is raised at the next Python instruction, and once a second again: libraries catch it.
    """
    deadline = monotonic() + STOP_S
    while threads and monotonic() < deadline:
        for thread in threads:
            _raise_in(thread)
        again = monotonic() + 1
        for ended in threads.values():
            ended.wait(max(0.0, again - monotonic()))
        threads = {thread: ended for thread, ended in threads.items() if not ended.is_set()}


def _raise_in(thread: threading.Thread) -> None:
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread may have held it
    _running.clear()  # a fork copies no other thread


atexit.register(lambda: _stop(dict(_running)))
os.register_at_fork(after_in_child=_after_fork)
