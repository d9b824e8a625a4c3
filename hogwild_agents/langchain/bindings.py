"""From what is bound to a model (tools, tool choice, response format) to the engine's request.

Knows LangChain's and OpenAI's forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as make_tool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from hogwild_agents.langchain.messages import to_conversation
from hogwild_engine.api.errors import require
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.api.request import Request, Worker
from hogwild_engine.text.schema_drafts import resolve, walk

Tool = dict[str, Any] | type | Callable | BaseTool

_FORCED = frozenset({"any", "required"})

# What tells a JSON schema from other dicts, such as OpenAI's description of a function.
_SCHEMA_KEYS = frozenset(
    {"type", "properties", "items", "prefixItems", "enum", "const", "anyOf", "oneOf", "allOf"}
    | {"$ref", "$defs", "definitions", "additionalProperties", "required"}
)

_JSON = "Answer with a JSON object and nothing else."
_SCHEMA = "Answer with nothing but JSON that fits this schema:\n{schema}"
_FINAL = "Your final answer must be nothing but JSON that fits this schema:\n{schema}"


def to_request(
    messages: Sequence[BaseMessage],
    workers: tuple[Worker, ...],
    settings: dict[str, Any],
    *,
    tools: Sequence[Tool] | None = None,
    tool_choice: object = None,
    parallel_tool_calls: bool | None = None,
    strict: bool | None = None,
    response_format: object = None,
) -> Request:
    """Return the engine's request for a call.

    Args:
        messages: the input.
        workers: the team.
        settings: further fields of the request.
        tools: see `ChatHogwild.bind_tools`.
        tool_choice: any of the forms that `to_choice` takes.
        parallel_tool_calls: default: only if the model itself chooses to call.
        strict: write schemas in OpenAI's strict form.
        response_format: see `to_format`; a grammar among the settings takes precedence.

    Raises:
        HogwildError: the messages or settings cannot be served.
    """
    turns, history = to_conversation(messages, [worker.name for worker in workers])
    given = to_tools(tools or (), strict)
    answer = to_format(response_format, has_tools=bool(given))
    if answer is not None:
        turns = add_rule(turns, answer.rule)
        settings = {**settings, "grammar": settings["grammar"] or answer.grammar}
    choice = to_choice(tool_choice, [tool["function"]["name"] for tool in given])
    # A small model that is forced to call repeats its calls if several are allowed.
    several = choice == "auto" if parallel_tool_calls is None else parallel_tool_calls
    return Request(
        turns,
        workers,
        history,
        tools=tuple(given),
        tool_choice=choice,
        parallel_tool_calls=several,
        **settings,
    )


def to_tools(tools: Sequence[Tool], strict: bool | None = None) -> list[dict[str, Any]]:
    """Convert functions, pydantic classes, tools and schemas to OpenAI's form.

    Raises:
        ConfigError: one of them cannot be converted.
    """
    several = isinstance(tools, Sequence) and not isinstance(tools, str)
    require(several, "tools", "a list of tools", tools)
    return [_to_tool(tool, strict) for tool in tools]


def _to_tool(tool: Tool, strict: bool | None) -> dict[str, Any]:
    try:
        made = convert_to_openai_tool(tool, strict=strict)
        function = made.get("function")
        if isinstance(function, dict) and _has_gap(function.get("parameters")):
            whole = _recursive_schema(_arguments_class(tool))
            function["parameters"] = whole or function["parameters"]
        json.dumps(made)
    except Exception as error:
        require(False, "tools", "functions, classes, tools or schemas", tool, str(error))
        raise AssertionError from error
    is_function = isinstance(function, dict) and isinstance(function.get("name"), str)
    todo = "a local model has no provider's built-in tools"
    require(is_function, "tools", "tools that are functions", made, todo)
    return made


def _arguments_class(tool: Tool) -> object:
    """Return the class that describes a tool's arguments, if there is one."""
    if isinstance(tool, type | dict):
        return tool
    if isinstance(tool, BaseTool):
        return tool.tool_call_schema
    return make_tool(tool).tool_call_schema if isfunction(tool) and tool.__doc__ else None


def _has_gap(schema: object) -> bool:
    """Return whether a part of a schema is empty, as LangChain leaves recursive parts."""
    return any(not node for node in walk(schema))


