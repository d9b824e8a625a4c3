"""The ``hogwild`` command. Neither ``--help`` nor ``--version`` load torch or LangChain."""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from io import TextIOWrapper
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

from hogwild_agents import __version__
from hogwild_engine.api.config import EMBEDDED_MODEL, EngineConfig, QuantizationName, SamplingParams
from hogwild_engine.api.errors import ConfigError, HogwildError, RequestError
from hogwild_engine.api.layout import LayoutName
from hogwild_engine.api.request import Request, Worker, make_workers

USAGE = """Several workers of one model write one answer at the same time, over one shared cache.

\b
Examples:
  hogwild demo
  hogwild run "Write Python functions: is_even(n), is_odd(n)." --protocol code --answer join
  echo "Write Python functions: is_zero(n), is_one(n)." | hogwild run - --protocol code --json
  hogwild bench --context 512,2048 --workers 1,4

\b
The embedded model can divide short lists of functions. For prose, use a larger one:
  export HOGWILD_MODEL=Qwen/Qwen2.5-1.5B-Instruct
  hogwild run "Describe tea, coffee and cocoa, a short paragraph each." --workers 3
  hogwild run "Plan a day in Rome." --workers Ann,Ben --role "Ben=finds where to eat"
"""

app = typer.Typer(
    help=USAGE,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and libraries' warnings.")]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, 1 (failure), 2 (bad usage) or 130 (interrupted).
    """
    args = sys.argv[1:] if args is None else list(args)
    _replace_unencodable_characters()
    try:
        return app(args, prog_name="hogwild", standalone_mode=False) or 0
    except Exception as error:
        if "--debug" in args:
            traceback.print_exc()
        print(f"hogwild: {_one_line(error)}", file=sys.stderr)
        return _exit_code(error)


Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads. Default: torch's. Use fewer if other programs are busy."),
]
Model = Annotated[
    str,
    typer.Option(
        envvar="HOGWILD_MODEL", help="A hub id, a folder, a .gguf file, or the embedded model."
    ),
]


@app.callback(invoke_without_command=True)
def hogwild(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"hogwild {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="The task; - reads it from standard input.")],
    model: Model = EMBEDDED_MODEL,
    workers: Annotated[
        str, typer.Option(help="A number, or names: Alice,Bob. 1 is the plain model.")
    ] = "2",
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="The role of one worker. Repeatable."),
    ] = None,
    layout: Annotated[LayoutName, typer.Option(help="How workers see each other.")] = "combined",
    protocol: Annotated[
        str, typer.Option(help="How workers share one text: auto, instruct, code or paper.")
    ] = "auto",
    answer: Annotated[
        Literal["write", "join"],
        typer.Option(
            help="write: one worker writes the answer. join: the paragraphs are the answer."
        ),
    ] = "write",
    max_steps: Annotated[int, typer.Option(help="Most steps in which all workers write.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the final answer.")] = 1024,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's own.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the model's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the run repeatable.")] = None,
    quantization: Annotated[
        QuantizationName, typer.Option(help="int8 is faster on the CPU and less exact.")
    ] = "none",
    threads: Threads = None,
    show: Annotated[
        Literal["answer", "workers"] | None,
        typer.Option(
            help="answer: the answer alone. workers: also who wrote what, and figures, on standard "
            "error. Default: a live view on a terminal, else the answer."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per event.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Let a team of workers answer PROMPT."""
    request = Request(
        messages=({"role": "user", "content": _task(prompt)},),
        workers=_team(workers, role or ()),
        layout=layout,
        protocol=protocol,
        answer=answer,
        max_steps=max_steps,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
    )
    device = os.environ.get("HOGWILD_DEVICE") or "auto"
    config = EngineConfig(
        model=model, quantization=quantization, device=device, num_threads=threads
    )
    _serve(config, request, as_json=as_json, shown=show, debug=debug)


@app.command()
def demo(threads: Threads = None, debug: Debug = False) -> None:
    """Watch two workers divide a task, with the embedded model."""
    from hogwild_agents.cli.demo import CONFIG, REQUEST, TASK

    config = replace(CONFIG, num_threads=threads)
    print(textwrap.fill(f"Task: {TASK}", 80), end="\n\n", flush=True)
    _serve(config, REQUEST, shown=None if sys.stdout.isatty() else "workers", debug=debug)


@app.command()
def bench(
    model: Model = EMBEDDED_MODEL,
    dtype: Annotated[str, typer.Option(help="Any of bfloat16, float32, int8.")] = "bfloat16",
    context: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "512",
    sessions: Annotated[str, typer.Option(help="Requests at once.")] = "1",
    workers: Annotated[str, typer.Option(help="Workers of each request.")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(help="Decoding steps that are measured.")] = 32,
    repeats: Annotated[int, typer.Option(help="Rounds in which each system runs once.")] = 3,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Compare the engine with transformers' generate, interleaved; print medians.

    All systems sample at temperature 0.6, top-p 0.9. --dtype, --context, --sessions and
    --workers take several values: --context 512,2048.
    """
    from hogwild_agents.bench.systems import BenchConfig
    from hogwild_agents.cli import terminal

    config = BenchConfig(
        model,
        dtypes=tuple(dict.fromkeys(name.strip() for name in dtype.split(","))),
        contexts=_numbers(context, "--context"),
        sessions=_numbers(sessions, "--sessions"),
        workers=_numbers(workers, "--workers"),
        steps=steps,
        repeats=repeats,
        threads=threads,
    )
    if not debug:
        terminal.silence_libraries()
    with terminal.ending_on_sigterm():
        terminal.bench(config, as_json=as_json)


def _serve(
    config: EngineConfig,
    request: Request,
    *,
    as_json: bool = False,
    shown: Literal["answer", "workers"] | None = None,
    debug: bool,
) -> None:
    from hogwild_agents.cli import terminal

    if not debug:
        terminal.silence_libraries()
    with terminal.ending_on_sigterm(), closing(terminal.load(config)) as engine:
        terminal.show(engine, request, as_json=as_json, shown=shown)


def _task(prompt: str) -> str:
    """Return the prompt, or standard input for ``-``; invalid UTF-8 is replaced."""
    if prompt == "-" and sys.stdin is None:
        wanted = "wanted standard input for -, and it is closed"
        raise typer.BadParameter(wanted, param_hint="PROMPT")
    given = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    task = given.decode("utf-8", "replace")
    if not task.strip():
        raise typer.BadParameter("wanted a task, got no text", param_hint="PROMPT")
    return task


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between, each once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        wanted = f"wanted whole numbers with commas between, got {text!r}"
        raise typer.BadParameter(wanted, param_hint=option) from None


def _team(workers: str, roles: Sequence[str]) -> tuple[Worker, ...]:
    given = workers.strip()
    is_number = given.lstrip("-").isdecimal()
    names = [name.strip() for name in given.split(",")]
    if not is_number and len(names) == 1:
        wanted = f"wanted a number, or names with commas between them, got {workers!r}"
        raise typer.BadParameter(wanted, param_hint="--workers")
    team = make_workers(int(given) if is_number else names)
    role_of = dict(_role(role, [worker.name for worker in team]) for role in roles)
    return tuple(Worker(worker.name, role_of.get(worker.name)) for worker in team)


def _role(role: str, names: Sequence[str]) -> tuple[str, str]:
    name, _, text = (part.strip() for part in role.partition("="))
    if name not in names or not text:
        wanted = f"wanted NAME=TEXT with a name of {', '.join(names)}, got {role!r}"
        raise typer.BadParameter(wanted, param_hint="--role")
    return name, text


def _replace_unencodable_characters() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _one_line(error: Exception) -> str:
    if isinstance(error, TyperException):
        text = f"{error.format_message().rstrip('.')}; see {_path(error)} --help"
    elif isinstance(error, HogwildError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _path(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "hogwild"


def _exit_code(error: Exception) -> int:
    if isinstance(error, TyperException):
        return error.exit_code
    return 2 if isinstance(error, (ConfigError, RequestError)) else 1
