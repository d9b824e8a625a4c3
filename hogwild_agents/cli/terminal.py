"""Run one session, or a benchmark, at the command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, track
from rich.text import Text

from hogwild_agents.cli.live_view import LiveView
from hogwild_agents.cli.view import JsonView, PlainView, View

if TYPE_CHECKING:
    from hogwild_agents.bench.systems import BenchConfig, Reading
    from hogwild_engine.api.config import EngineConfig
    from hogwild_engine.api.request import Request
    from hogwild_engine.engine import Engine

Shown = Literal["answer", "workers"]

# The libraries read these when they are imported.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def silence_libraries() -> None:
    """Silence libraries' warnings and progress bars. Call this before they are imported."""
    warnings.simplefilter("ignore")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM, so that the terminal is restored."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def load(config: EngineConfig) -> Engine:
    """Load an engine; on a terminal, a spinner names what it does, and a line the cache's size."""
    with _loading(config.model):
        from hogwild_engine.engine import Engine

        engine = Engine(config)
    if sys.stderr.isatty():
        cache = f"The KV cache takes up to {engine.stats().cache_mb:,.0f} MB"
        Console(stderr=True).print(cache, engine.describe_sampling(), style="dim", sep="; ")
    return engine


class _PhaseHandler(logging.Handler):
    """Takes what the loader says it does."""

    def __init__(self, show_phase: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show_phase = show_phase

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._show_phase(record.getMessage())


@contextmanager
def _loading(model: str) -> Iterator[None]:
    log = logging.getLogger("hogwild_engine.loading")
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    disable, console = not sys.stderr.isatty(), Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=disable) as spinner:
        task = spinner.add_task(f"Loading {model}", total=None)

        def show_phase(phase: str) -> None:
            spinner.update(task, description=f"Loading {model}: {phase}")

        handler, level = _PhaseHandler(show_phase), log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.setLevel(level)
            log.removeHandler(handler)


def show(
    engine: Engine, request: Request, *, as_json: bool = False, shown: Shown | None = None
) -> None:
    """Answer the request and print its events. An exception cancels the session.

    Args:
        engine: answers it.
        request: what to do.
        as_json: print every event.
        shown: "answer", or "workers" too, on standard error. ``None``: a live view on a terminal,
            else the answer.
    """
    if (advice := engine.advice(request)) and sys.stderr.isatty():
        Console(stderr=True).print(f"Note: {advice}", style="yellow", markup=False)
    handle = engine.submit(request)
    try:
        with _view(request, as_json=as_json, shown=shown) as view:
            for event in handle:
                view.show(event)
    finally:
        handle.cancel()


def bench(config: BenchConfig, *, as_json: bool = False) -> None:
    """Measure, then print tables or one JSON object, also of what there is after Ctrl-C."""
    from hogwild_agents.bench.systems import loaded, rounds

    readings: list[Reading] = []
    with ExitStack() as stack:
        with _progress(f"Loading {config.model}"):
            models = stack.enter_context(loaded(config))
        runs = config.repeats * len(config.settings) * len(models.systems)
        try:
            for reading in _tracked(rounds(config, models.systems, models.engine), runs):
                readings.append(reading)
        finally:
            _print_bench(config, models.machine, readings, as_json=as_json)


def _tracked(readings: Iterator[Reading], runs: int) -> Iterator[Reading]:
    yield from track(
        readings,
        "Measuring",
        runs,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=1,  # drawing would slow what is measured
        disable=not sys.stderr.isatty(),
    )


def _print_bench(
    config: BenchConfig, machine: dict[str, Any], readings: list[Reading], *, as_json: bool
) -> None:
    from hogwild_agents.bench.figures import figures_of, report_of
    from hogwild_agents.bench.table import tables_of

    if as_json:
        print(json.dumps(report_of(config, machine, readings), indent=2))
        return
    for table in tables_of(figures_of(readings)):
        Console(highlight=False).print(table, end="\n\n")


def _progress(text: str) -> AbstractContextManager[Any]:
    console = Console(stderr=True)
    return console.status(Text(text)) if sys.stderr.isatty() else nullcontext()


def _view(request: Request, *, as_json: bool, shown: Shown | None) -> View:
    if as_json:
        return JsonView(sys.stdout)
    console = Console(highlight=False)
    if shown is None and sys.stdout.isatty() and console.is_interactive:
        return LiveView(console, [worker.name for worker in request.workers])
    return PlainView(sys.stdout, sys.stderr if shown == "workers" else None)
