"""The view of a session in a terminal: workers side by side, what is finished above them.

Finished paragraphs scroll up as ordinary output; only open ones, the answer and the speed are
drawn anew. What the model writes is never read as markup.
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

from hogwild_agents.cli.board import Board, Desk
from hogwild_agents.cli.view import announced, printable, summary
from hogwild_engine.api.events import Event, Finished, Paragraph, ParagraphFinished

COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
MIN_COLUMN_WIDTH = 26
MAX_TEXT_LINES = 8
BORDER_LINES = 2
FRAMES_PER_SECOND = 8


@dataclass(frozen=True, slots=True)
class Tail:
    """The last ``num_lines`` lines of a text, wrapped at the width that it is given."""

    text: str
    num_lines: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(printable(self.text).strip())
        lines = text.wrap(console, options.max_width, overflow="fold", tab_size=4)
        yield Text("\n").join(lines[-self.num_lines :])


@dataclass(frozen=True, slots=True)
class Frame:
    """A board drawn into the room that the terminal has."""

    board: Board

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(console.height - 2, 1)
        # A third of a tall terminal.
        most = max(height // 3, MAX_TEXT_LINES)
        if self.board.answer or len(self.board.desks) == 1:
            num_lines = max(min(height - BORDER_LINES, most), 1)
            thinks = bool(self.board.thought) and not self.board.answer
            title, text = (
                ("thoughts", self.board.thought) if thinks else ("answer", self.board.answer)
            )
            yield _panel(Text(title), text, "white", num_lines)
        else:
            yield _desks(self.board.desks, options.max_width, height, most)
        yield Text(self.board.speed(), style="dim", no_wrap=True, overflow="ellipsis")


def _desks(desks: dict[str, Desk], width: int, height: int, most: int) -> RenderableType:
    """Panels in as many rows as the width asks for, or one line a worker where these do not fit."""
    per_row = min(max(width // MIN_COLUMN_WIDTH, 1), len(desks))
    num_rows = math.ceil(len(desks) / per_row)
    num_lines = min(height // num_rows - BORDER_LINES, most)
    if num_lines < 1:
        return _one_line_each(desks, height)
    panels = [
        _panel(_title(name, desk), desk.text, _color(desks, name), num_lines)
        for name, desk in desks.items()
    ]
    grid = Table.grid(expand=True)
    for _ in range(per_row):
        grid.add_column(ratio=1)
    for start in range(0, len(panels), per_row):
        grid.add_row(*panels[start : start + per_row])
    return grid


def _one_line_each(desks: dict[str, Desk], height: int) -> RenderableType:
    shown = list(desks.items())
    if len(shown) > height:
        shown = shown[: height - 1]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for name, desk in shown:
        grid.add_row(
            Text.assemble(_title(name, desk), style=_color(desks, name)), Tail(desk.text, 1)
        )
    if len(shown) < len(desks):
        grid.add_row(Text(f"and {len(desks) - len(shown)} more", style="dim"))
    return grid


def _panel(title: Text, text: str, color: str, num_lines: int) -> Panel:
    return Panel(
        Tail(text, num_lines),
        title=title,
        title_align="left",
        border_style=color,
        height=num_lines + BORDER_LINES,
    )


def _title(name: str, desk: Desk) -> Text:
    return Text(f"{name}: {desk.end}" if desk.end else f"{name} [{desk.number}]")


def _color(desks: dict[str, Desk], name: str) -> str:
    return "dim" if desks[name].end else COLORS[list(desks).index(name) % len(COLORS)]


class LiveView:
    """Draws a session while it runs; the answer and the summary stay below what has scrolled up.

    Args:
        console: where to; it must be a terminal.
        workers: their names.
        clock: seconds; a test's own.
    """

    def __init__(
        self,
        console: Console,
        workers: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._board = Board(workers, clock)
        self._live = Live(
            Frame(self._board),
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
        """What was not finished when the user stopped it, which the live screen took along."""
        for name, desk in self._board.desks.items():
            if text := desk.text.strip():
                self._print_paragraph(Paragraph(name, desk.number, text, complete=False))
        if answer := self._board.answer.strip():
            self._console.print(Text(printable(answer)), "", sep="\n")
        self._console.print(Text(f"interrupted after {self._board.steps} steps", style="dim"))

    def show(self, event: Event) -> None:
        self._board.apply(event)
        match event:
            case ParagraphFinished(paragraph=paragraph):
                self._print_paragraph(paragraph)
            case Finished():
                self._live.stop()
                self._print_end(event)

    def _print_paragraph(self, paragraph: Paragraph) -> None:
        color = _color(self._board.desks, paragraph.worker)
        title, text = announced(paragraph)
        self._console.print(Text.assemble((title, f"bold {color}"), text), "", sep="\n")

    def _print_end(self, finished: Finished) -> None:
        if thought := finished.thought.strip():
            self._console.print(Text("Thoughts:", style="bold"))
            self._console.print(Text(printable(thought)), "", sep="\n")
        if len(self._board.desks) > 1 or thought:
            self._console.print(Text("Answer:", style="bold"))
        self._console.print(Text(printable(finished.text).strip()), "", sep="\n")
        self._console.print(Text(summary(finished), style="dim"))
