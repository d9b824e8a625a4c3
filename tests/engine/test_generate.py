"""Invariant 1: one greedy worker writes what ``model.generate`` writes, token for token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from generation import generated
from hogwild_engine import Engine, EngineConfig, Request, SamplingParams, make_workers
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import plain, sampled_by_writer
from tiny import FAMILIES, tiny_model

LONE = make_workers(1)
QUESTIONS = {
    "short": "Hi",
    "odd": "What is the capital of France, and why is it not Lyon?",
    "several prefill steps": "Tell me about these: " + ", ".join(f"item {i}" for i in range(37)),
}


def check_equal(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, question: str, wanted: list[int], **more: Any
) -> None:
    """The engine samples the tokens ``wanted`` and reports their text and the finish reason."""
    request = Request(
        ({"role": "user", "content": question},),
        workers=LONE,
        max_tokens=len(wanted),
        sampling=SamplingParams(temperature=0, **more),
    )
    with sampled_by_writer(monkeypatch) as sampled:
        done = engine.submit(request).result(60)
    assert sampled == {0: wanted}
    stopped = wanted[-1] in engine.chat.eos_ids
    assert done.finish_reason == ("stop" if stopped else "length")
    assert done.usage.answer_tokens == len(wanted)
    assert done.text == engine.chat.decode([t for t in wanted if t not in engine.chat.special_ids])


def prompt_of(engine: Engine, question: str) -> list[int]:
    return engine.chat.render([{"role": "user", "content": question}])


@pytest.mark.parametrize("question", ["odd", "several prefill steps"])
def test_the_embedded_model_writes_what_generate_writes(
    monkeypatch: pytest.MonkeyPatch, smollm: Engine, smollm_model: Any, question: str
) -> None:
    with plain(smollm_model) as model:
        wanted = generated(model, prompt_of(smollm, QUESTIONS[question]), 20)
    check_equal(monkeypatch, smollm, QUESTIONS[question], wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("question", list(QUESTIONS))
def test_every_family_writes_what_generate_writes(
    monkeypatch: pytest.MonkeyPatch,
    tiny_engine: Callable[[str], Engine],
    family: str,
    question: str,
) -> None:
    engine = tiny_engine(family)
    wanted = generated(tiny_model(family), prompt_of(engine, QUESTIONS[question]), 20)
    check_equal(monkeypatch, engine, QUESTIONS[question], wanted)


def test_the_repetition_penalty_is_that_of_generate(
    monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate, tokenizer: Any
) -> None:
    """Tokens of the prompt count as repeated: the model here tends to write them again."""
    prompt = chat.render([{"role": "user", "content": QUESTIONS["odd"]}])
    loud = dict.fromkeys(set(prompt) - chat.added_ids, 2.5)
    model = tiny_model("qwen3", loud=loud)
    wanted = generated(model, prompt, 40, repetition_penalty=1.4)
    plain_text = generated(model, prompt, 40)
    assert set(plain_text) & set(prompt)
    assert wanted != plain_text
    config = EngineConfig(model="tiny", num_pages=32, page_size=8)
    with Engine(config, loaded=Pretrained(model, tokenizer)) as engine:
        check_equal(monkeypatch, engine, QUESTIONS["odd"], wanted, repetition_penalty=1.4)


def test_the_end_of_turn_is_that_of_generate(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    end = tokenizer.eos_token_id
    config = EngineConfig(model="tiny", num_pages=32, page_size=8)
    for seed in range(20):
        model = tiny_model("llama", seed, loud={end: 2.0})
        with Engine(config, loaded=Pretrained(model, tokenizer)) as engine:
            with plain(model):
                wanted = generated(model, prompt_of(engine, "Hi"), 40)
            if 1 < len(wanted) < 40:
                check_equal(monkeypatch, engine, "Hi", wanted)
                return
    pytest.fail("no seed samples an end of turn after some tokens")


def test_the_whole_context_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tiny_engine: Callable[[str], Engine]
) -> None:
    """Up to the last token that fits, far beyond the window, over many pages."""
    engine = tiny_engine("mistral")
    prompt = prompt_of(engine, QUESTIONS["several prefill steps"])
    wanted = generated(tiny_model("mistral"), prompt, engine.context_len - len(prompt))
    check_equal(monkeypatch, engine, QUESTIONS["several prefill steps"], wanted)
