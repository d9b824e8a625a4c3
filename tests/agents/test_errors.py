"""Errors are ours and LangChain's at once, and name what was wanted, what came and what to do."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import fields
from typing import Any, cast

import pytest
from langchain_core import exceptions as core

import hogwild_agents
import hogwild_engine
from hogwild_agents import ChatHogwild, Worker
from hogwild_agents.langchain import errors
from hogwild_engine import EngineConfig, Request, SamplingParams
from hogwild_engine.api import errors as engine


@pytest.mark.parametrize(
    ("name", "kin", "is_retryable"),
    [
        ("ConfigError", core.ModelInvalidRequestError, False),
        ("RequestError", core.ModelInvalidRequestError, False),
        ("WorkerNameError", core.ModelInvalidRequestError, False),
        ("PromptTooLongError", core.ContextOverflowError, False),
        ("ModelError", core.ModelError, False),
        ("ModelNotFoundError", core.ModelNotFoundError, False),
        ("NoChatTemplateError", core.ModelInvalidRequestError, False),
        ("EngineClosedError", core.ModelAPIError, True),
        ("SessionCancelledError", core.ModelError, False),
        ("SessionFailedError", core.ModelAPIError, True),
    ],
)
def test_an_engine_error_becomes_ours_beside_its_kin(
    name: str, kin: type[core.ModelError], is_retryable: bool
) -> None:
    of_engine = getattr(engine, name)("what was wanted")
    ours = errors.translate(of_engine)
    assert type(ours) is getattr(errors, name)
    assert getattr(hogwild_agents, name) is type(of_engine)
    assert isinstance(ours, type(of_engine))
    assert isinstance(ours, kin)
    assert ours.is_retryable is is_retryable
    assert str(ours) == "what was wanted"
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)


def test_a_refused_model_still_says_which_check() -> None:
    ours = errors.translate(engine.ModelRefusedError("views", "0.3 > 0.1"))
    assert isinstance(ours, hogwild_agents.ModelRefusedError)
    assert (ours.check, ours.detail) == ("views", "0.3 > 0.1")


def test_translation_chains_the_cause_and_leaves_ours_alone() -> None:
    with pytest.raises(errors.ModelError) as caught, errors.translated():
        raise engine.ModelError("x")
    assert type(caught.value.__cause__) is engine.ModelError
    mine = errors.ContentError("y")
    with pytest.raises(errors.ContentError) as caught, errors.translated():
        raise mine
    assert caught.value is mine


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"workers": 0}, errors.ConfigError, "workers: wanted 1 to 256, got 0"),
        ({"workers": "Alice"}, errors.ConfigError, "workers: wanted a number, a list"),
        ({"workers": []}, errors.ConfigError, "workers: wanted 1 to 256"),
        ({"workers": ["Ann", "ann"]}, errors.WorkerNameError, "got 'ann'"),
        ({"workers": [""]}, errors.WorkerNameError, "got ''"),
        ({"workers": ["A [1]:**"]}, errors.WorkerNameError, "choose a plain name"),
        ({"layout": "round"}, errors.ConfigError, "layout: wanted 'combined'"),
        ({"protocol": "loud"}, errors.ConfigError, "protocol: wanted 'auto'"),
        ({"answer": "sing"}, errors.ConfigError, "answer: wanted 'write' or 'join'"),
        ({"max_steps": -1}, errors.ConfigError, "max_steps: wanted a whole number of at least 1"),
        ({"max_tokens": 0}, errors.ConfigError, "max_tokens"),
        ({"max_tokens": "many"}, errors.ConfigError, "max_tokens: wanted a valid integer"),
        ({"sync_interval": 0}, errors.ConfigError, "sync_interval"),
        ({"temperature": -0.1}, errors.ConfigError, "temperature"),
        ({"top_p": 2}, errors.ConfigError, "top_p"),
        ({"seed": -1}, errors.ConfigError, "seed"),
        ({"stop": [""]}, errors.ConfigError, "stop"),
        ({"timeout": 0}, errors.ConfigError, "timeout: wanted seconds above 0"),
        ({"dtype": "int3"}, errors.ConfigError, "dtype"),
        ({"num_pages": 0}, errors.ConfigError, "num_pages"),
        ({"model": ""}, errors.ConfigError, "model"),
        ({"model": "missing.gguf"}, errors.ModelNotFoundError, "an existing .gguf file"),
        ({"model": "./no/folder"}, errors.ModelNotFoundError, "an existing folder"),
    ],
)
def test_construction_refuses_what_needs_no_weights_to_be_wrong(
    settings: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind) as error:
        ChatHogwild(**settings)
    assert type(error.value) is kind
    assert says in str(error.value)


def test_a_call_is_checked_like_the_construction() -> None:
    with pytest.raises(errors.ConfigError, match="max_steps"):
        ChatHogwild().invoke("q", max_steps=0)


def test_what_is_no_function_is_refused_rather_than_dropped() -> None:
    with pytest.raises(errors.ConfigError, match="tools: wanted tools that are functions"):
        ChatHogwild().invoke("q", tools=[{"type": "function"}])


@pytest.mark.parametrize(
    ("given", "meant"), [("max_step", "max_steps"), ("model_nam", "model_name")]
)
def test_an_unknown_argument_is_told_with_the_nearest_name(given: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"unknown argument '{given}'; did you mean '{meant}'"):
        ChatHogwild(**cast(Any, {given: 1}))


def test_what_only_remote_models_need_is_accepted() -> None:
    ChatHogwild(**cast(Any, {"api_key": "x", "max_retries": 2}))


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'langchain_core', 'langgraph', 'pydantic'}"
    code = f"import sys, hogwild_agents; print(sorted({heavy} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_building_a_model_loads_no_weights_and_no_torch() -> None:
    use = "h.ChatHogwild(); h.HogwildNode"
    code = f"import sys, hogwild_agents as h; {use}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda: Worker(""), hogwild_agents.WorkerNameError),
        (lambda: Worker("Ann", role=" "), hogwild_agents.ConfigError),
        (lambda: hogwild_agents.Grammar(cast(Any, "poem"), "x"), hogwild_agents.ConfigError),
        (lambda: ChatHogwild(workers=[""]), hogwild_agents.WorkerNameError),
        (lambda: ChatHogwild(max_steps=0), hogwild_agents.ConfigError),
    ],
)
def test_the_packages_names_catch_what_building_raises(build: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        build()


def test_workers_and_grammars_are_the_engines_own() -> None:
    assert hogwild_agents.Worker is hogwild_engine.Worker
    assert hogwild_agents.Grammar is hogwild_engine.Grammar
    assert hogwild_agents.Protocol is hogwild_engine.Protocol


def test_settings_have_the_engines_names_and_defaults() -> None:
    llm = ChatHogwild()
    shared = 0
    for settings in (
        EngineConfig(),
        Request(({"role": "user", "content": "x"},)),
        SamplingParams(),
    ):
        for field in fields(settings):
            if field.name in ChatHogwild.model_fields and field.name not in ("workers", "stop"):
                assert getattr(llm, field.name) == getattr(settings, field.name), field.name
                shared += 1
    assert shared == len(fields(EngineConfig)) + len(fields(SamplingParams)) + 9


def test_the_public_names_exist() -> None:
    assert all(getattr(hogwild_agents, name) for name in hogwild_agents.__all__)
    assert hogwild_agents.Worker is Worker
    with pytest.raises(AttributeError, match="Chathogwild"):
        _ = hogwild_agents.Chathogwild
