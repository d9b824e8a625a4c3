"""Tools, objects and settings in every form of LangChain's, on a model without ability."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Annotated, Any, TypedDict, cast

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import StructuredTool, tool
from pydantic import BaseModel

from hogwild_agents import ChatHogwild, ConfigError, Grammar
from hogwild_agents.langchain import errors
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.role_order import alternating_roles
from hogwild_engine.text.tool_format import OURS

LONG: Any = {"max_tokens": 160}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adder(BaseModel):
    """Add two numbers."""

    a: int
    b: int


class Sum(TypedDict):
    """Two numbers."""

    a: Annotated[int, ..., "the first"]
    b: Annotated[int, ..., "the second"]


SCHEMA = {
    "title": "sum",
    "description": "Two numbers.",
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ANTHROPIC = {"name": "sum", "description": "Add.", "input_schema": SCHEMA}
FORMS = [add, tool(add), StructuredTool.from_function(add), Adder, Sum, SCHEMA, ANTHROPIC]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: getattr(form, "__name__", "given"))
@pytest.mark.parametrize("strict", [None, True])
def test_a_tool_may_come_in_any_form(tiny_llm: ChatHogwild, form: Any, strict: Any) -> None:
    bound = tiny_llm.bind_tools([form], tool_choice="any", strict=strict)
    [call] = bound.invoke("Hello", **LONG).tool_calls
    assert {type(value) for value in call["args"].values()} == {int}
    assert call["args"].keys() == {"a", "b"}


def test_a_choice_that_names_no_tool_is_refused(tiny_llm: ChatHogwild) -> None:
    with pytest.raises(errors.ConfigError, match=r"tool_choice: wanted .*'add'.* got 'sub'"):
        tiny_llm.bind_tools([add], tool_choice="sub")
    with pytest.raises(errors.ConfigError, match="tools: wanted at least one"):
        tiny_llm.bind_tools([], tool_choice="any").invoke("Hello")


def test_several_calls_may_stand_in_one_answer(tiny_llm: ChatHogwild) -> None:
    bound = tiny_llm.bind_tools([Adder], tool_choice="any", parallel_tool_calls=True)
    counts = set()
    for seed in range(6):
        calls = bound.invoke("Hello", seed=seed, max_tokens=200).tool_calls
        assert len({call["id"] for call in calls}) == len(calls)
        counts.add(len(calls))
    assert max(counts) > 1
    single = tiny_llm.bind_tools([Adder], tool_choice="any")
    assert len(single.invoke("Hello", **LONG).tool_calls) == 1


@pytest.mark.parametrize("schema", [Adder, Sum, SCHEMA], ids=["pydantic", "typeddict", "json"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_objects_come_with_their_message_where_asked(
    tiny_llm: ChatHogwild, schema: Any, method: Any
) -> None:
    llm = tiny_llm.with_structured_output(schema, method=method, include_raw=True)
    result = llm.invoke("Hello", **LONG)
    assert result["parsing_error"] is None
    assert isinstance(result["raw"], AIMessage)
    found = result["parsed"].model_dump() if schema is Adder else result["parsed"]
    assert found.keys() == {"a", "b"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_object_that_was_cut_is_an_error(tiny_llm: ChatHogwild, method: Any) -> None:
    llm = tiny_llm.with_structured_output(Adder, method=method)
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        llm.invoke("Hello", max_tokens=3)
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        list(llm.stream("Hello", max_tokens=3))
    raw = tiny_llm.with_structured_output(Adder, method=method, include_raw=True, max_tokens=3)
    result = cast(Any, raw.invoke("Hello"))
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)


def test_a_response_format_binds_the_answer_beside_tools(tiny_llm: ChatHogwild) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    bound = tiny_llm.bind_tools([add], response_format=schema)
    for seed in range(4):
        reply = bound.invoke("Hello", seed=seed, **LONG)
        assert reply.tool_calls or Adder.model_validate_json(reply.text)
    assert Adder.model_validate_json(
        tiny_llm.bind_tools([], response_format=schema).invoke("Hello", **LONG).text
    )


def test_an_agent_answers_with_an_object(tiny_llm: ChatHogwild) -> None:
    llm = tiny_llm.model_copy(update={"max_tokens": 160})
    agent = create_agent(llm, [], response_format=Adder)
    assert isinstance(agent.invoke(hello())["structured_response"], Adder)


def hello() -> Any:
    return {"messages": [HumanMessage("Hello")]}


def test_an_agent_with_middleware_calls_its_tool(tiny_llm: ChatHogwild) -> None:
    llm = tiny_llm.model_copy(update={"max_tokens": 160})
    agent = create_agent(
        llm, [add], middleware=[ModelCallLimitMiddleware(run_limit=2, exit_behavior="end")]
    )
    kinds = [message.type for message in agent.invoke(hello())["messages"]]
    assert kinds[:2] == ["human", "ai"]


def test_chains_retries_fallbacks_and_configurable_fields_work(tiny_llm: ChatHogwild) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "Name a {thing}.")])
    choice = tiny_llm.bind(grammar=Grammar.choice("red", "blue"))
    chain = prompt | choice | StrOutputParser()
    assert chain.invoke({"thing": "colour"}) in ("red", "blue")
    assert "".join(chain.stream({"thing": "colour"})) in ("red", "blue")
    assert choice.with_retry().invoke("x").text in ("red", "blue")
    broken = tiny_llm.bind(grammar=Grammar.lark("start: missing"))
    assert broken.with_fallbacks([choice]).invoke("x").text in ("red", "blue")
    field = ConfigurableField(id="budget")
    short = tiny_llm.configurable_fields(max_tokens=field).with_config(configurable={"budget": 1})
    assert cast(AIMessage, short.invoke("x")).usage_metadata
    assert cast(Any, short.invoke("x")).usage_metadata["output_tokens"] == 1


def test_a_model_can_be_copied_and_pickled(tiny_llm: ChatHogwild) -> None:
    llm = tiny_llm.model_copy(update={"grammar": Grammar.choice("red")})
    for again in (copy.deepcopy(llm), copy.copy(llm), pickle.loads(pickle.dumps(llm))):
        assert again.invoke("x").text == "red"
        assert again.engine is llm.engine


def test_the_environment_names_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOGWILD_MODEL", "org/other")
    monkeypatch.setenv("HOGWILD_DEVICE", "cpu")
    llm = ChatHogwild()
    assert (llm.model, llm.device) == ("org/other", "cpu")
    assert ChatHogwild(model="smollm2-135m").model == "smollm2-135m"


def test_probabilities_come_on_request(tiny_llm: ChatHogwild) -> None:
    reply = tiny_llm.invoke("x", logprobs=True, max_tokens=4, temperature=0)
    tokens = reply.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).startswith(reply.text)
    assert all(token["logprob"] <= 0 for token in tokens)
    assert "logprobs" not in tiny_llm.invoke("x").response_metadata


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bytes_of_tokens_join_to_the_answer(tiny_llm: ChatHogwild, workers: int) -> None:
    """A parrot takes several tokens: none of them is a character."""
    text = "a 🦜é"
    llm = tiny_llm.bind(grammar=Grammar.choice(text), workers=workers, logprobs=True, max_steps=2)
    whole: Any = None
    for chunk in llm.stream("x"):
        whole = chunk if whole is None else whole + chunk
    for reply in (llm.invoke("x"), whole):
        tokens = reply.response_metadata["logprobs"]["content"]
        written = b"".join(bytes(token["bytes"]) for token in tokens)
        assert written.decode().startswith(text)
        assert any("\ufffd" in token["token"] for token in tokens)
        json.dumps(reply.response_metadata)


def test_tools_count_in_the_prompt(tiny_llm: ChatHogwild) -> None:
    messages: list[BaseMessage] = [HumanMessage("Hello")]
    plain = tiny_llm.get_num_tokens_from_messages(messages)
    tooled = tiny_llm.get_num_tokens_from_messages(messages, tools=[add])
    reply = tiny_llm.bind_tools([add]).invoke(messages)
    assert reply.usage_metadata
    assert plain < tooled == reply.usage_metadata["input_tokens"]


# Templates


def test_the_form_of_calls_is_read_from_the_template(tokenizer: Any) -> None:
    template = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "({{ c.function.arguments | tojson }})</call>{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    form = ChatTemplate(made, "made").tool_format
    assert (form.opening, form.between, form.closing) == ("<call>", "(", ")</call>")
    assert (form.separator, form.native) == ("", True)
    assert ChatTemplate(tokenizer, "smollm2").tool_format == OURS


def test_strict_templates_get_turns_in_alternation(tokenizer: Any) -> None:
    made = copy.deepcopy(tokenizer)
    made.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    chat = ChatTemplate(made, "strict")
    assert chat.decode(chat.render(turns)) == "[user]s\n\na\n\nb[assistant]c[user]d"
    mild, *_ = alternating_roles(turns)
    assert [turn["role"] for turn in mild] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda llm: Grammar.choice(),
        lambda llm: Grammar.json(cast("Any", "x")),
        lambda llm: Grammar.json({"a": object()}),
        lambda llm: llm.bind_tools(5),
        lambda llm: llm.bind_tools([add], tool_choice=["add"]),
        lambda llm: llm.with_structured_output(5),
        lambda llm: llm.make_call([HumanMessage("x")], worker_grammar=Grammar.regex("a")),
    ],
)
def test_misuse_is_one_of_our_errors(misuse: Any) -> None:
    with pytest.raises(ConfigError):
        misuse(ChatHogwild(workers=1))
