"""N workers against N independent sequences of OpenVINO GenAI and llama.cpp, on one GGUF file.

    python recipes/bench_peers.py --sequences 1 4 8
    python recipes/bench_peers.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --dtypes int8

Those that are installed take part: `pip install openvino-genai`, `pip install llama-cpp-python`.
They compute with the file's quantized weights, ours with these weights in the dtypes of `--dtypes`.
Every N is decoded by everybody in turn, with the same prompt length, number of steps and sampling
(temperature 0.6, top-p 0.9), and the turn is repeated; the table shows medians, and ratios taken
within each turn.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from hogwild_engine.api.config import EMBEDDED_MODEL
from hogwild_engine.api.errors import HogwildError
from hogwild_engine.loading.source import locate

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hogwild_agents.bench.engine_system import EngineSystem
from hogwild_agents.bench.figures import Figures, figures_of, key_of, ratio
from hogwild_agents.bench.systems import (
    OURS,
    BenchConfig,
    Loaded,
    Reading,
    System,
    SystemName,
    rounds,
)
from recipes import peer_llama, peer_openvino

OPENVINO, LLAMA = "OpenVINO", "llama.cpp"
PEERS = (OPENVINO, LLAMA)
FILE = "GGUF"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(argv)
    try:
        config = BenchConfig(
            options.model,
            dtypes=tuple(options.dtypes),
            contexts=(options.context,),
            workers=tuple(sorted(set(options.sequences))),
            steps=options.steps,
            repeats=options.repeats,
            threads=options.threads,
        )
        gguf = gguf_of(options.model)
    except (HogwildError, ValueError) as error:
        parser.error(str(error))
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {str(options.json.parent)!r}")

    console = Console(stderr=True)
    for peer in missing():
        console.print(f"{peer} is not installed and takes no part", highlight=False)
    readings: list[Reading] = []
    with loaded(config, gguf) as models:
        turns = config.repeats * len(models.systems)
        measured = rounds(config, models.systems, models.engine)
        try:
            for reading in track(
                measured, "measuring", turns, console=console, refresh_per_second=1
            ):
                readings.append(reading)
        except KeyboardInterrupt:
            console.print(f"stopped: the table shows {len(readings)} of {turns} runs")
    Console().print(table_of(readings))
    if options.json:
        report = {"settings": asdict(config), "machine": models.machine, **report_of(readings)}
        options.json.write_text(json.dumps(report, indent=2))
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED_MODEL, help="a GGUF file (default: the embedded model's)")
    add("--dtypes", nargs="+", default=["bfloat16"], metavar="D", help="ours (default: bfloat16)")
    add("--sequences", type=int, nargs="+", default=[1, 4, 8], metavar="N", help="(default: 1 4 8)")
    add("--context", type=int, default=512, metavar="N", help="prompt tokens (default: 512)")
    add("--steps", type=int, default=32, metavar="N", help="steps measured (default: 32)")
    add("--repeats", type=int, default=3, metavar="N", help="turns of each N (default: 3)")
    add("--threads", type=int, metavar="N", help="CPU threads of each (default: its own choice)")
    add("--json", type=Path, metavar="FILE", help="write figures and readings to FILE")
    return parser


def gguf_of(model: str) -> Path:
    """The GGUF file that `--model` names.

    Raises:
        ValueError: it names something else.
        ModelNotFoundError: there is no such file.
    """
    source = locate(model)
    if source.gguf_file is None:
        raise ValueError(f"--model: wanted a .gguf file, got {model!r}")
    return Path(source.place, source.gguf_file)


def missing() -> list[str]:
    found = {OPENVINO: peer_openvino.is_installed(), LLAMA: peer_llama.is_installed()}
    return [peer for peer in PEERS if not found[peer]]


@contextmanager
def loaded(config: BenchConfig, gguf: Path) -> Iterator[Loaded]:
    """Load our engines and the installed peers; N by N, ours before theirs."""
    from hogwild_agents.bench.generate_system import machine
    from hogwild_engine.engine import Engine

    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(config.engine_config(d))) for d in config.dtypes]
        peers = load_peers(config, gguf, engines[0])
        systems: dict[SystemName, System] = {}
        for count in config.workers:
            for dtype, engine in zip(config.dtypes, engines, strict=True):
                systems[SystemName(OURS, dtype, count)] = EngineSystem(engine, count)
            systems |= {name: system for name, system in peers.items() if name.workers == count}
        yield Loaded(systems, engines[0], machine())


def load_peers(config: BenchConfig, gguf: Path, engine: Any) -> dict[SystemName, System]:
    def render(task: str) -> list[int]:
        return engine.chat.render([{"role": "user", "content": task}])

    systems: dict[SystemName, System] = {}
    absent = missing()
    if OPENVINO not in absent:
        pipeline = peer_openvino.load_pipeline(gguf, config.threads)
        for count in config.workers:
            name = SystemName(OPENVINO, FILE, count)
            systems[name] = peer_openvino.OpenVinoSystem(pipeline, render, count)
    if LLAMA not in absent:
        model = peer_llama.load_model(gguf)
        context = config.contexts[0] + config.steps + 32
        for count in config.workers:
            system = peer_llama.LlamaSystem(model, render, count, context, config.threads)
            systems[SystemName(LLAMA, FILE, count)] = system
    return systems


def over_peers(readings: Sequence[Reading], row: Figures) -> dict[str, float | None]:
    """Return tokens/s of a system over those of each peer with as many sequences, same rounds."""
    index = {key_of(reading): reading.measured for reading in readings}
    mine = [
        reading for reading in readings if reading.system == (row.system, row.dtype, row.workers)
    ]
    return {
        peer: ratio(mine, index, SystemName(peer, FILE, row.workers), lambda run: run.tokens_per_s)
        for peer in PEERS
    }


def table_of(readings: Sequence[Reading]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("system")
    table.add_column("weights")
    for name in ("sequences", "ms a step", "tokens/s", *(f"over {peer}" for peer in PEERS)):
        table.add_column(name, justify="right")
    for row in figures_of(readings):
        ratios = over_peers(readings, row) if row.system == OURS else dict.fromkeys(PEERS)
        shown = ["" if value is None else f"{value:.2f}×" for value in ratios.values()]
        figures = [str(row.workers), f"{row.step_ms:.1f}", f"{row.tokens_per_s:.0f}"]
        table.add_row(row.system, row.dtype, *figures, *shown)
    return table


def report_of(readings: Sequence[Reading]) -> dict[str, Any]:
    return {
        "figures": [
            asdict(row) | {"over": over_peers(readings, row)} for row in figures_of(readings)
        ],
        "readings": [reading.as_dict() for reading in readings],
    }


if __name__ == "__main__":
    sys.exit(main())
