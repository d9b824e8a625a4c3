"""Work in a thread that ends with it.

OpenMP keeps helpers for every thread that computed. Where these are more than the cores, all of
them sleep between two operations, and waking them costs a decoding step a quarter of its time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_fresh_thread(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread of its own and wait for it; its result or error comes back."""
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
