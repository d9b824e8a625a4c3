"""What a grammar cannot hold of a request's schemas: a warning, and a check of finished text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hogwild_engine.api.errors import RequestError
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.api.request import Request
from hogwild_engine.text.call_grammar import arguments_schema, callable_functions
from hogwild_engine.text.schema import GrammarSchema, grammar_schema
from hogwild_engine.text.schema_check import SchemaCheck


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Checks a finished answer and its calls.

    Args:
        answer: of the text; ``None`` if its grammar holds all.
        calls: of the arguments of tools whose grammar does not hold all, by name.
        worker: of a worker's paragraph.
    """

    answer: SchemaCheck | None
    calls: Mapping[str, SchemaCheck]
    worker: SchemaCheck | None

    @classmethod
    def of(cls, request: Request) -> AnswerCheck:
        """Return the check of a request's answer.

        Raises:
            RequestError: a schema of an answer is invalid, or nothing fits it.
        """
        called = _called(request)
        return cls(
            _check(request.grammar),
            {name: schema.check for name, schema in called.items() if schema.check},
            _check(request.worker_grammar),
        )


def warn_of_left_out(request: Request) -> None:
    """Warn once of all that the model may break, and of tools that it cannot call."""
    parts = [
        f"{', '.join(schema.left_out)} ({name})"
        for name, schema in _schemas(request)
        if schema.left_out
    ]
    if parts:
        problem = "while text is written, nothing enforces " + "; ".join(parts)
        warnings.warn(f"schema: {problem}; finished text is checked", stacklevel=4)
    usable = {function["name"] for function in callable_functions(request.tools, "auto")}
    for tool in request.tools if request.may_call else ():
        function = tool["function"]
        if function["name"] not in usable:
            try:
                arguments_schema(function)
            except RequestError as error:
                warnings.warn(f"tool {function['name']!r} is not called: {error}", stacklevel=4)


def _schemas(request: Request) -> Iterator[tuple[str, GrammarSchema]]:
    for name, grammar in (("grammar", request.grammar), ("worker_grammar", request.worker_grammar)):
        if grammar is not None and grammar.kind == "json":
            yield name, grammar_schema(grammar.text)
    for name, schema in _called(request).items():
        yield f"tool {name!r}", schema


def _called(request: Request) -> dict[str, GrammarSchema]:
    if not request.may_call:
        return {}
    functions = callable_functions(request.tools, request.tool_choice)
    return {function["name"]: arguments_schema(function) for function in functions}


def _check(grammar: Grammar | None) -> SchemaCheck | None:
    return grammar_schema(grammar.text).check if grammar and grammar.kind == "json" else None
