"""What needs a model with some ability: run by ``make test-models MODEL=…``."""

from __future__ import annotations

import os

import pytest
import torch
from langchain_core.messages import AIMessage

from hogwild_agents import ChatHogwild
from hogwild_engine import Engine, Request, SamplingParams, make_workers
from hogwild_engine.loading.pretrained import load_pretrained
from recipes import agent_loop
from recipes.function_task import pack_message
from recipes.starter_tasks import STARTER_TASKS
from recipes.transcript import extract_functions

pytestmark = [pytest.mark.model, pytest.mark.timeout(3000)]

MODEL = os.environ.get("HOGWILD_TEST_MODEL", "Qwen/Qwen2.5-Coder-1.5B-Instruct")
QUESTION = ({"role": "user", "content": "Which city is the capital of France?"},)
TASKS = STARTER_TASKS[:4]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return ChatHogwild(model=MODEL, dtype="float32").engine


def test_one_worker_decodes_what_generate_does(engine: Engine) -> None:
    request = Request(
        QUESTION, make_workers(1), max_tokens=24, sampling=SamplingParams(temperature=0)
    )
    prompt = engine.chat.render(QUESTION)
    with torch.inference_mode():
        model = load_pretrained(engine.config).model
        output = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
    wanted = [
        token for token in output[len(prompt) :].tolist() if token not in engine.chat.special_ids
    ]
    assert engine.submit(request).result().text == engine.chat.decode(wanted)


def test_four_workers_write_four_functions_and_none_twice(engine: Engine) -> None:
    request = Request(
        ({"role": "user", "content": pack_message(TASKS)},),
        make_workers(4),
        protocol="code",
        answer="join",
        max_steps=120,
        sampling=SamplingParams(temperature=0),
    )
    finished = engine.submit(request).result()
    written = extract_functions(finished.text)
    assert {task.entry_point for task in TASKS} <= written.keys()
    assert len({paragraph.worker for paragraph in finished.paragraphs}) == 4
    for task in TASKS:
        assert finished.text.count(f"def {task.entry_point}(") == 1


def test_a_team_answers_with_everything_in_view() -> None:
    llm = ChatHogwild(
        model=MODEL, dtype="float32", workers=2, temperature=0, max_steps=48, max_tokens=64
    )
    reply = llm.invoke("Which cities are the capitals of France, Italy and Spain?")
    assert all(city in reply.text for city in ("Paris", "Rome", "Madrid"))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_agent_answers_from_what_its_tools_give(workers: int) -> None:
    llm = ChatHogwild(
        model=MODEL,
        dtype="bfloat16",
        workers=workers,
        temperature=0,
        max_steps=16,
        max_tokens=64,
    )
    for question, answer in zip(agent_loop.QUESTIONS, ("395", "Paris", "59"), strict=True):
        _, asked, result, reply = agent_loop.ask(llm, question)
        assert isinstance(asked, AIMessage)
        assert len(asked.tool_calls) == 1
        assert answer in result.text
        assert answer in reply.text
