"""Run a function in a thread of its own, so that its OpenMP workers end with it.

OpenMP keeps a team of workers for every thread that has computed anything. If all teams together
are larger than the machine, workers sleep between two operations, and waking them costs a decoding
step a quarter of its time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_fresh_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a new thread, wait for it, and return its result or raise its error."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="hogwild-fresh-thread", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
