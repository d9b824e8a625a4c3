"""JSON schemas as a free-running model needs them: objects closed, lengths bounded. What satisfies
such a schema satisfies the one it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARS_PER_TOKEN = 3
MAX_INTEGER = 2**53 - 1
MIN_TOKENS = 4
"""What any value may take, however small the budget."""

_NESTED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_LENGTHS = ("maxLength", "pattern", "format", "enum", "const")


def bounded(schema: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """The schema with closed objects and bounded lengths.

    An object that names properties takes no others unless the schema says so. Strings, arrays and
    integers that have no bound get one, so that all of a value is likely to fit ``budget`` tokens.

    Args:
        schema: a JSON schema.
        budget: tokens that a value may take.
    """
    open_names = {
        str(member["$ref"]).rpartition("/")[2]
        for merged in _find(schema, "allOf")
        if isinstance(merged, list) and len(merged) > 1
        for member in merged
        if isinstance(member, dict) and "$ref" in member
    }
    return _Bounds(open_names).apply(schema, budget)


class _Bounds:
    """Args:
    open_names: definitions whose objects stay open: they are merged with others.
    """

    def __init__(self, open_names: set[str]) -> None:
        self._open_names = open_names

    def apply(self, schema: Any, budget: int, *, closes: bool = True) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        made = dict(schema)
        budget = max(budget, MIN_TOKENS)
        kinds = _kinds(schema)
        for key in _NESTED:
            if isinstance(made.get(key), Mapping):
                made[key] = self._nested(key, made[key], budget)
        for key in _LISTS:
            if isinstance(made.get(key), list):
                shuts = closes and not (key == "allOf" and len(made[key]) > 1)
                made[key] = [self.apply(item, budget, closes=shuts) for item in made[key]]
        if closes and isinstance(made.get("properties"), Mapping) and not _says_what_else(made):
            made["additionalProperties"] = False
        elif isinstance(made.get("additionalProperties"), Mapping):
            made["additionalProperties"] = self.apply(made["additionalProperties"], budget // 4)
        if "array" in kinds:
            self._bound_array(made, budget)
        if "string" in kinds and not any(key in made for key in _LENGTHS):
            made["maxLength"] = max(CHARS_PER_TOKEN * budget, _whole(made.get("minLength")))
        if "integer" in kinds and "enum" not in made and "const" not in made:
            _bound_integer(made)
        return made

    def _nested(self, key: str, schemas: Mapping[str, Any], budget: int) -> dict[str, Any]:
        share = budget // max(1, len(schemas)) if key == "properties" else budget // 2
        defines = key in ("$defs", "definitions")
        return {
            name: self.apply(item, share, closes=not (defines and name in self._open_names))
            for name, item in schemas.items()
        }

    def _bound_array(self, made: dict[str, Any], budget: int) -> None:
        most = max(1, int((budget / MIN_TOKENS) ** 0.5), _whole(made.get("minItems")))
        if "prefixItems" not in made and "enum" not in made and "const" not in made:
            made.setdefault("maxItems", most)
        if isinstance(made.get("items"), Mapping):
            made["items"] = self.apply(made["items"], budget // most)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    return {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()


def _says_what_else(schema: Mapping[str, Any]) -> bool:
    return any(
        key in schema
        for key in ("additionalProperties", "patternProperties", "unevaluatedProperties")
    )


def _bound_integer(made: dict[str, Any]) -> None:
    if "minimum" not in made and "exclusiveMinimum" not in made:
        made["minimum"] = min(-MAX_INTEGER, _whole(made.get("maximum"), -MAX_INTEGER))
    if "maximum" not in made and "exclusiveMaximum" not in made:
        made["maximum"] = max(MAX_INTEGER, _whole(made.get("minimum"), MAX_INTEGER))


def _whole(value: object, otherwise: int = 0) -> int:
    return int(value) if isinstance(value, int | float) else otherwise


def _find(value: Any, key: str) -> list[Any]:
    """Everything under ``key``, however deep."""
    if isinstance(value, Mapping):
        found = [value[key]] if key in value else []
        return found + [item for inner in value.values() for item in _find(inner, key)]
    if isinstance(value, list):
        return [item for inner in value for item in _find(inner, key)]
    return []
