"""Validation of finished JSON, for what a grammar cannot hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from hogwild_engine.text.schema_drafts import map_parts, walk

_MAX_TEXT = 300


class SchemaCheck:
    """Checks values against a schema.

    Args:
        schema: a schema of draft 2020-12 without references to other documents.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator(
            _without_foreign_patterns(self._schema),
            registry=Registry(),  # empty: nothing is fetched
            format_checker=Draft202012Validator.FORMAT_CHECKER,
        )

    def problem(self, text: str) -> str:
        """Return what is wrong with a JSON text; empty if it fits the schema."""
        try:
            error = best_match(self._validator.iter_errors(json.loads(text)))
        except json.JSONDecodeError as broken:
            return f"it is no JSON: {broken}"
        except RecursionError:
            return "it is nested too deep to be checked"
        return "" if error is None else _described(error)


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Return what is wrong with a schema of draft 2020-12; empty if values can be checked by it."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return _described(error)
    except RecursionError:
        return "it is nested too deep"
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for node in walk(schema):
        if isinstance(reference := node.get("$ref"), str):
            try:
                resolver.lookup(reference)
            except (Unresolvable, ValueError, TypeError) as error:
                return f"nothing stands at {reference!r}: {error}"[:_MAX_TEXT]
    return ""


def is_pattern(pattern: object) -> bool:
    """Return whether values can be checked against a pattern."""
    try:
        re.compile(str(pattern))
    except re.error:
        return False
    return True


def _without_foreign_patterns(schema: Any) -> Any:
    """Leave out the patterns in Rust's syntax alone, which the grammar holds."""
    if not isinstance(schema, Mapping):
        return schema
    made = map_parts(schema, lambda part, _: _without_foreign_patterns(part))
    if not is_pattern(made.get("pattern", "")):
        del made["pattern"]
    if not all(map(is_pattern, made.get("patternProperties", ()))):
        del made["patternProperties"]
        made["additionalProperties"] = True
    return made


def _described(error: ValidationError | SchemaError) -> str:
    place = ".".join(map(str, error.absolute_path))
    return (f"{place}: " if place else "") + str(error.message)[:_MAX_TEXT]
