"""``with_structured_output``: a constrained model, and parsers that refuse a cut answer."""

from __future__ import annotations

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

from hogwild_agents.langchain.bindings import to_schema, to_tools
from hogwild_engine.api.errors import require

if TYPE_CHECKING:
    from hogwild_agents.langchain.chat_model import ChatHogwild

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
        [tool] = to_tools([target], strict)
        name = tool["function"]["name"]
        options = {"tool_choice": name, "parallel_tool_calls": False, "strict": strict}
        bound = llm.bind_tools([target], **options, **settings)
        parser: Any = _WholeCall(key_name=name, first_tool_only=True)
        if _is_class(schema):
            parser = _WholeCallObject(tools=[target], first_tool_only=True)
    else:
        response_format: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            json_schema = {"name": "answer", "schema": to_schema(target)}
            response_format = {"type": "json_schema", "json_schema": json_schema}
        bound = llm.bind(response_format=response_format, **settings)
        parser = _WholeObject(pydantic_object=target) if _is_class(schema) else _WholeJson()
    return _with_raw(bound, parser) if include_raw else bound | parser


def _is_class(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _with_raw(bound: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsing = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsing.with_fallbacks([failed], exception_key="parsing_error")


def _check_whole(result: list[Generation]) -> None:
    """Raise if an answer was cut: LangChain's lenient parsers would silently complete it."""
    for generation in result:
        if isinstance(generation, ChatGeneration):
            message = generation.message
            if message.response_metadata.get("finish_reason") == "length":
                reason = "the answer was cut at max_tokens: allow more, or ask for less"
                raise OutputParserException(reason, llm_output=str(message.text))


class _Whole(BaseLLMOutputParser[Any]):
    """A LangChain parser that refuses an answer that was cut."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _WholeJson(_Whole, JsonOutputParser): ...


class _WholeObject(_Whole, PydanticOutputParser): ...


class _WholeCall(_Whole, JsonOutputKeyToolsParser): ...


class _WholeCallObject(_Whole, PydanticToolsParser): ...
