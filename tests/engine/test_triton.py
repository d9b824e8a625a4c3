"""The engine on the Triton kernels: each worker reads its own view.

Every step is compared with the oracle. The kernels run in Triton's interpreter, which is slow:
sessions are short.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hogwild_engine import EngineConfig
from hogwild_engine.api.layout import LAYOUTS, LayoutName
from hogwild_engine.engine import Engine
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.step.forward import TransformersForward
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import ModelHarness, recorded
from tiny import fused_model, tiny_model
from views import play

FAMILY_OF_LAYOUT = dict(zip(LAYOUTS, ("llama", "qwen2", "glm4", "gpt_oss"), strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the harness's model is on the CPU")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout == "combined" else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_every_worker_reads_its_own_view_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate, layout: LayoutName
) -> None:
    harness = ModelHarness(tiny_model(FAMILY_OF_LAYOUT[layout]), attention="triton")
    play(monkeypatch, harness, chat, layout, 2, num_steps=5, prefill=(23,))


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_the_engine_runs_on_the_requested_backend(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, attention: Any
) -> None:
    """Also a model that the fused Llama forward, which attends by itself, could run."""
    config = EngineConfig(device="cpu", num_pages=16, page_size=8, attention=attention)
    loaded = Pretrained(fused_model("llama"), tokenizer)
    with recorded(monkeypatch) as calls, Engine(config, loaded) as engine:
        assert isinstance(engine._runner.forward, TransformersForward)
        assert {backend.name for backend in engine._cache.backends} == {attention}
    assert {call.backend for call in calls} == {attention}