def _recursive_schema(model: object) -> dict[str, Any] | None:
    """Return the schema of a pydantic class that contains itself; ``None`` for all others.

    LangChain writes definitions out where they are used, and nothing where that has no end.
    """
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return None
    schema = model.model_json_schema()
    if not any(_reaches_itself(schema, name) for name in schema.get("$defs", ())):
        return None
    return schema


def _reaches_itself(schema: Mapping[str, Any], name: str) -> bool:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for node in walk(schema["$defs"].get(waiting.pop())):
            target = str(node.get("$ref", "")).removeprefix("#/$defs/")
            if target == name:
                return True
            if target and target not in seen:
                seen.add(target)
                waiting.append(target)
    return False


def to_choice(choice: object, names: Sequence[str]) -> str:
    """Convert LangChain's, OpenAI's or Anthropic's ``tool_choice`` to the engine's.

    Raises:
        ConfigError: it names no tool.
    """
    if isinstance(choice, Mapping):
        function = choice.get("function")
        named = function if isinstance(function, Mapping) else choice
        choice = named.get("name") or choice.get("type")
    plain = choice is None or isinstance(choice, str | bool)
    require(plain, "tool_choice", "a name, 'auto', 'any' or 'none'", choice)
    if choice is None or choice == "auto":
        return "auto"
    if choice is False or choice == "none":
        return "none"
    if choice is True or (choice in _FORCED and choice not in names):
        return "any"
    wanted = f"'auto', 'any', 'none' or one of {list(names)}"
    require(choice in names, "tool_choice", wanted, choice)
    return str(choice)


class Format(NamedTuple):
    """The format of an answer.

    Args:
        grammar: constrains the answer.
        rule: describes the format to the model.
    """

    grammar: Grammar
    rule: str


def to_format(response_format: object, *, has_tools: bool) -> Format | None:
    """Return the format that a ``response_format`` asks for.

    Args:
        response_format: OpenAI's dict, a JSON schema, a pydantic class or a TypedDict.
        has_tools: the answer may also be a call.

    Raises:
        ConfigError: it is none of these.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Format(Grammar.json({"type": "object"}), _JSON)
    schema = to_schema(response_format)
    text = json.dumps(schema, ensure_ascii=False)
    return Format(Grammar.json(schema), (_FINAL if has_tools else _SCHEMA).format(schema=text))


def to_schema(response_format: Any) -> dict[str, Any]:
    """Return the JSON schema in a ``response_format``.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        wanted = "a JSON schema under json_schema.schema"
        require(isinstance(schema, dict), "response_format", wanted, response_format)
        return dict(schema or {})
    if isinstance(response_format, dict) and _is_schema(response_format):
        return _plain(response_format)
    if whole := _recursive_schema(response_format):
        return whole
    try:
        made = convert_to_json_schema(response_format)
        json.dumps(made)
        return made
    except Exception as error:
        wanted = "a response_format of OpenAI's, a JSON schema, or a class"
        require(False, "response_format", wanted, response_format, str(error))
        raise AssertionError from error


def describes_object(schema: Mapping[str, Any]) -> bool:
    """Return whether all values of a schema are objects."""
    node: Any = schema
    while isinstance(node, Mapping) and "$ref" in node:
        node = resolve(schema, node["$ref"])
    if not isinstance(node, Mapping) or node.keys() & {"enum", "const", "items", "prefixItems"}:
        return False
    members = [m for key in ("anyOf", "oneOf") for m in node.get(key, ())]
    if "type" not in node and members and "properties" not in node:
        inner = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return all(isinstance(m, Mapping) and describes_object({**m, **inner}) for m in members)
    return node.get("type", "object") == "object"


def _is_schema(given: dict[str, Any]) -> bool:
    return bool(given.keys() & _SCHEMA_KEYS) and given.get("type") != "function"


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        require(False, "response_format", "a JSON schema", list(schema), str(error))
    return schema


def add_rule(messages: Sequence[dict[str, Any]], rule: str) -> tuple[dict[str, Any], ...]:
    """Append a rule to the last human message."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return (*messages, {"role": "user", "content": rule})
    place = places[-1]
    changed = {**messages[place], "content": f"{messages[place]['content']}\n\n{rule}"}
    return (*messages[:place], changed, *messages[place + 1 :])
