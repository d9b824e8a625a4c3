"""JSON schemas of all drafts: what a grammar holds is held, and the rest is named and checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from grammar_writer import accepts, matcher_of, write
from hogwild_engine.api.errors import RequestError
from hogwild_engine.text.schema import grammar_schema

INTEGER: Any = {"type": "integer"}
STRING: Any = {"type": "string"}
NODE: Any = {
    "type": "object",
    "properties": {
        "value": INTEGER,
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "default": None},
    },
    "required": ["value"],
}
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat", "default": "cat"}, "lives": INTEGER},
    "required": ["lives"],
}
DOG = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "wolf"], "default": "dog"}, "name": STRING},
    "required": ["name"],
}
PETS: Any = {
    "$defs": {"cat": CAT, "dog": DOG},
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
}


def made(schema: Any) -> Any:
    return grammar_schema(json.dumps(schema))


def texts(schema: Any, count: int = 8) -> list[str]:
    matcher = matcher_of(made(schema).source)
    return [text for seed in range(count) if (text := write(matcher, seed)) is not None]


def takes(schema: Any, value: Any) -> bool:
    return accepts(matcher_of(made(schema).source), json.dumps(value))


HELD: dict[str, Any] = {
    "recursion": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "recursion with a description": {
        "$defs": {"node": {**NODE, "properties": {"n": {"$ref": "#/$defs/node", "title": "N"}}}},
        "type": "object",
        "properties": {"top": {"$ref": "#/$defs/node"}},
    }
    | {"required": []},
    "union with tags": PETS,
    "array": {"title": "numbers", "type": "array", "items": INTEGER},
    "literals": {"title": "colors", "enum": ["red", "blue", 3, None]},
    "array of literals": {"type": "array", "items": {"enum": ["a", "b"]}},
    "scalar": INTEGER,
    "nullable": {"type": ["string", "null"], "maxLength": 9},
    "mapping": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    "mapping of few names": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": INTEGER,
    },
    "mapping of matching names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{3}$"},
        "additionalProperties": INTEGER,
    },
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [STRING, INTEGER],
        "additionalItems": False,
        "minItems": 2,
    },
    "exclusive bound of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
    },
    "definitions of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": INTEGER},
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/n"}},
        "required": ["a"],
    },
    "properties beside a reference": {
        "$defs": {"a": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}},
        "$ref": "#/$defs/a",
        "properties": {"b": INTEGER},
        "required": ["b"],
    },
    "properties beside anyOf": {
        "type": "object",
        "properties": {"k": INTEGER},
        "required": ["k"],
        "anyOf": [
            {"properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": STRING}, "required": ["b"]},
        ],
    },
    "properties beside allOf": {
        "type": "object",
        "properties": {"k": INTEGER},
        "allOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"required": ["k"]}],
    },
    "a name that is required and not described": {
        "type": "object",
        "properties": {"a": INTEGER},
        "required": ["a", "z"],
    },
    "large bound": {"type": "integer", "exclusiveMinimum": 10**16},
    "passwords": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9]{6,9}$"},
    "unevaluated": {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
    "any": {},
    "multiple": {"type": "integer", "multipleOf": 7},
    "a date": {"type": "string", "format": "date"},
    "nothing but names": {"type": "object", "properties": {}},
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_grammar_holds_is_held(name: str) -> None:
    schema = HELD[name]
    constraint = made(schema)
    assert not constraint.left_out
    found = texts(schema)
    assert found
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    for text in found:
        validator.validate(json.loads(text))


LEFT_OUT: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    "minProperties": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "minProperties": 2,
        "maxProperties": 2,
    },
    "format 'password'": {"type": "string", "format": "password"},
    "format 'ipv4-or-so'": {"type": "string", "format": "ipv4-or-so"},
    "pattern": {"type": "string", "pattern": "^(?!foo)[a-z]{3}$"},
    "not": {"type": "integer", "not": {"minimum": 5}},
    "if": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": INTEGER},
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
    },
    "contains": {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}},
    "dependentRequired": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "dependentRequired": {"a": ["b"]},
    },
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "minimum": {"type": "integer", "minimum": 10**20},
    "const": {"const": 175928847299117063},
    "enum": {"enum": ["a", {"id": [175928847299117063]}]},
    "patternProperties": {"type": "object", "patternProperties": {"^x": INTEGER, "y$": STRING}},
    "beside $ref": {
        "$defs": {"node": {**NODE, "$ref": "#/$defs/other"}, "other": {"$ref": "#/$defs/node"}},
        "$ref": "#/$defs/node",
    },
}


@pytest.mark.parametrize("keyword", LEFT_OUT)
def test_what_a_grammar_lacks_is_named_and_checked(keyword: str) -> None:
    schema = {"type": "object", "properties": {"part": LEFT_OUT[keyword]}, "required": ["part"]}
    schema["$defs"] = LEFT_OUT[keyword].get("$defs", {})
    constraint = made(schema)
    assert any(keyword in text for text in constraint.left_out)
    assert constraint.check is not None
    validator = Draft202012Validator(schema)
    if keyword == "beside $ref":  # an endless definition, which a validator cannot follow
        return
    for text in texts(schema):
        is_told = bool(constraint.check.problem(text))
        assert is_told != validator.is_valid(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"enum": []},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#/$defs/missing"},
        {"type": "strng"},
        {"type": "string", "pattern": "(?<!x"},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_a_schema_that_nothing_fits_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="schema: wanted"):
        made(schema)


def test_no_bound_is_added() -> None:
    assert takes(INTEGER, 175928847299117063)
    assert takes(INTEGER, -(10**40))
    assert takes({"type": "array", "items": STRING}, ["x" * 500] * 100)
    assert takes({"type": "array", "items": {"type": "object", "properties": {"a": STRING}}}, [{}])
    assert takes({"type": "integer", "exclusiveMinimum": 10**16}, 10**16 + 1)


def test_objects_take_no_invented_keys_unless_the_schema_says_so() -> None:
    plain = {"type": "object", "properties": {"a": INTEGER}}
    assert not takes(plain, {"a": 1, "x": 1})
    assert not takes({"type": "object", "properties": {}}, {"x": 1})
    assert takes({**plain, "additionalProperties": True}, {"a": 1, "x": 1})
    assert takes({**plain, "additionalProperties": STRING}, {"a": 1, "x": "y"})
    assert takes({"type": "object"}, {"x": 1})
    inner = {"type": "array", "items": {"anyOf": [plain, {"type": "null"}]}}
    assert takes(inner, [{"a": 1}, None])
    assert not takes(inner, [{"x": 1}])


@pytest.mark.parametrize(
    "name",
    ["properties beside a reference", "properties beside anyOf", "properties beside allOf"],
)
def test_objects_of_several_schemas_are_closed_together(name: str) -> None:
    whole = {"k": 1, "a": 2} if "reference" not in name else {"a": 1, "b": 2}
    assert takes(HELD[name], whole)
    assert not takes(HELD[name], {**whole, "x": 1})


def test_tags_of_unions_are_always_written() -> None:
    assert takes(PETS, {"kind": "cat", "lives": 9})
    assert takes(PETS, {"kind": "wolf", "name": "x"})
    assert not takes(PETS, {"lives": 9})
    assert not takes(PETS, {"name": "x"})
    assert not takes({"anyOf": [CAT, {"type": "null"}]}, {"lives": 9})
    # Without a discriminator, an optional property of several values stays optional.
    assert takes(DOG, {"name": "x"})


def test_inner_nodes_of_a_recursive_schema_are_held() -> None:
    schema = HELD["recursion"]
    assert takes(schema, {"value": 1, "next": {"value": 2, "next": None}})
    assert not takes(schema, {"value": 1, "next": {"next": None}})
    assert not takes(schema, {"value": 1, "next": {"value": "x"}})


# Random schemas

NAMES = st.sampled_from(["a", "b", "c d", "é"])
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(lambda low: {"type": "number", "minimum": low}, st.integers(-9, 9)),
    st.builds(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}, st.integers(0, 4)),
    st.builds(lambda values: {"enum": values}, st.lists(st.integers() | st.text(), min_size=1)),
    st.builds(lambda value: {"const": value}, st.integers() | st.none() | st.text()),
    st.sampled_from(["date", "password", "uri-reference"]).map(
        lambda form: {"type": "string", "format": form}
    ),
)


def _object(
    properties: dict[str, Any], required: list[str], closed: bool | None, bounds: dict[str, int]
) -> dict[str, Any]:
    made = {"type": "object", "properties": properties, "required": list(dict.fromkeys(required))}
    return made | bounds | ({} if closed is None else {"additionalProperties": closed})


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            _object,
            st.dictionaries(NAMES, inner, max_size=3),
            st.lists(NAMES, max_size=2),
            st.sampled_from([None, None, True]),
            st.sampled_from([{}, {}, {"minProperties": 1}, {"maxProperties": 3}]),
        ),
        st.builds(
            lambda items, more: {"type": "array", "items": items, **more},
            inner,
            st.sampled_from([{}, {"minItems": 1}, {"uniqueItems": True, "maxItems": 3}]),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda members: {"anyOf": members}),
        st.lists(inner, min_size=1, max_size=3).map(lambda members: {"oneOf": members}),
        st.builds(
            lambda a, b: {"allOf": [a, b]},
            st.dictionaries(NAMES, inner, max_size=2).map(lambda p: {"properties": p}),
            st.dictionaries(NAMES, inner, max_size=2).map(lambda p: {"properties": p}),
        ),
        inner.map(lambda part: {"not": part}),
    )


@settings(max_examples=60, deadline=None)
@given(st.recursive(SCALARS, _nested, max_leaves=6))
def test_any_schema_is_held_or_told(schema: Any) -> None:
    try:
        constraint = made(schema)
    except RequestError:
        return
    matcher = matcher_of(constraint.source)
    for seed in range(3):
        if (text := write(matcher, seed)) is None:
            continue
        problem = constraint.check.problem(text) if constraint.check else ""
        assert problem or Draft202012Validator(schema).is_valid(json.loads(text)), text
