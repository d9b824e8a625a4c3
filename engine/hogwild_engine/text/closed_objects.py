"""Objects without invented keys: an object that names its properties takes no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hogwild_engine.text.schema_drafts import Schema, map_parts, resolve, walk

_DECIDED = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_COMPOSED = frozenset({"allOf", "anyOf", "$defs", "definitions"})
_OBJECT_KEYS = frozenset({"properties", "required", "allOf", "anyOf", "$ref"})


def close_objects(schema: Mapping[str, Any]) -> Schema:
    """Return the schema with its objects closed, unless the author says what else they hold.

    Schemas leave objects open by default, and models would go on to invent keys. A value of the
    closed schema is a value of the open one. Where several schemas describe one object (``allOf``,
    ``properties`` beside ``$ref`` or ``anyOf``), it takes the properties that any of them names.
    """
    return _Closer(schema).close(schema, ())


class _Closer:
    """Closes the objects of one schema.

    Args:
        root: the schema, in which references are looked up.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # Definitions that describe only a part of an object stay open: whoever refers to them
        # closes the whole.
        self._open: set[str] = set()
        for node in walk(root):
            for part in self._parts_of_one(node):
                self._leave_open(part)

    def _parts_of_one(self, node: Mapping[str, Any]) -> list[Any]:
        """Return the schemas in ``node`` that describe one object together."""
        parts = []
        composes = len(node.keys() & _OBJECT_KEYS) > 1
        if "$ref" in node and composes:
            parts.append({"$ref": node["$ref"]})
        if composes or len(_members(node, "allOf")) > 1:
            parts += _members(node, "allOf")
        if self._names({**node, "anyOf": []}):
            parts += _members(node, "anyOf")
        return parts

    def _leave_open(self, part: Any) -> None:
        """Note the definitions that a part of an object refers to, at any distance."""
        if not isinstance(part, Mapping):
            return
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in self._open:
            self._open.add(reference)
            self._leave_open(resolve(self._root, reference))
        for member in (*_members(part, "allOf"), *_members(part, "anyOf")):
            self._leave_open(member)

    def close(self, node: Any, context: Iterable[str], *, is_part: bool = False) -> Any:
        """Return the schema closed.

        Args:
            node: a schema.
            context: properties that the schemas around it name for the same object.
            is_part: another schema closes the whole of which this is a part.
        """
        if not isinstance(node, Mapping):
            return node
        own = self._names({**node, "anyOf": []})
        is_decided = own is None
        names = list(dict.fromkeys([*context, *(own or ())]))
        made = map_parts(node, lambda part, _: part)
        for key in made:
            if key == "allOf":
                part = is_part or bool(names) or is_decided
                made[key] = [self.close(m, (), is_part=part) for m in _members(node, key)]
            elif key == "anyOf":
                part = is_part or is_decided
                made[key] = [self.close(m, names, is_part=part) for m in _members(node, key)]
            elif key in ("$defs", "definitions"):
                made[key] = {
                    name: self.close(part, (), is_part=f"#/{key}/{name}" in self._open)
                    for name, part in node[key].items()
                }
        rest = {key: value for key, value in made.items() if key not in _COMPOSED}
        made |= map_parts(rest, lambda part, _: self.close(part, ()))
        if "type" not in made and not made.keys() & {"const", "enum"}:
            # An author who describes properties or items means an object or an array.
            if "properties" in made:
                made["type"] = "object"
            elif made.keys() & {"items", "prefixItems"}:
                made["type"] = "array"
        is_named = bool(names) or "properties" in node
        if is_part or is_decided or "anyOf" in node or not is_named or not _may_be_object(node):
            return made
        is_reference = node.keys() & _OBJECT_KEYS == {"$ref"}
        if is_reference and node["$ref"] not in self._open and not context:
            return made
        named = made.get("properties", {})
        missing = {name: True for name in names if name not in named}
        return {**made, "properties": {**named, **missing}, "additionalProperties": False}

    def _names(self, node: Any, seen: frozenset[str] = frozenset()) -> list[str] | None:
        """Return the properties that a schema names; ``None`` if it says what else there may be."""
        if not isinstance(node, Mapping):
            return []
        if node.keys() & _DECIDED:
            return None
        required = node.get("required")
        names = [*node.get("properties", {}), *(required if isinstance(required, list) else ())]
        parts = [*_members(node, "allOf"), *_members(node, "anyOf")]
        reference = node.get("$ref")
        if reference is not None and reference not in seen:
            parts.append(resolve(self._root, reference) or {"patternProperties": {}})
            seen |= {str(reference)}
        for part in parts:
            more = self._names(part, seen)
            if more is None:
                return None
            names += more
        return names


def _members(node: Mapping[str, Any], key: str) -> list[Any]:
    members = node.get(key)
    return members if isinstance(members, list) else []


def _may_be_object(node: Mapping[str, Any]) -> bool:
    kind = node.get("type", "object")
    return (kind == "object" or "object" in kind) and not node.keys() & {"const", "enum"}
