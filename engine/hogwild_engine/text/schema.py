"""JSON schemas for constrained decoding: what llguidance enforces, and what is checked afterwards.

No bound is added: a value is as long as the model makes it, and the token budget is its only end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hogwild_engine.api.errors import RequestError, error_text
from hogwild_engine.text.closed_objects import close_objects
from hogwild_engine.text.lookaheads import without_lookaheads
from hogwild_engine.text.schema_check import SchemaCheck, is_pattern, schema_problem
from hogwild_engine.text.schema_drafts import Schema, map_parts, modernized, resolve, walk

# As chat templates print JSON in transformers, so that forced text looks like the prompt. White
# space is not the model's to choose: small models write it without end.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_MAX_EXACT = 2**53
"""llguidance computes with float64: larger whole numbers are rounded."""

_NEVER_ENFORCED = frozenset(
    {
        "$dynamicRef",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRING_KEYS = ("format", "pattern", "minLength", "maxLength")
_COUNT_KEYS = ("minProperties", "maxProperties")


@dataclass(frozen=True, slots=True)
class GrammarSchema:
    """What constrains a JSON value.

    Args:
        source: the schema as llguidance takes it.
        left_out: keywords of the original that the source lacks, and where they stand.
        check: checks a finished value; ``None`` if the grammar holds all of the original.
    """

    source: str
    left_out: tuple[str, ...]
    check: SchemaCheck | None


@lru_cache(maxsize=64)
def grammar_schema(text: str) -> GrammarSchema:
    """Return the constraint that a JSON schema of draft 4 or later puts on a value.

    Objects that name their properties take no others (`close_objects`), and a property with one
    possible value that is also its default, such as the tag of a union, is always written. Keywords
    that llguidance lacks are left out, and finished values checked.

    Args:
        text: the schema as JSON.

    Raises:
        RequestError: it is no schema, or no value fits it.
    """
    schema = modernized(json.loads(text))
    relaxed = _Relaxed(schema)
    left_out = tuple(dict.fromkeys(relaxed.left_out))
    refusal = ""
    for candidate, more in _candidates(relaxed.schema):
        source = _source(candidate)
        if not (refusal := _refusal(source)):
            left_out += more
            check = SchemaCheck(schema) if left_out or relaxed.is_inexact else None
            return GrammarSchema(source, left_out, check)
    problem = schema_problem(schema) or (refusal if "nsatisfiable" in refusal else "")
    if problem:
        wanted = "a JSON schema that some value fits"
        raise RequestError(error_text("schema", wanted, text[:200], problem))
    kind = {"type": schema["type"]} if "type" in schema else {}
    return GrammarSchema(_source(kind), (f"all but the type: {refusal}",), SchemaCheck(schema))


def _candidates(schema: Schema) -> Iterator[tuple[Schema, tuple[str, ...]]]:
    """Yield ever weaker forms of a schema, and what each leaves out."""
    yield close_objects(schema), ()
    yield schema, ()
    alone = _with_lone_references(schema)
    yield close_objects(alone), ("what stands beside $ref",)
    yield alone, ("what stands beside $ref",)


def _with_lone_references(node: Any) -> Any:
    """Leave out what stands beside ``$ref``: llguidance cannot merge circular references."""
    if not isinstance(node, Mapping):
        return node
    kept = node.keys() & {"$ref", "$defs", "definitions"} if "$ref" in node else node.keys()
    return map_parts({key: node[key] for key in kept}, lambda part, _: _with_lone_references(part))


def _source(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


def _refusal(source: str) -> str:
    """Return why llguidance refuses a schema; empty if it does not."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(source)
        return LLMatcher.validate_grammar(grammar).partition("\n")[0]
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)


def _is_refused(schema: Mapping[str, Any]) -> bool:
    """Return whether llguidance lacks something; a schema that no value fits is not refused."""
    refusal = _refusal(json.dumps(schema))
    return bool(refusal) and "nsatisfiable" not in refusal and "greater than" not in refusal


