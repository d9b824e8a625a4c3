"""Make docs/live_view.svg, the picture of the live view in the README, from a real session.

    python recipes/live_view_svg.py

Two workers of the embedded model write the functions of ``hogwild demo``. The picture is what the
terminal shows when both workers are in the middle of their second function.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hogwild_agents.cli.demo import CONFIG, REQUEST, TASK
from hogwild_agents.cli.live_view import COLORS, Frame
from hogwild_agents.cli.session_state import SessionState
from hogwild_agents.cli.terminal import silence_libraries
from hogwild_agents.cli.view import titled
from hogwild_engine.api.events import Paragraph, ParagraphFinished

OUT = Path(__file__).resolve().parent.parent / "docs" / "live_view.svg"
WORKERS = [worker.name for worker in REQUEST.workers]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="where the picture goes")
    options = parser.parse_args(argv)
    silence_libraries()
    state, history = run_until(both_write_their_second_function)
    options.out.write_text(picture(state, history), encoding="utf-8")
    print(f"wrote {options.out.name}")
    return 0


def both_write_their_second_function(state: SessionState) -> bool:
    return all(w.number == 2 and "return" in w.shown for w in state.workers.values())


def run_until(reached: Callable[[SessionState], bool]) -> tuple[SessionState, list[Paragraph]]:
    """Run the session until ``reached(state)``; return its state and its finished paragraphs."""
    from hogwild_engine.engine import Engine

    state, history = SessionState(WORKERS), list[Paragraph]()
    with Engine(CONFIG) as engine:
        for event in engine.submit(REQUEST):
            state.apply(event)
            if isinstance(event, ParagraphFinished):
                history.append(event.paragraph)
            if reached(state):
                return state, history
    raise SystemExit("the workers were never there at once: try another seed in cli/demo.py")


def picture(state: SessionState, history: Sequence[Paragraph]) -> str:
    """Draw finished paragraphs and one frame of the live view as SVG."""
    console = Console(
        record=True, width=80, height=24, file=io.StringIO(), color_system="truecolor"
    )
    console.print(Text(f"Task: {TASK}"), "", sep="\n")
    for paragraph in history:
        title, text = titled(paragraph)
        style = f"bold {COLORS[WORKERS.index(paragraph.worker)]}"
        console.print(Text.assemble((title, style), text), "", sep="\n")
    console.print(Frame(state))
    svg = console.export_svg(title="hogwild demo", unique_id="hogwild")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # load no font from the web


if __name__ == "__main__":
    sys.exit(main())
