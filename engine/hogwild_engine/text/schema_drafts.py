"""JSON schemas of all drafts since 4, written in the words of draft 2020-12; walks over schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SINGLE = frozenset(
    {
        "items",
        "additionalProperties",
        "unevaluatedProperties",
        "unevaluatedItems",
        "propertyNames",
        "contains",
        "not",
        "if",
        "then",
        "else",
    }
)


def modernized(schema: Any) -> Any:
    """Return the schema in draft 2020-12: drafts 4 to 2019-09 have other words for some keywords.

    Example: ``{"minimum": 3, "exclusiveMinimum": true}`` is ``{"exclusiveMinimum": 3}``.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = {key: value for key, value in schema.items() if key != "$schema"}
    for exclusive, inclusive in (
        ("exclusiveMinimum", "minimum"),
        ("exclusiveMaximum", "maximum"),
    ):
        if isinstance(made.get(exclusive), bool):
            is_exclusive = made.pop(exclusive)
            if is_exclusive and inclusive in made:
                made[exclusive] = made.pop(inclusive)
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    made.pop("additionalItems", None)
    if isinstance(dependencies := made.pop("dependencies", None), Mapping):
        for name, needs in dependencies.items():
            key = "dependentRequired" if isinstance(needs, list) else "dependentSchemas"
            made[key] = {**made.get(key, {}), name: needs}
    if made.get("$recursiveRef") == "#":
        made["$ref"] = made.pop("$recursiveRef")
    return map_parts(made, lambda part, _: modernized(part))


def map_parts(schema: Mapping[str, Any], change: Callable[[Any, str], Any]) -> Schema:
    """Return the schema with every schema directly in it replaced.

    Args:
        schema: a schema of draft 2020-12.
        change: takes a part, and the name of the property that it is about, or "".
    """
    made = dict(schema)
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            named = key in ("properties", "$defs", "definitions")
            made[key] = {name: change(part, name if named else "") for name, part in value.items()}
        elif key in LISTS and isinstance(value, list):
            made[key] = [change(part, "") for part in value]
        elif key in SINGLE:
            made[key] = change(value, "")
    return made


def walk(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schema and all schemas in it."""
    if isinstance(schema, Mapping):
        yield schema
        parts: list[Any] = []
        map_parts(schema, lambda part, _: parts.append(part))
        for part in parts:
            yield from walk(part)


def resolve(root: Mapping[str, Any], reference: object) -> Mapping[str, Any] | None:
    """Return the schema that a ``$ref`` points to, if it is an object within ``root``."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
