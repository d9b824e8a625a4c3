"""The live view in a terminal: workers side by side, finished paragraphs above them.

Finished paragraphs are printed once and scroll up; open ones, the answer and the speed are redrawn.
The model's text is never interpreted as markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hogwild_agents.cli.session_state import SessionState, WorkerState
from hogwild_agents.cli.view import printable, summary, titled
from hogwild_engine.api.events import Event, Finished, Paragraph, ParagraphFinished

COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
MIN_COLUMN_WIDTH = 26
MAX_TEXT_LINES = 8
BORDER_LINES = 2
FRAMES_PER_SECOND = 8


@dataclass(frozen=True, slots=True)
class Tail:
    """The last ``num_lines`` lines of a text, wrapped at the available width."""

    text: str
    num_lines: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(printable(self.text).strip())
        lines = text.wrap(console, options.max_width, overflow="fold", tab_size=4)
        yield Text("\n").join(lines[-self.num_lines :])


@dataclass(frozen=True, slots=True)
class Frame:
    """A session state, drawn to fit the terminal."""

    state: SessionState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(console.height - 2, 1)
        # A third of a tall terminal.
        most = max(height // 3, MAX_TEXT_LINES)
        if self.state.answer or len(self.state.workers) == 1:
            num_lines = max(min(height - BORDER_LINES, most), 1)
            thinks = bool(self.state.thought) and not self.state.answer
            title, text = (
                ("thoughts", self.state.thought) if thinks else ("answer", self.state.answer)
            )
            yield _panel(Text(title), text, "white", num_lines)
        else:
            yield _columns(self.state.workers, options.max_width, height, most)
        yield Text(self.state.speed(), style="dim", no_wrap=True, overflow="ellipsis")


def _columns(workers: dict[str, WorkerState], width: int, height: int, most: int) -> RenderableType:
    """Return panels in rows that fit the width, or one line per worker if panels do not fit."""
    per_row = min(max(width // MIN_COLUMN_WIDTH, 1), len(workers))
    num_rows = math.ceil(len(workers) / per_row)
    num_lines = min(height // num_rows - BORDER_LINES, most)
    if num_lines < 1:
        return _one_line_each(workers, height)
    panels = [
        _panel(_title(name, worker), worker.shown, _color(workers, name), num_lines)
        for name, worker in workers.items()
    ]
    grid = Table.grid(expand=True)
    for _ in range(per_row):
        grid.add_column(ratio=1)
    for start in range(0, len(panels), per_row):
        grid.add_row(*panels[start : start + per_row])
    return grid


def _one_line_each(workers: dict[str, WorkerState], height: int) -> RenderableType:
    shown = list(workers.items())
    if len(shown) > height:
        shown = shown[: height - 1]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for name, worker in shown:
        grid.add_row(
            Text.assemble(_title(name, worker), style=_color(workers, name)),
            Tail(worker.shown, 1),
        )
    if len(shown) < len(workers):
        grid.add_row(Text(f"and {len(workers) - len(shown)} more", style="dim"))
    return grid


def _panel(title: Text, text: str, color: str, num_lines: int) -> Panel:
    return Panel(
        Tail(text, num_lines),
        title=title,
        title_align="left",
        border_style=color,
        height=num_lines + BORDER_LINES,
    )


def _title(name: str, worker: WorkerState) -> Text:
    return Text(f"{name}: {worker.end}" if worker.end else f"{name} [{worker.number}]")


def _color(workers: dict[str, WorkerState], name: str) -> str:
    return "dim" if workers[name].end else COLORS[list(workers).index(name) % len(COLORS)]


class LiveView:
    """Draws a session while it runs, then prints the answer and a summary.

    Args:
        console: a terminal.
        workers: their names.
        clock: returns seconds.
    """

    def __init__(
        self,
        console: Console,
        workers: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._state = SessionState(workers, clock)
        self._live = Live(
            Frame(self._state),
            console=console,
            refresh_per_second=FRAMES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        try:
            self._live.start(refresh=True)
        except BaseException:  # an interrupt, with the cursor hidden already
            self._live.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()
        if exc and exc[0] is KeyboardInterrupt:
            self._print_open()

    def _print_open(self) -> None:
        """Print what was open when the user stopped the session."""
        for name, worker in self._state.workers.items():
            if text := worker.text.strip():
                self._print_paragraph(Paragraph(name, worker.number, text, complete=False))
        if answer := self._state.answer.strip():
            self._console.print(Text(printable(answer)), "", sep="\n")
        self._console.print(Text(f"interrupted after {self._state.steps} steps", style="dim"))

    def show(self, event: Event) -> None:
        self._state.apply(event)
        match event:
            case ParagraphFinished(paragraph=paragraph):
                self._print_paragraph(paragraph)
            case Finished():
                self._live.stop()
                self._print_end(event)

    def _print_paragraph(self, paragraph: Paragraph) -> None:
        color = _color(self._state.workers, paragraph.worker)
        title, text = titled(paragraph)
        self._console.print(Text.assemble((title, f"bold {color}"), text), "", sep="\n")

    def _print_end(self, finished: Finished) -> None:
        if thought := finished.thought.strip():
            self._console.print(Text("Thoughts:", style="bold"))
            self._console.print(Text(printable(thought)), "", sep="\n")
        joined = "\n\n".join(p.text for p in finished.paragraphs if p.complete)
        if not finished.paragraphs or finished.text != joined:  # else all of it is there already
            if len(self._state.workers) > 1 or thought:
                self._console.print(Text("Answer:", style="bold"))
            self._console.print(Text(printable(finished.text).strip()), "", sep="\n")
        self._console.print(Text(summary(finished), style="dim"))
