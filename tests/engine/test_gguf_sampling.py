"""How calls of a GGUF file sample that say nothing of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from transformers import GenerationConfig

from hogwild_engine import Engine
from hogwild_engine.loading import gguf_sampling
from hogwild_engine.loading.model_config import default_sampling, sampling_source


def file_with(folder: Path, **stated: float) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in stated.items():
        key = f"general.sampling.{name}"
        if isinstance(value, int):
            writer.add_int32(key, value)
        else:
            writer.add_float32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_file_that_states_its_sampling_is_heard(tmp_path: Path) -> None:
    generation = GenerationConfig()
    gguf_sampling.set_sampling(generation, file_with(tmp_path, temp=0.5, top_k=20, min_p=0.25))
    sampling = default_sampling(generation)
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 20, 0.25)
    assert sampling.top_p == 1.0
    assert sampling_source(generation) == "the file's metadata"


def test_a_file_that_asks_for_greedy_decoding_gets_it(tmp_path: Path) -> None:
    generation = GenerationConfig()
    gguf_sampling.set_sampling(generation, file_with(tmp_path, temp=0.0))
    assert default_sampling(generation).temperature == 0


def test_a_file_that_states_nothing_samples_and_the_settings_survive_a_conversion(
    tmp_path: Path,
) -> None:
    generation = GenerationConfig()
    gguf_sampling.set_sampling(generation, file_with(tmp_path))
    generation.save_pretrained(tmp_path / "kept")
    kept = GenerationConfig.from_pretrained(tmp_path / "kept")
    sampling = default_sampling(kept)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.95, 40)
    assert sampling_source(kept) == "hogwild's default for GGUF"


@pytest.mark.parametrize(
    ("generation", "source"),
    [
        (GenerationConfig(), "the model states nothing, as in generate"),
        (GenerationConfig(do_sample=True), "the model's generation_config"),
    ],
)
def test_other_models_sample_as_generate_does(generation: GenerationConfig, source: str) -> None:
    assert sampling_source(generation) == source
    assert bool(default_sampling(generation).temperature) == bool(generation.do_sample)


def test_an_engine_says_how_it_samples_and_whence(tidy_engine: Engine) -> None:
    assert tidy_engine.describe_sampling() == (
        "sampling unless a call sets it: greedy (the model states nothing, as in generate)"
    )
