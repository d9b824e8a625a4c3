"""One engine for each configuration, loaded once, also when two threads ask at the same time."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from hogwild_agents.langchain.engines import EngineRegistry
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.errors import ModelError


class Loader:
    """Counts loads; what it makes can be closed and nothing else."""

    def __init__(self, *, failures: int = 0) -> None:
        self.failures = failures
        self.loaded: list[Any] = []
        self.may_load = threading.Event()

    def __call__(self, config: EngineConfig) -> Any:
        self.may_load.wait(10)
        if self.failures:
            self.failures -= 1
            raise ModelError("cannot be loaded")
        self.loaded.append(Closable())
        return self.loaded[-1]


class Closable:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loader() -> Loader:
    loader = Loader()
    loader.may_load.set()
    return loader


def test_concurrent_first_use_loads_once() -> None:
    loader = Loader()
    registry = EngineRegistry(loader)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(registry.get, EngineConfig()) for _ in range(8)]
        loader.may_load.set()
        assert len({id(future.result(10)) for future in asked}) == 1
    assert len(loader.loaded) == 1


def test_configurations_that_differ_have_engines_of_their_own(loader: Loader) -> None:
    registry = EngineRegistry(loader)
    first, second = registry.get(EngineConfig()), registry.get(EngineConfig(dtype="float32"))
    assert first is not second
    assert registry.get(EngineConfig()) is first


def test_a_closed_engine_is_replaced(loader: Loader) -> None:
    registry = EngineRegistry(loader)
    first = registry.get(EngineConfig())
    first.close()
    assert registry.get(EngineConfig()) is not first


async def test_a_failed_load_reaches_every_waiter_and_is_tried_again() -> None:
    loader = Loader(failures=1)
    registry = EngineRegistry(loader)
    asked = [asyncio.create_task(registry.aget(EngineConfig())) for _ in range(2)]
    await asyncio.sleep(0)
    loader.may_load.set()
    failed = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in failed] == [ModelError, ModelError]
    assert registry.get(EngineConfig()) is loader.loaded[0]


def test_closing_the_registry_closes_its_engines(loader: Loader) -> None:
    registry = EngineRegistry(loader)
    engine = registry.get(EngineConfig())
    registry.close()
    assert cast(Closable, engine).closed


async def test_a_load_leaves_the_event_loop_free_and_outlives_a_cancelled_waiter() -> None:
    loader = Loader()
    registry = EngineRegistry(loader)
    impatient = asyncio.create_task(registry.aget(EngineConfig()))
    patient = asyncio.create_task(registry.aget(EngineConfig()))
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    loader.may_load.set()
    assert await patient is loader.loaded[0]
