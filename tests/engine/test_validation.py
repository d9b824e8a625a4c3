"""Load-time validation: which models pass, and which check refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hogwild_engine import Engine, EngineConfig
from hogwild_engine.api.errors import ModelRefusedError
from hogwild_engine.cache.rope import Rotation, permute
from hogwild_engine.loading import rope_probe, validation
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_kernels.api import AttentionBackend
from tiny import FAMILIES, VOCABULARY, tiny_model


@pytest.fixture
def load(tokenizer: Any) -> Callable[[Any], Engine]:
    def make(model: Any) -> Engine:
        config = EngineConfig(model="tiny", num_pages=16, page_size=8)
        return Engine(config, loaded=Pretrained(model, tokenizer))

    return make


def refused(load: Callable[[Any], Engine], model: Any) -> str:
    """Load ``model``; the check that refused it."""
    with pytest.raises(ModelRefusedError, match=r"model refused by the '.+' check: ") as caught:
        load(model)
    assert caught.value.check in str(caught.value)
    assert "; " in caught.value.detail or ": " in caught.value.detail
    return caught.value.check


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_with_an_error_far_below_the_bound(
    load: Callable[[Any], Engine], family: str
) -> None:
    with load(tiny_model(family)) as engine:
        assert engine.check_error < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_smaller_dtypes_pass_within_their_bounds(
    load: Callable[[Any], Engine], dtype: torch.dtype
) -> None:
    with load(tiny_model("llama").to(dtype)) as engine:
        assert engine.check_error < validation.LOGIT_BOUND[dtype]


def test_validation_leaves_all_pages_free(load: Callable[[Any], Engine]) -> None:
    with load(tiny_model("llama")) as engine:
        assert engine.stats().free_pages == engine.stats().num_pages


def test_the_rotation_of_each_layer_is_measured(load: Callable[[Any], Engine]) -> None:
    def rotations(family: str) -> list[Rotation]:
        with load(tiny_model(family)) as engine:
            return [shape.rotation for shape in engine._cache.shapes]

    assert [len(r.inv_freq) for r in rotations("llama")] == [8, 8, 8]
    assert [r.interleaved for r in rotations("llama")] == [False] * 3
    assert [(len(r.inv_freq), r.interleaved) for r in rotations("glm4")] == [(4, True)] * 3
    assert [bool(r.inv_freq) for r in rotations("smollm3")] == [True, False, True]


def test_the_window_of_each_layer_is_measured(load: Callable[[Any], Engine]) -> None:
    def windows(family: str) -> list[int | None]:
        with load(tiny_model(family)) as engine:
            runner = engine._runner
            return [runner._kinds[kind][1] for kind in runner._kind_of_layer]

    assert windows("llama") == [None, None, None]
    assert windows("qwen2") == [None, 6, None]
    assert windows("mistral") == [7, 7, 7]


def test_a_rotation_that_matches_no_inv_freq_buffer_is_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = transformers.models.llama.modeling_llama
    apply = module.apply_rotary_pos_emb

    def twice(q: Any, k: Any, cos: Any, sin: Any, *args: Any) -> Any:
        return apply(*apply(q, k, cos, sin, *args), cos, sin, *args)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", twice)
    assert refused(load, tiny_model("llama")) == "rotation"


def test_learned_position_embeddings_are_refused(load: Callable[[Any], Engine]) -> None:
    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    assert refused(load, model.requires_grad_(False)) == "rotation"


def test_a_layer_that_bypasses_the_attention_interface_is_refused(
    load: Callable[[Any], Engine],
) -> None:
    model = tiny_model("llama")

    def forward(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    model.model.layers[1].self_attn.forward = forward
    assert refused(load, model) == "attention interface"


@pytest.mark.parametrize("off", [1.01, float("nan")])
def test_wrong_logits_are_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    attend = AttentionBackend.attend

    def wrong(*args: Any, **options: Any) -> Any:
        out, lse = attend(*args, **options)
        return out * off, lse

    monkeypatch.setattr(AttentionBackend, "attend", wrong)
    assert refused(load, tiny_model("llama")) == "logits"


def test_a_window_that_was_not_measured_is_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = rope_probe.layer_shapes

    def blind(*args: Any) -> Any:
        shapes, windows = measured(*args)
        return shapes, [None] * len(windows)

    monkeypatch.setattr(rope_probe, "layer_shapes", blind)
    assert refused(load, tiny_model("mistral")) == "logits"


@pytest.mark.parametrize("sign", [-1, 0])
def test_a_rotation_in_the_wrong_direction_is_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    table, match = Rotation.table, rope_probe.match_rotations

    def matched(*args: Any) -> Any:
        rotations = match(*args)
        monkeypatch.setattr(Rotation, "table", lambda r, d, *a: table(r, [sign * x for x in d], *a))
        return rotations

    monkeypatch.setattr(rope_probe, "match_rotations", matched)
    assert refused(load, tiny_model("llama")) == "logits"


def test_a_model_whose_logits_do_not_show_rotation_is_refused(
    load: Callable[[Any], Engine],
) -> None:
    """If a wrong rotation does not change the logits, correct logits prove nothing."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
    assert refused(load, model) == "control"


def test_permuted_dims_rotate_by_the_plain_formula() -> None:
    """Interleaved pairs, beside dims that do not rotate."""
    rotation = Rotation((0.5, 0.1), 8, interleaved=True)
    x = torch.randn(3, 1, 8, dtype=torch.float64)
    order = rotation.permutation
    assert order is not None
    cos, sin = (angle.double()[:, None] for angle in rotation.table([0, 1, 7]))
    first, second = permute(x, order).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    wanted = x.clone()
    for row, position in enumerate((0, 1, 7)):
        for pair, frequency in enumerate((0.5, 0.1)):
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            a, b = x[row, 0, 2 * pair], x[row, 0, 2 * pair + 1]
            wanted[row, 0, 2 * pair] = a * angle.cos() - b * angle.sin()
            wanted[row, 0, 2 * pair + 1] = b * angle.cos() + a * angle.sin()
    torch.testing.assert_close(rotated, permute(wanted, order), atol=1e-6, rtol=1e-6)
