"""``with_structured_output``: a constrained model, and parsers that refuse a cut answer."""

from __future__ import annotations

import re
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import (
    BaseLLMOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from hogwild_agents.langchain.bindings import describes_object, to_schema, to_tools
from hogwild_engine.api.errors import require

if TYPE_CHECKING:
    from hogwild_agents.langchain.chat_model import ChatHogwild

_VALUE = "value"
"""The argument of a call that stands for something else than an object."""
# Keys that name a tool in LangChain's forms of tools.
_NAMES = frozenset({"title", "name", "type_name", "toolSpec", "function"})

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured(
    llm: ChatHogwild,
    schema: Any,
    method: Method,
    *,
    include_raw: bool,
    strict: bool | None,
    **settings: Any,
) -> Runnable[Any, Any]:
    """See `ChatHogwild.with_structured_output`.

    Raises:
        ConfigError: the method is unknown, or the schema cannot be converted.
    """
    known = method in ("json_schema", "function_calling", "json_mode")
    require(known, "method", "'json_schema', 'function_calling' or 'json_mode'", method)
    require(schema is not None or method == "json_mode", "schema", "a class or a schema", schema)
    target: Any = schema
    settings["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": schema}
    if method == "function_calling":
        bound, parser = _call(llm, target, strict, settings)
    else:
        response_format: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            json_schema = {"name": "answer", "schema": to_schema(target)}
            response_format = {"type": "json_schema", "json_schema": json_schema}
        bound = llm.bind(response_format=response_format, **settings)
        parser = _WholeObject(pydantic_object=target) if _is_class(schema) else _WholeJson()
    return _with_raw(bound.bind(include_raw=True), parser) if include_raw else bound | parser


def _call(
    llm: ChatHogwild, target: Any, strict: bool | None, settings: dict[str, Any]
) -> tuple[Any, Runnable[Any, Any]]:
    """Return the model that must call a tool with this schema, and the parser of its call.

    Arguments are always an object: any other value is its one argument.
    """
    plain = to_schema(target)
    is_object = describes_object(plain)
    tool: Any = target
    model: Any = target
    is_class = _is_class(target)
    if not is_object or (isinstance(target, dict) and not target.keys() & _NAMES):
        parameters = plain if is_object else _wrapped(plain)
        name = re.sub("[^a-zA-Z0-9_-]+", "_", str(plain.get("title", "answer")))
        function = {"name": name, "description": plain.get("description", "")}
        tool = {"type": "function", "function": {**function, "parameters": parameters}}
    [made] = to_tools([tool], strict)
    name = made["function"]["name"]
    options = {"tool_choice": name, "parallel_tool_calls": False, "strict": strict}
    bound = llm.bind_tools([tool], **options, **settings)
    parser: Runnable[Any, Any] = _WholeCall(key_name=name, first_tool_only=True)
    if not is_object:
        value = parser | itemgetter(_VALUE)
        return bound, value | model.model_validate if is_class else value
    if is_class:
        parser = _WholeCallObject(tools=[model], first_tool_only=True)
    return bound, parser


def _wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with a value of ``schema``; references lead to its root."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in definitions}
    return {
        "type": "object",
        "properties": {_VALUE: rest},
        "required": [_VALUE],
        **definitions,
    }


def _is_class(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _with_raw(bound: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsing = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    # The model comes first: it gets the settings of a call.
    raw = bound | RunnableMap(raw=RunnablePassthrough())
    return raw | parsing.with_fallbacks([failed], exception_key="parsing_error")


def _check_whole(result: list[Generation]) -> None:
    """Raise if an answer was cut or is invalid: LangChain's lenient parsers would complete it."""
    for generation in result:
        if isinstance(generation, ChatGeneration):
            message = generation.message
            reason = message.response_metadata.get("error")
            if message.response_metadata.get("finish_reason") == "length":
                reason = "the answer was cut at max_tokens: allow more, or ask for less"
            if reason:
                raise OutputParserException(reason, llm_output=str(message.text))


class _Whole(BaseLLMOutputParser[Any]):
    """A LangChain parser that refuses an answer that was cut or is invalid."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _WholeJson(_Whole, JsonOutputParser): ...


class _WholeObject(_Whole, PydanticOutputParser): ...


class _WholeCall(_Whole, JsonOutputKeyToolsParser): ...


class _WholeCallObject(_Whole, PydanticToolsParser): ...
