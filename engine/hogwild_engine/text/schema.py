"""JSON schemas for constrained decoding: objects are closed and lengths are bounded, so that a
model that runs on and on still ends. Any value of the new schema is a value of the original one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARS_PER_TOKEN = 3
MAX_INTEGER = 2**53 - 1
MIN_TOKENS = 4
"""Tokens that every value may take, even with a smaller budget."""

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_EXTRA_KEYS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}


def bound_schema(schema: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """Return the schema with closed objects and bounded lengths.

    An object that names properties takes no others, unless the schema says otherwise. Strings,
    arrays and integers without a bound get one, so that a value is likely to fit the budget.

    Args:
        schema: a JSON schema.
        budget: tokens that a value may take.
    """
    # An allOf merges its members: were one of them closed, it would refuse the others' properties.
    merged_names = {
        str(member["$ref"]).rpartition("/")[2]
        for members in _find(schema, "allOf")
        if isinstance(members, list) and len(members) > 1
        for member in members
        if isinstance(member, dict) and "$ref" in member
    }
    return _Bounds(merged_names).apply(schema, budget)


class _Bounds:
    """Bounds schemas recursively.

    Args:
        open_names: definitions whose objects stay open.
    """

    def __init__(self, open_names: set[str]) -> None:
        self._open_names = open_names

    def apply(self, schema: Any, budget: int, *, closes: bool = True) -> Any:
        """Return ``schema`` bounded; its own object stays open unless ``closes``."""
        if not isinstance(schema, Mapping):
            return schema
        bounded = dict(schema)
        budget = max(budget, MIN_TOKENS)
        for key in _SCHEMAS_BY_NAME:
            if isinstance(bounded.get(key), Mapping):
                bounded[key] = self._apply_to_each(key, bounded[key], budget)
        for key in _SCHEMA_LISTS:
            if isinstance(members := bounded.get(key), list):
                closed = closes and not (key == "allOf" and len(members) > 1)
                bounded[key] = [self.apply(item, budget, closes=closed) for item in members]
        names_properties = isinstance(schema.get("properties"), Mapping)
        if closes and names_properties and not schema.keys() & _EXTRA_KEYS:
            bounded["additionalProperties"] = False
        elif isinstance(bounded.get("additionalProperties"), Mapping):
            bounded["additionalProperties"] = self.apply(
                schema["additionalProperties"], budget // 4
            )
        self._bound_lengths(bounded, budget)
        return bounded

    def _apply_to_each(self, key: str, schemas: Mapping[str, Any], budget: int) -> dict[str, Any]:
        share = budget // max(1, len(schemas)) if key == "properties" else budget // 2
        open_names = self._open_names if key in ("$defs", "definitions") else ()
        return {
            name: self.apply(item, share, closes=name not in open_names)
            for name, item in schemas.items()
        }

    def _bound_lengths(self, schema: dict[str, Any], budget: int) -> None:
        types, keys = _types(schema), schema.keys()
        is_free = not keys & {"enum", "const"}
        if "array" in types:
            max_items = max(1, int((budget / MIN_TOKENS) ** 0.5), _to_int(schema.get("minItems")))
            if is_free and "prefixItems" not in keys:
                schema.setdefault("maxItems", max_items)
            if isinstance(schema.get("items"), Mapping):
                schema["items"] = self.apply(schema["items"], budget // max_items)
        if "string" in types and is_free and not keys & {"maxLength", "pattern", "format"}:
            schema["maxLength"] = max(CHARS_PER_TOKEN * budget, _to_int(schema.get("minLength")))
        if "integer" in types and is_free:
            _bound_integer(schema)


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    return {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()


def _bound_integer(schema: dict[str, Any]) -> None:
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = min(-MAX_INTEGER, _to_int(schema.get("maximum"), -MAX_INTEGER))
    if "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = max(MAX_INTEGER, _to_int(schema.get("minimum"), MAX_INTEGER))


def _to_int(value: object, default: int = 0) -> int:
    return int(value) if isinstance(value, int | float) else default


def _find(value: Any, key: str) -> list[Any]:
    """Return all values of ``key``, at any depth."""
    if isinstance(value, Mapping):
        found = [value[key]] if key in value else []
        return found + [item for inner in value.values() for item in _find(inner, key)]
    if isinstance(value, list):
        return [item for inner in value for item in _find(inner, key)]
    return []
