"""Constrained decoding: for any logits, the output fits the grammar."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any, cast

import jsonschema
import pytest
import torch

from hogwild_engine import Request, SamplingParams, make_workers
from hogwild_engine.api.errors import ConfigError, RequestError
from hogwild_engine.api.events import AnswerToken, Finished
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.engine import Engine
from hogwild_engine.text.call_grammar import call_grammar
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.constraint import GrammarCompiler, apply_token_mask
from hogwild_engine.text.tool_format import OURS

QUESTION = ({"role": "user", "content": "Say it."},)
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 40},
        "number": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["home", "work"]}},
    },
    "required": ["street", "number"],
}


def ask(engine: Engine, workers: int = 1, seed: int = 0, **settings: Any) -> Finished:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    request = Request(QUESTION, make_workers(workers), sampling=sampling, **settings)
    return engine.submit(request).result()


@pytest.fixture
def engine(tiny_engine: Callable[..., Engine]) -> Engine:
    return tiny_engine("llama", talkative=True)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_fits_its_schema_and_has_no_other_keys(engine: Engine, seed: int) -> None:
    finished = ask(engine, seed=seed, grammar=Grammar.json(ADDRESS), max_tokens=120)
    assert finished.finish_reason == "stop"
    answer = json.loads(finished.text)
    jsonschema.validate(answer, ADDRESS)
    assert answer.keys() <= ADDRESS["properties"].keys()


def test_an_answer_matches_its_regex(engine: Engine) -> None:
    finished = ask(engine, grammar=Grammar.regex("(red|blue) [0-9]{3}"))
    assert re.fullmatch("(red|blue) [0-9]{3}", finished.text)


def test_an_answer_fits_its_lark_grammar(engine: Engine) -> None:
    grammar = Grammar.lark('start: sum\nsum: NUM ("+" NUM){2,4}\nNUM: /[1-9]/')
    assert re.fullmatch(r"[1-9](\+[1-9]){2,4}", ask(engine, grammar=grammar).text)


def test_a_choice_is_one_of_its_texts_even_with_special_characters(engine: Engine) -> None:
    texts = ("a.b", "c*d/e\n", 'say "f"')
    for seed in range(6):
        assert ask(engine, seed=seed, grammar=Grammar.choice(*texts)).text in texts


def test_forced_tokens_take_no_forward_step(engine: Engine) -> None:
    finished = ask(engine, grammar=Grammar.choice("one two three four five six seven eight"))
    assert finished.text == "one two three four five six seven eight"
    assert finished.usage.answer_tokens >= 8
    assert finished.usage.forward_steps < finished.usage.answer_tokens


def test_an_answer_cut_at_max_tokens_finishes_by_length(engine: Engine) -> None:
    finished = ask(engine, grammar=Grammar.regex("x{500,600}"), max_tokens=9)
    assert finished.finish_reason == "length"
    assert finished.usage.answer_tokens == 9


def test_streamed_text_joins_to_the_answer(engine: Engine) -> None:
    request = Request(QUESTION, make_workers(1), grammar=Grammar.json(ADDRESS), max_tokens=100)
    events = list(engine.submit(request))
    shown = "".join(event.text for event in events if isinstance(event, AnswerToken))
    assert isinstance(events[-1], Finished)
    assert shown == events[-1].text


def test_the_answer_of_a_team_fits_the_grammar(engine: Engine) -> None:
    finished = ask(engine, 2, grammar=Grammar.json(ADDRESS), max_steps=12, max_tokens=120)
    jsonschema.validate(json.loads(finished.text), ADDRESS)


@pytest.mark.parametrize("layout", ["combined", "interleaved", "contiguous", "arrival"])
def test_each_worker_writes_one_paragraph_that_fits_the_worker_grammar(
    engine: Engine, layout: Any
) -> None:
    grammar = Grammar.regex("Idea: [a-z]{2,9}!")
    finished = ask(engine, 2, worker_grammar=grammar, layout=layout, max_steps=60, max_tokens=2)
    texts = {paragraph.worker: paragraph.text for paragraph in finished.paragraphs}
    assert len(finished.paragraphs) == len(texts) == 2
    assert all(re.fullmatch(grammar.text, text.strip()) for text in texts.values())
    assert all(paragraph.complete for paragraph in finished.paragraphs)


def test_a_token_mask_forbids_tokens_only_in_rows_with_a_constraint(chat: ChatTemplate) -> None:
    digits = chat.grammars.compile(Grammar.regex("[0-9]+"))
    logits = torch.zeros(3, 60_000)
    apply_token_mask(logits, [None, digits, None])
    assert not logits[0].isinf().any()
    assert not logits[2].isinf().any()
    allowed = (~logits[1].isinf()).nonzero()[:, 0].tolist()
    assert {chat.decode([token]) for token in allowed} == set("0123456789")


def test_an_invalid_grammar_is_refused_with_its_error(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"grammar: wanted .* got 'start: missing'"):
        engine.submit(Request(QUESTION, make_workers(1), grammar=Grammar.lark("start: missing")))


@pytest.mark.parametrize(("kind", "text"), [("yaml", "x"), ("regex", ""), ("json", "[]")])
def test_a_grammar_is_checked_at_construction(kind: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="grammar: wanted"):
        Grammar(kind, text)


def test_a_choice_takes_texts_one_by_one() -> None:
    for wrong in (["yes", "no"], 1, None):
        with pytest.raises(ConfigError, match=r"grammar: wanted texts.*choice\(\*texts\)"):
            Grammar.choice(cast(Any, wrong))


def test_joined_paragraphs_cannot_have_a_grammar() -> None:
    with pytest.raises(ConfigError, match="answer: wanted 'write'"):
        Request(QUESTION, make_workers(2), grammar=Grammar.regex("x"), answer="join")


# Answers that may call tools


_PROPERTIES = {"x": {"type": "string"}}
PAINT = {"name": "pa/int", "parameters": {"type": "object", "properties": _PROPERTIES}}
CALLED = '<tool_call>\n{"name": "pa/int", "arguments": {"x": "1"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALLED, True),
        (f"{CALLED}\n{CALLED}", True),
        (CALLED.replace('"x": "1"', '"y": "1"'), False),
        ('```json\n{\n  "name": "pa/int",\n  "arguments": {"x": "1"}\n}\n```', True),
        ('```json\n{\n  "name": "pa/int",\n  "arguments": {"y": "1"}\n}\n```', False),
        ('{"name": "pa/int", "arguments": {}}', True),
        ('**{"name": "pa/int", "arguments": {"x": "1"}}**', True),
        ('**{"name": "pa/int", "arguments": {"y": "1"}}**', False),
        ("**Bold** words", True),
        ('{{"name": "pa/int", "arguments": {"x": "1"}}}', True),
        ('{{"name": "pa/int", "arguments": {"x": "1"}}', True),
        ('{{"name": "pa/int", "arguments": {"y": "1"}}}', False),
        ('{"name": "Bob", "arguments": 3}', True),
        ("```python\nprint(1)\n```", True),
        ("Hello <b> {x} ```json\n{}", True),
        ("Hello <tool_call>", False),
        ('<tool_call>\n{"name": "other', False),
    ],
)
def test_text_is_free_and_calls_must_fit_their_schema(
    chat: ChatTemplate, text: str, fits: bool
) -> None:
    tools = [{"type": "function", "function": PAINT}]
    grammar = call_grammar(tools, "auto", OURS, chat.to_lark, parallel=True)
    constraint = chat.grammars.compile(grammar)
    try:
        for token in chat.encode(text):
            constraint.accept(token)
    except RuntimeError:
        assert not fits
    else:
        assert constraint.matcher.is_accepting() == fits


def test_an_invalid_worker_grammar_is_refused_and_frees_all_pages(
    engine: Engine, all_pages_free: Callable[[Engine], bool]
) -> None:
    for _ in range(3):
        with pytest.raises(RequestError, match="llguidance"):
            ask(engine, workers=2, worker_grammar=Grammar.regex("("), max_steps=4)
    assert all_pages_free(engine)


def test_a_complete_answer_finishes_by_stop_even_after_a_cut_parallel_phase(engine: Engine) -> None:
    """The context is full, which ends the parallel phase; the answer still fits."""
    question = ({"role": "user", "content": "word " * 200},)
    settings = {"max_steps": 400, "max_tokens": 90, "grammar": Grammar.choice("yes", "no")}
    request = Request(question, make_workers(2), **settings)
    finished = engine.submit(request).result()
    assert "length" in finished.ends.values()
    assert finished.text in ("yes", "no")
    assert finished.finish_reason == "stop"


TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}


def tool_with(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "t", "parameters": parameters}}


@pytest.mark.parametrize(
    "tools",
    [
        (TOOL, TOOL),
        (tool_with("x"),),
        (tool_with({"type": "string"}),),
        (tool_with({"anyOf": [{"type": "object"}, {"type": "array"}]}),),
    ],
    ids=["one name twice", "parameters no schema", "a string", "an object or an array"],
)
def test_tools_that_cannot_be_called_are_refused(tools: Any) -> None:
    with pytest.raises(ConfigError, match="tools"):
        Request(QUESTION, make_workers(1), tools=tools)


@pytest.mark.parametrize(
    "schema",
    [{"type": [{"a": 1}]}, {"type": "array", "minItems": float("inf")}],
    ids=["a type that is none", "no whole number"],
)
def test_invalid_schemas_are_refused(engine: Engine, schema: Any) -> None:
    with pytest.raises(RequestError):
        ask(engine, grammar=Grammar.json(schema))


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema"):
        Grammar("json", '{"a":' * 100_000)


def test_a_regex_with_a_slash_works_beside_tools(engine: Engine) -> None:
    for pattern in ("a/b", r"a\/b"):
        finished = ask(engine, grammar=Grammar.regex(pattern), tools=(TOOL,), tool_choice="auto")
        assert finished.text == "a/b" or finished.calls


# Grammars that nothing fits, or that are cut


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"[^\s\S]"),
        Grammar.lark("start: A\nA: /a/ & /b/"),
        Grammar.lark("start: start"),
        Grammar.json({"type": "integer", "minimum": 5, "maximum": 3}),
        Grammar.json({"$ref": "#"}),
    ],
    ids=["regex", "lark", "endless", "bounds", "itself"],
)
def test_a_grammar_that_nothing_fits_is_refused(engine: Engine, grammar: Grammar) -> None:
    with pytest.raises(RequestError, match=r"(grammar|schema): wanted"):
        ask(engine, grammar=grammar)
    with pytest.raises(RequestError, match=r"(grammar|schema): wanted"):
        ask(engine, 2, worker_grammar=grammar)


def test_a_grammar_that_cannot_be_finished_is_an_error(engine: Engine) -> None:
    dead = Grammar.lark('start: "a" B\nB: /x/ & /y/')
    with pytest.raises(RequestError, match="can be finished"):
        ask(engine, grammar=dead)
    with pytest.raises(RequestError, match="can be finished"):
        ask(engine, 2, worker_grammar=dead, max_steps=9, max_tokens=2)
    assert ask(engine, max_tokens=2).text  # the engine goes on


def test_more_items_than_the_budget_allows_finish_by_length(engine: Engine) -> None:
    many = Grammar.json({"type": "array", "items": {"type": "null"}, "minItems": 500})
    assert ask(engine, grammar=many, max_tokens=40).finish_reason == "length"


def test_an_answer_that_a_stop_string_cuts_is_told(engine: Engine) -> None:
    whole = ask(engine, grammar=Grammar.json({"const": {"country": "France"}}), max_tokens=40)
    assert (whole.finish_reason, whole.error) == ("stop", "")
    for schema, stop in (({"const": {"country": "France"}}, "ance"), ({"const": 1234}, "4")):
        cut = ask(engine, grammar=Grammar.json(schema), stop=(stop,), max_tokens=40)
        assert cut.finish_reason == "stop"
        assert "stop string" in cut.error


def test_a_paragraph_that_a_stop_string_cuts_is_not_complete(engine: Engine) -> None:
    grammar = Grammar.regex("one two three")
    for stop, complete in (("three", False), ("four", True)):
        finished = ask(engine, 2, worker_grammar=grammar, stop=(stop,), max_steps=20, max_tokens=2)
        assert {p.complete for p in finished.paragraphs} == {complete}


@pytest.mark.parametrize("stop", ["tool_call", "name", "gument", "12", "}"])
@pytest.mark.parametrize("choice", ["any", "t"])
def test_a_call_that_a_stop_string_cuts_is_not_complete(
    engine: Engine, stop: str, choice: str
) -> None:
    tool = tool_with({"properties": {"x": {"const": 1234}}, "required": ["x"]})
    finished = ask(engine, tools=(tool,), tool_choice=choice, stop=(stop,), max_tokens=60)
    assert not [call for call in finished.calls if not call.error]
    assert finished.finish_reason == "stop"
    assert finished.error or "stop string" in finished.calls[0].error


TWICE = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


def test_an_answer_that_breaks_what_no_grammar_holds_is_told(engine: Engine) -> None:
    with pytest.warns(UserWarning, match="uniqueItems") as warned:
        finished = ask(engine, grammar=Grammar.json(TWICE))
    assert len(warned) == 1
    assert finished.text == "[1, 1]"
    assert "non-unique" in finished.error
    with pytest.warns(UserWarning, match="uniqueItems"):
        finished = ask(engine, 2, worker_grammar=Grammar.json(TWICE), max_steps=20, max_tokens=2)
    assert finished.paragraphs
    assert not any(paragraph.complete for paragraph in finished.paragraphs)


def test_a_bad_tool_takes_no_other_with_it(engine: Engine) -> None:
    good = tool_with({"properties": {"x": {"const": 1}}, "required": ["x"]})
    for number, schema in enumerate([{"$ref": "#/$defs/none"}, {"properties": {"y": {"type": 5}}}]):
        bad = {"type": "function", "function": {"name": f"bad{number}", "parameters": schema}}
        with pytest.warns(UserWarning, match=f"bad{number}.* is not called"):
            finished = ask(engine, tools=(bad, good), tool_choice="any", max_tokens=60)
        assert {call.name for call in finished.calls} == {"t"}
        with pytest.warns(UserWarning, match="is not called"):
            assert ask(engine, tools=(bad,), max_tokens=3).text
        with pytest.raises(RequestError, match=f"bad{number}|schema"):
            ask(engine, tools=(bad, good), tool_choice=f"bad{number}")


def test_arguments_that_break_what_no_grammar_holds_are_told(engine: Engine) -> None:
    tool = tool_with({"properties": {"x": TWICE}, "required": ["x"]})
    with pytest.warns(UserWarning, match="uniqueItems True of x"):
        [call] = ask(engine, tools=(tool,), tool_choice="any", max_tokens=60).calls
    assert call.complete
    assert "non-unique" in call.error


@pytest.mark.parametrize("texts", [("a\nb", "c\td"), ("a/b\n", "\\n"), ("x\r\ny", "\x00 z")])
def test_choices_of_any_characters_work_beside_tools(
    engine: Engine, texts: tuple[str, ...]
) -> None:
    for grammar in (Grammar.choice(*texts), Grammar.regex("|".join(map(re.escape, texts)))):
        for tools in ((), (TOOL,)):
            finished = ask(engine, grammar=grammar, tools=tools)
            assert finished.text in texts or finished.calls


def test_a_worker_grammar_is_compiled_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At submission, in the caller's thread: compiling may take longer than many steps."""
    threads = []
    compile_grammar = GrammarCompiler.compile

    def spy(self: GrammarCompiler, grammar: Grammar) -> Any:
        threads.append(threading.current_thread())
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", spy)
    ask(engine, 4, worker_grammar=Grammar.regex("[a-z]{2,9}!"), max_steps=20, max_tokens=2)
    assert threads == [threading.current_thread()]
