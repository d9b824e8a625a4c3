"""From a name to a transformers model: its source, the GGUF cache, its defaults."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hogwild_engine import Engine, EngineConfig, SamplingParams
from hogwild_engine.loading import gguf_cache, model_config
from hogwild_engine.loading.pretrained import load_pretrained
from hogwild_engine.loading.source import Source, locate
from tiny import tiny_model

IDS = torch.tensor([[5, 600, 7, 1, 2, 9000, 11]])


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits[0].float()


def test_a_name_is_located_without_loading_the_model(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    assert locate("Qwen/Qwen3-8B") == Source("Qwen/Qwen3-8B", local=False)
    assert locate("gpt-oss") == Source("gpt-oss", local=False)
    assert locate(str(tmp_path)) == Source(str(tmp_path))
    assert locate(str(file)) == Source(str(tmp_path), "some.gguf")


def test_the_embedded_model_is_a_gguf_file_of_a_package() -> None:
    source = locate("smollm2-135m")
    assert source.local
    assert source.gguf_file
    assert Path(source.place, source.gguf_file).is_file()


def test_importing_the_engine_loads_no_torch() -> None:
    code = "import hogwild_engine as e, sys; e.Request; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    subprocess.run([sys.executable, "-c", code], check=True, env=path, timeout=60)


# Converted models


def test_a_converted_model_gives_the_same_logits_and_ids(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model("llama")
    folder = tmp_path / "deep" / "kept"
    gguf_cache.save(folder, model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(loaded.eval()), logits(model))
    text = "Hi 🦜<|im_end|>"
    assert AutoTokenizer.from_pretrained(folder).encode(text) == tokenizer.encode(text)
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]


def test_a_file_is_converted_only_once(monkeypatch: pytest.MonkeyPatch, smollm: Engine) -> None:
    read: list[str] = []
    load = AutoModelForCausalLM.from_pretrained

    def record(place: Any, **options: Any) -> Any:
        read.append(options.get("gguf_file") or Path(place).name)
        return load(place, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    file = locate(smollm.config.model)
    assert file.gguf_file
    load_pretrained(smollm.config)
    kept = gguf_cache.folder_for(Path(file.place, file.gguf_file), "float32")
    assert kept is not None
    assert read == [kept.name]


def test_the_slower_of_two_processes_changes_nothing(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "kept"
    gguf_cache.save(folder, tiny_model("llama"), tokenizer)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    gguf_cache.save(folder, tiny_model("llama", seed=1), tokenizer)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_disk_that_cannot_be_written_is_a_warning(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        gguf_cache.save(tmp_path / "file" / "kept", tiny_model("llama"), tokenizer)
    assert "is not kept" in caplog.text


def test_a_full_disk_is_a_warning(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """safetensors and tokenizers have errors of their own for it."""
    model, limits = tiny_model("llama"), resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (10, 10_000, 5_000_000):  # in the configuration, the tokenizer, the weights
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with caplog.at_level(logging.WARNING):
                gguf_cache.save(tmp_path / "kept", model, tokenizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "is not kept" in caplog.text
        assert "set HOGWILD_CACHE to a folder with room" in caplog.text
        assert not list(tmp_path.iterdir())
        caplog.clear()


def test_a_folders_name_depends_on_the_files_content_and_the_dtype(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = gguf_cache.folder_for(file, "float32")
    assert gguf_cache.folder_for(file, "float32") == first
    assert gguf_cache.folder_for(file, "bfloat16") != first
    file.write_bytes(b"other")
    assert gguf_cache.folder_for(file, "float32") != first


@pytest.fixture
def load_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any
) -> Callable[[], tuple[Any, bool]]:
    """Load a GGUF file, which a tiny model stands for; also return whether it was converted."""
    load, load_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    converted: list[Path] = []

    def from_pretrained(place: Path, gguf_file: str = "", **options: Any) -> Any:
        if not gguf_file:
            return load(place, **options)
        converted.append(place)
        return tiny_model("llama")

    def tokenizer_from_pretrained(place: Path, gguf_file: str = "", **options: Any) -> Any:
        return tokenizer if gguf_file else load_tokenizer(place, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer_from_pretrained)
    monkeypatch.setenv("HOGWILD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    def load_once() -> tuple[Any, bool]:
        converted.clear()
        model = load_pretrained(EngineConfig(model=str(file), dtype="float32")).model
        return logits(model), bool(converted)

    return load_once


def damaged(kind: str, weights: Path) -> None:
    content = bytearray(weights.read_bytes())
    if kind == "empty":
        content.clear()
    elif kind == "cut":
        del content[-4096:]
    elif kind == "zeros":  # a crash before the disk had it
        content[-4096:] = bytes(4096)
    elif kind == "gone":
        weights.unlink()
        return
    weights.write_bytes(content)


def test_a_damaged_folder_is_converted_again(
    load_file: Callable[[], tuple[Any, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, converted = load_file()
    (folder,) = (tmp_path / "cache" / "converted").iterdir()
    assert converted
    for kind in ("empty", "cut", "zeros", "gone"):
        damaged(kind, folder / "model.safetensors")
        model, converted = load_file()
        assert converted, kind
        assert torch.equal(model, first), kind
        assert "is damaged and is converted again" in caplog.text
        caplog.clear()
    assert not load_file()[1]
    folder.chmod(0o777)
    assert load_file()[1]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not load_file()[1]


def test_a_file_loads_where_nothing_can_be_kept(
    load_file: Callable[[], tuple[Any, bool]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others can write to the folder, or there is no home."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("HOGWILD_CACHE", str(open_to_all))
    assert load_file()[1]
    assert f"is not kept: others can write to {open_to_all}" in caplog.text
    assert not any((open_to_all / "converted").glob("*"))

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HOGWILD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert load_file()[1]
    assert "set HOGWILD_CACHE to a folder" in caplog.text


# Defaults from the configuration


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 8192),
        ({"rope_type": "default"}, 8192),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, 8192),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 512),
        ({"rope_type": "dynamic"}, 8192),
    ],
    ids=str,
)
def test_rope_types_that_change_with_length_limit_the_context(rope: Any, length: int) -> None:
    config = SimpleNamespace(max_position_embeddings=8192, rope_parameters=rope)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert model_config.context_len(model) == length


@pytest.mark.parametrize(
    ("stated", "of_tokenizer", "ends"),
    [(2, 7, {2}), ([2, 5], 7, {2, 5}), (None, 7, {7}), (None, None, set()), (-1, 7, set())],
)
def test_end_tokens_are_those_of_generate(stated: Any, of_tokenizer: Any, ends: set[int]) -> None:
    generation = SimpleNamespace(eos_token_id=stated)
    assert model_config.end_tokens(generation, SimpleNamespace(eos_token_id=of_tokenizer)) == ends


def test_sampling_defaults_come_from_the_generation_config() -> None:
    stated = SimpleNamespace(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)
    assert model_config.default_sampling(stated) == SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.0, repetition_penalty=1.0
    )
    unstated = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)  # Llama-3.2's
    defaults = GenerationConfig._get_default_generation_params()
    assert model_config.default_sampling(unstated).top_k == defaults["top_k"] == 50
    greedy = SimpleNamespace(do_sample=False, temperature=0.7, repetition_penalty=1.1)
    assert model_config.default_sampling(greedy) == SamplingParams(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.1
    )
