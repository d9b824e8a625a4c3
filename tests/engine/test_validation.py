"""What a model must show at load, and how one that cannot is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hogwild_engine import Engine, EngineConfig
from hogwild_engine.api.errors import ModelRefusedError
from hogwild_engine.cache import rope
from hogwild_engine.cache.rope import Rotation
from hogwild_engine.loading import validation
from hogwild_engine.loading.weights import Weights
from hogwild_kernels.api import AttentionBackend
from tiny import FAMILIES, VOCABULARY, tiny_model


@pytest.fixture
def load(tokenizer: Any) -> Callable[[Any], Engine]:
    def make(model: Any) -> Engine:
        config = EngineConfig(model="tiny", num_pages=16, page_size=8)
        return Engine(config, loaded=Weights(model, tokenizer))

    return make


def refused(load: Callable[[Any], Engine], model: Any) -> str:
    """Load ``model``; the check that refused it."""
    with pytest.raises(ModelRefusedError, match=r"model refused by the '.+' check: ") as caught:
        load(model)
    assert caught.value.check in str(caught.value)
    assert "; " in caught.value.detail or ": " in caught.value.detail
    return caught.value.check


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_far_below_the_bound(
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


def test_the_check_gives_its_pages_back(load: Callable[[Any], Engine]) -> None:
    with load(tiny_model("llama")) as engine:
        assert engine.stats().free_pages == engine.stats().num_pages


def test_what_is_measured_is_how_each_family_rotates(load: Callable[[Any], Engine]) -> None:
    def rotations(family: str) -> list[Rotation]:
        with load(tiny_model(family)) as engine:
            return [shape.rotation for shape in engine._cache.shapes]

    assert [len(r.inv_freq) for r in rotations("llama")] == [8, 8, 8]
    assert [r.interleaved for r in rotations("llama")] == [False] * 3
    assert [(len(r.inv_freq), r.interleaved) for r in rotations("glm4")] == [(4, True)] * 3
    assert [bool(r.inv_freq) for r in rotations("smollm3")] == [True, False, True]


def test_windows_are_measured_by_layer(load: Callable[[Any], Engine]) -> None:
    def windows(family: str) -> list[int | None]:
        with load(tiny_model(family)) as engine:
            runner = engine._runner
            return [runner._kinds[kind][1] for kind in runner._kind_of_layer]

    assert windows("llama") == [None, None, None]
    assert windows("qwen2") == [None, 6, None]
    assert windows("mistral") == [7, 7, 7]


def test_a_rotation_that_the_tables_do_not_tell_is_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = transformers.models.llama.modeling_llama
    apply = module.apply_rotary_pos_emb

    def twice(q: Any, k: Any, cos: Any, sin: Any, *args: Any) -> Any:
        return apply(*apply(q, k, cos, sin, *args), cos, sin, *args)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", twice)
    assert refused(load, tiny_model("llama")) == "rotation"


def test_positions_that_are_added_are_refused(load: Callable[[Any], Engine]) -> None:
    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    assert refused(load, model.requires_grad_(False)) == "rotation"


def test_a_layer_that_attends_by_itself_is_refused(load: Callable[[Any], Engine]) -> None:
    model = tiny_model("llama")

    def forward(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    model.model.layers[1].self_attn.forward = forward
    assert refused(load, model) == "attention interface"


@pytest.mark.parametrize("off", [1.01, float("nan")])
def test_logits_that_are_off_are_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    attend = AttentionBackend.attend

    def wrong(*args: Any, **options: Any) -> Any:
        out, lse = attend(*args, **options)
        return out * off, lse

    monkeypatch.setattr(AttentionBackend, "attend", wrong)
    assert refused(load, tiny_model("llama")) == "logits"


def test_a_window_that_is_not_told_is_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = validation.layer_shapes

    def blind(*args: Any) -> Any:
        shapes, windows = measured(*args)
        return shapes, [None] * len(windows)

    monkeypatch.setattr(validation, "layer_shapes", blind)
    assert refused(load, tiny_model("mistral")) == "logits"


@pytest.mark.parametrize("sign", [-1, 0])
def test_a_turn_the_wrong_way_is_refused(
    load: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    table = Rotation.table
    measure = rope.measure

    def measured(*args: Any) -> Any:
        rotations = measure(*args)
        monkeypatch.setattr(Rotation, "table", lambda r, d, *a: table(r, [sign * x for x in d], *a))
        return rotations

    monkeypatch.setattr(rope, "measure", measured)
    assert refused(load, tiny_model("llama")) == "logits"


def test_a_model_on_which_rotation_cannot_be_seen_is_refused(
    load: Callable[[Any], Engine],
) -> None:
    """Where a wrong turn changes nothing, the check has proved nothing."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
    assert refused(load, model) == "control"


def test_permuted_dims_turn_as_the_model_turns_them() -> None:
    """Pairs that stand side by side, and dims that do not turn, by the plain formula."""
    rotation = Rotation((0.5, 0.1), 8, interleaved=True)
    x = torch.randn(3, 1, 8, dtype=torch.float64)
    order = rotation.permutation
    assert order is not None
    cos, sin = (angle.double()[:, None] for angle in rotation.table([0, 1, 7]))
    first, second = rope.permute(x, order).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    wanted = x.clone()
    for row, position in enumerate((0, 1, 7)):
        for pair, frequency in enumerate((0.5, 0.1)):
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            a, b = x[row, 0, 2 * pair], x[row, 0, 2 * pair + 1]
            wanted[row, 0, 2 * pair] = a * angle.cos() - b * angle.sin()
            wanted[row, 0, 2 * pair + 1] = b * angle.cos() + a * angle.sin()
    torch.testing.assert_close(turned, rope.permute(wanted, order), atol=1e-6, rtol=1e-6)
