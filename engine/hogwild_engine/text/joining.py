"""Joining: one answer from the paragraphs of a team, so that Python code in it runs in order.

Workers that have written their share add calls with values that nobody defined, or call a function
before its paragraph has ended. Joined as they are, such paragraphs raise `NameError`.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

_BLOCK = re.compile(r"\s*```(?:python|py)?[ \t]*\n(?P<code>.*?)\n?[ \t]*```\s*", re.DOTALL)
_PREDEFINED = {*dir(builtins), "__name__", "__file__", "__doc__", "__package__", "__spec__"}
_COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement at the left margin: its lines, and the names that it reads and defines when it
    runs, those in bodies of functions left out.
    """

    first: int
    last: int
    reads: frozenset[str]
    defines: frozenset[str]


@dataclass(slots=True)
class _Code:
    """A paragraph that is one block of Python code."""

    lines: list[str]
    statements: list[_Statement]

    @property
    def defines(self) -> set[str]:
        return {name for statement in self.statements for name in statement.defines}

    def missing(self, defined: set[str]) -> list[_Statement]:
        """Return the statements that read a name which neither ``defined`` nor a statement before
        them defines.
        """
        known, missing = set(defined), list[_Statement]()
        for statement in self.statements:
            if not statement.reads <= known:
                missing.append(statement)
            known |= statement.defines
        return missing

    def without(self, dropped: Sequence[_Statement]) -> _Code:
        if not dropped:
            return self
        gone = set(chain.from_iterable(range(s.first - 1, s.last) for s in dropped))
        lines = [line for number, line in enumerate(self.lines) if number not in gone]
        return _parse("\n".join(lines).strip()) or _Code([], [])

    def text(self) -> str:
        return "\n".join(["```python", *self.lines, "```"])


def join_paragraphs(texts: Sequence[str], *, code: bool) -> str:
    """Join paragraphs with a blank line between them.

    Args:
        texts: the paragraphs.
        code: they are blocks of code. Python that cannot be parsed is left out, and so are
            statements that read names which no paragraph defines; a paragraph that reads names of
            later ones comes after them.
    """
    return "\n\n".join(_runnable(texts) if code else texts)


def _runnable(texts: Sequence[str]) -> Iterator[str]:
    parts = [parsed for text in texts if (parsed := _parse_block(text)) is not None]
    definable = _definable([part for part in parts if isinstance(part, _Code)])
    waiting = [_without_undefined(part, definable) for part in parts]
    known = set(_PREDEFINED)
    while waiting:
        ready = (part for part in waiting if isinstance(part, str) or not part.missing(known))
        part = next(ready, waiting[0])
        waiting.remove(part)
        if isinstance(part, str):
            yield part
        elif part.statements:
            known |= part.defines
            yield part.text()


def _definable(codes: Sequence[_Code]) -> set[str]:
    """Return the names that are defined once all has run that can run, in any order."""
    names: set[str] = set()
    more = set(_PREDEFINED)
    while more != names:
        names = set(more)
        for statement in chain.from_iterable(code.statements for code in codes):
            if statement.reads <= names:
                more |= statement.defines
    return names


def _without_undefined(part: str | _Code, definable: set[str]) -> str | _Code:
    if isinstance(part, str):
        return part
    return part.without([s for s in part.statements if not s.reads <= definable])


def _parse_block(text: str) -> str | _Code | None:
    """Return the code of a Python block, other text as it is, ``None`` for broken Python."""
    found = _BLOCK.fullmatch(text)
    return _parse(found["code"]) if found else text


def _parse(source: str) -> _Code | None:
    lines = source.splitlines()
    try:
        compile(source, "<paragraph>", "exec")
        nodes = ast.parse(source).body
        return _Code(lines, [_statement(node, lines) for node in nodes])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statement(node: ast.stmt, lines: list[str]) -> _Statement:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    last = node.end_lineno or node.lineno
    table = _table(node)
    defines = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    reads = _reads(table) - defines
    if isinstance(node, ast.Assign | ast.AugAssign):  # the value is read before the name is there
        reads = _reads(_table(node.value))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        reads |= {node.target.id}
    return _Statement(first, last, frozenset(reads), frozenset(defines))


def _table(node: ast.AST) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(node), "<statement>", "exec")


def _reads(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a scope reads when it runs."""
    is_module = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (is_module or symbol.is_global())
    }
    for child in table.get_children():
        if child.get_type() == "class" or child.get_name() in _COMPREHENSIONS:
            names |= _reads(child)
    return names
