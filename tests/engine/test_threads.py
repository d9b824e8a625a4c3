"""Work in a thread of its own comes back with its result, or its error."""

from __future__ import annotations

import threading

import pytest

from hogwild_engine.threads import run_in_fresh_thread
from traffic import wait_until


def test_the_result_comes_from_another_thread_that_has_ended() -> None:
    before = threading.enumerate()
    assert run_in_fresh_thread(threading.get_ident) != threading.get_ident()
    wait_until(lambda: threading.enumerate() == before)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_is_raised_where_the_work_was_asked_for(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("no")

    with pytest.raises(kind, match="no"):
        run_in_fresh_thread(fail)
