"""What workers wrote, as text at any step budget, and the Python functions that stand in it.

Knows text and Python's syntax; runs nothing, and knows no engine.
"""

import ast
import re
import symtable
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

FENCE = re.compile(r"\s*(?:```+|~~~+)\s*(?P<language>[\w+#.-]*)\s*")
PYTHON = {"", "py", "python", "python3"}
TOP_LEVEL = re.compile(r"(?:def|async def|class|import|from)\s|@")


class Record(NamedTuple):
    """A piece of text that a worker wrote in one step.

    Attributes:
        step: The forward pass, counted from 1, that produced it.
        worker: The worker's place in the session, from 0.
        paragraph: The number of that worker's paragraph.
        text: What was written, an opening fence that the protocol forced included.
    """

    step: int
    worker: int
    paragraph: int
    text: str


def transcript_at(records: Iterable[Record], budget: int) -> str:
    """The text that a run had written after `budget` steps, as a reader would see it.

    Paragraphs stand in the order in which they were finished, workers in their own order within
    a step, and unfinished ones, which were all written to last, follow. Nothing that was written
    after the budget plays a part.
    """
    pieces: dict[tuple[int, int], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.step):
        if record.step <= budget:
            pieces.setdefault((record.worker, record.paragraph), []).append(record)
    ordered = sorted(pieces.items(), key=lambda item: (item[1][-1].step, item[0]))
    return "\n\n".join("".join(record.text for record in written) for _, written in ordered)


def extract_functions(text: str) -> dict[str, str]:
    """Take the top-level Python functions out of a transcript that may break off anywhere.

    Code is read from python and unnamed fences, a last one that was never closed included. Lines
    that do not parse are left out: the rest of a block counts. Choices where a name is defined
    more than once:

    - The last complete definition is taken, as a reader would.
    - A definition that breaks off (lines of it do not parse, or it ends the text in an open
      fence) is taken where no complete one exists: it may be whole but for its closing fence,
      and its tests decide. So starting a function again does not undo the first version.
    - One that only restates the task (docstring, `pass`, `...`, `raise`) is never taken.

    Statements that would run something (calls, loops, `if __name__ …`) are dropped.

    Args:
        text: Everything written so far.

    Returns:
        Each function's name and its source, with the imports, helper functions, classes and
        constants that it uses, from its own code block first, else from anywhere in the text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bindings = [
            binding
            for block, (code, closed) in enumerate(_python_blocks(text))
            for node, complete in _statements(code, closed)
            for binding in _bindings(node, block, complete)
        ]
        names = {b.name for b in bindings if isinstance(b.node, ast.FunctionDef)}
        return {name: _source(name, bindings) for name in sorted(names)}


class _Binding(NamedTuple):
    name: str
    node: ast.stmt
    block: int
    complete: bool


def _python_blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Each python block's code and whether its fence was closed; a named fence always opens."""
    language: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line)
        if not fence:
            lines.append(line)
            continue
        if language in PYTHON:
            yield textwrap.dedent("\n".join(lines)), not fence["language"]
        opens = bool(fence["language"]) or language is None
        language = fence["language"].lower() if opens else None
        lines = []
    if language in PYTHON:
        yield textwrap.dedent("\n".join(lines)), False


def _statements(code: str, closed: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Top-level statements that parse, each with whether it is known to be complete."""
    lines = code.split("\n")
    while lines:
        body, end = _longest_prefix(lines)
        rest = [line for line in lines[end:] if line.strip()]
        last_complete = not rest[0][0].isspace() if rest else closed
        for place, node in enumerate(body, 1):
            yield node, place < len(body) or last_complete
        starts = range(max(end, 1), len(lines))
        lines = lines[next((i for i in starts if TOP_LEVEL.match(lines[i])), len(lines)) :]


def _longest_prefix(lines: list[str]) -> tuple[list[ast.stmt], int]:
    for end in range(len(lines), 0, -1):
        code = "\n".join(lines[:end])
        try:
            compile(code, "<written>", "exec", dont_inherit=True)
            return ast.parse(code).body, end
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return [], 0


def _bindings(node: ast.stmt, block: int, complete: bool) -> Iterator[_Binding]:
    """The names that a statement binds, where it is of a kind that is kept."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names = [] if all(map(_says_nothing, node.body)) else [node.name]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
        names = [node.target.id]
    else:
        names = []
    return (_Binding(name, node, block, complete) for name in names)


def _says_nothing(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass | ast.Raise)


def _source(name: str, bindings: list[_Binding]) -> str:
    """The chosen definition of `name` and all that it uses, imports first, in order of writing."""
    functions = [b for b in bindings if isinstance(b.node, ast.FunctionDef)]
    chosen: dict[str, _Binding | None] = {}
    wanted = [(name, _pick(name, None, functions))]
    while wanted:
        used, binding = wanted.pop()
        if used in chosen:
            continue
        chosen[used] = binding
        if binding:
            names = _names_used(ast.unparse(binding.node))
            wanted += [(other, _pick(other, binding.block, bindings)) for other in sorted(names)]
    starred = [b for b in bindings if b.name == "*"]
    kept = {id(b.node) for b in [*chosen.values(), *starred] if b}
    nodes = list({id(b.node): b.node for b in bindings if id(b.node) in kept}.values())
    nodes.sort(key=lambda node: not isinstance(node, ast.Import | ast.ImportFrom))
    return "\n".join(ast.unparse(node) for node in nodes) + "\n"


def _pick(name: str, block: int | None, bindings: list[_Binding]) -> _Binding | None:
    found = [(b.complete, b.block == block, i) for i, b in enumerate(bindings) if b.name == name]
    return bindings[max(found)[2]] if found else None


def _names_used(source: str) -> set[str]:
    """The module-level names that a statement looks up, its own body's locals left out."""
    tables = [symtable.symtable(source, "<written>", "exec")]
    names: set[str] = set()
    for table in tables:
        outer = table.get_type() == "module"
        symbols = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
        names |= {symbol.get_name() for symbol in symbols if outer or symbol.is_global()}
        tables += table.get_children()
    return names