class _Relaxed:
    """A schema without the keywords that llguidance lacks.

    Args:
        schema: a schema of draft 2020-12.

    Attributes:
        schema: the new schema; every value of the original fits it.
        left_out: what was left out, and where.
        is_inexact: something is enforced only nearly.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self.left_out: list[str] = []
        self.is_inexact = False
        self._tags = _tags(schema)
        self.schema: Schema = self._relax(schema, "")

    def _relax(self, node: Any, place: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        made = dict(node)
        self._name_keys(made)
        self._close_unevaluated(made)
        for key in [key for key, value in made.items() if _says_nothing(key, value, made)]:
            del made[key]
        self._drop(made, [key for key in made if key in _NEVER_ENFORCED], place)
        self._relax_numbers(made, place)
        self._relax_strings(made, place)
        self._relax_one_of(made, place)
        self._require_tags(node, made)
        self._relax_objects(made, place)
        inner = f"{place}." if place else ""
        return map_parts(
            made, lambda part, name: self._relax(part, f"{inner}{name}" if name else place)
        )

    def _drop(self, node: Schema, keys: list[str], place: str) -> None:
        for key in keys:
            self._note(key, node.pop(key), place)

    def _note(self, key: str, value: Any, place: str) -> None:
        text = f"{key} {value!r}" if isinstance(value, str | int | float) else key
        self.left_out.append(f"{text} of {place}" if place else text)

    def _relax_numbers(self, node: Schema, place: str) -> None:
        rounded = [key for key in ("const", "enum") if key in node and _is_rounded(node[key])]
        self._drop(node, rounded, place)
        bounds = {key: node[key] for key in _NUMBER_KEYS if key in node}
        if not bounds:
            return
        kind = "integer" if node.get("type") == "integer" else "number"
        bad = [key for key, v in bounds.items() if _is_refused({"type": kind, key: v})]
        self._drop(node, bad, place)
        for key, value in bounds.items():
            if key not in bad and kind == "integer" and abs(value) >= _MAX_EXACT:
                self.is_inexact = True
                if key.startswith("exclusive"):
                    node.setdefault(key.removeprefix("exclusive").lower(), node.pop(key))

    def _relax_strings(self, node: Schema, place: str) -> None:
        if isinstance(pattern := node.get("pattern"), str):
            (*more, rest), is_exact = without_lookaheads(pattern)
            if not any(_is_refused({"type": "string", "pattern": part}) for part in (*more, rest)):
                node["pattern"] = rest
                if more:
                    node["allOf"] = [*node.get("allOf", ()), *({"pattern": part} for part in more)]
                if not is_exact:
                    self._note("pattern", pattern, place)
        bounds = {key: node[key] for key in _STRING_KEYS if key in node}
        if not bounds.keys() & {"format", "pattern"}:
            return
        bad = [key for key, v in bounds.items() if _is_refused({"type": "string", key: v})]
        rest = {key: value for key, value in bounds.items() if key not in bad}
        if _is_refused({"type": "string", **rest}):
            bad = list(bounds)
        if "pattern" in bad and not is_pattern(bounds["pattern"]):
            wanted = "a pattern that Rust's regex or Python's re understands"
            raise RequestError(error_text("schema", wanted, bounds["pattern"]))
        self._drop(node, bad, place)

    def _relax_one_of(self, node: Schema, place: str) -> None:
        """Write ``oneOf`` as ``anyOf``, which is the same if no value fits two of its members."""
        if not isinstance(members := node.pop("oneOf", None), list):
            return
        if not self._are_disjoint(members, node.get("discriminator")):
            self._note("oneOf", members, place)
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": members}]
        else:
            node["anyOf"] = members

    def _are_disjoint(self, members: list[Any], discriminator: object) -> bool:
        resolved = [self._resolved(member) for member in members]
        types = [_types(member) for member in resolved]
        if all(types) and sum(map(len, types)) == len(set().union(*types)):
            return True
        names = set.intersection(*(set(member.get("properties", {})) for member in resolved))
        for name in names:
            values = [_values(self._resolved(m["properties"][name])) for m in resolved]
            is_tag = name in _tag_name(discriminator) or all(
                name in m.get("required", ()) for m in resolved
            )
            if is_tag and all(values) and sum(map(len, values)) == len(set().union(*values)):
                return True
        return False

    def _resolved(self, node: Any) -> Mapping[str, Any]:
        for _ in range(8):
            if not isinstance(node, Mapping) or "$ref" not in node:
                break
            node = resolve(self._root, node["$ref"])
        return node if isinstance(node, Mapping) else {}

    def _require_tags(self, node: Mapping[str, Any], made: Schema) -> None:
        """Require properties that can only have their default, and tags of unions."""
        properties = node.get("properties")
        if not isinstance(properties, Mapping):
            return
        required = list(made.get("required", ()))
        for name, part in properties.items():
            is_constant = isinstance(part, Mapping) and _values(part) == _default(part)
            is_tag = name in self._tags.get(id(node), ())
            if (is_constant or is_tag) and name not in required:
                required.append(name)
        if required:
            made["required"] = required

    def _name_keys(self, node: Schema) -> None:
        """Write ``propertyNames`` with a list of names, or a pattern, as properties."""
        names = self._resolved(node.get("propertyNames", {}))
        if not names or node.keys() & {"properties", "patternProperties"}:
            return
        value = node.get("additionalProperties", True)
        if keys := names.get("enum") or ([names["const"]] if "const" in names else []):
            node["properties"] = {key: value for key in keys if isinstance(key, str)}
        elif "pattern" in names and not names.keys() - {"pattern", "type", "title", "description"}:
            node["patternProperties"] = {names["pattern"]: value}
        else:
            return
        node["additionalProperties"] = False
        del node["propertyNames"]

    def _close_unevaluated(self, node: Schema) -> None:
        """Write ``unevaluated…: false`` in words that llguidance has; objects are closed later."""
        composes = bool(node.keys() & {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
        for key, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if node.get(key) is False and not (composes and plain == "items"):
                del node[key]
                self.is_inexact = True
                if not composes:
                    node.setdefault(plain, False)

    def _relax_objects(self, node: Schema, place: str) -> None:
        patterns = node.get("patternProperties")
        is_open = node.get("additionalProperties", True) is not False
        if isinstance(patterns, Mapping):
            self.is_inexact = True  # a key may come twice
            if _is_refused({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}):
                self._drop(node, ["patternProperties"], place)
                node["additionalProperties"] = True
        counts = {key: node[key] for key in _COUNT_KEYS if key in node}
        if not counts:
            return
        named = dict.fromkeys(node.get("properties", {}), True)
        is_closed = not is_open or (bool(named) and "additionalProperties" not in node)
        shell = {"type": "object", "properties": named, "required": node.get("required", [])}
        if _is_refused({**shell, **counts, "additionalProperties": not is_closed}):
            self._drop(node, list(counts), place)
        elif not is_closed or patterns:
            self.is_inexact = True  # a key may come twice


def _is_rounded(value: Any) -> bool:
    """Return whether llguidance would write another number."""
    if isinstance(value, int):
        return abs(value) >= _MAX_EXACT
    parts = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list) and any(map(_is_rounded, parts))


def _says_nothing(key: str, value: Any, node: Mapping[str, Any]) -> bool:
    """Return whether a keyword allows all values anyhow."""
    if key in ("format", "pattern"):
        return bool(_types(node)) and "string" not in _types(node)
    if key == "propertyNames":
        return isinstance(value, Mapping) and value.get("type") == "string" and len(value) == 1
    if key in ("uniqueItems", "unevaluatedProperties", "unevaluatedItems"):
        return value is (key != "uniqueItems")
    return key in ("then", "else") and "if" not in node


def _tags(root: Mapping[str, Any]) -> dict[int, set[str]]:
    """Return the tag names of all members of unions with a discriminator, by the member's id."""
    tags: dict[int, set[str]] = {}
    for node in walk(root):
        for member in (*node.get("oneOf", ()), *node.get("anyOf", ())):
            target = member
            if isinstance(member, Mapping) and "$ref" in member:
                target = resolve(root, member["$ref"])
            if names := _tag_name(node.get("discriminator")):
                tags.setdefault(id(target), set()).update(names)
    return tags


def _tag_name(discriminator: object) -> set[str]:
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    return {name} if isinstance(name, str) else set()


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type", ())
    kinds = {kind} if isinstance(kind, str) else set(kind)
    return kinds | {"number"} if "integer" in kinds else kinds


def _values(schema: Mapping[str, Any]) -> set[str]:
    """Return the values that ``const`` or ``enum`` allow, as JSON."""
    if "const" in schema:
        return {json.dumps(schema["const"])}
    values = schema.get("enum")
    return {json.dumps(value) for value in values} if isinstance(values, list) else set()


def _default(schema: Mapping[str, Any]) -> set[str] | None:
    return {json.dumps(schema["default"])} if "default" in schema else None
