"""The engine on the Triton kernels: each worker reads its own view, by the oracle of every pass.

The kernels run in Triton's interpreter here, which is slow: sessions are short.
"""

from __future__ import annotations

import pytest
import torch
from rig import Rig
from test_engine_views import play
from tiny import tiny_model

from hogwild_engine.chat import ChatFormat
from hogwild_engine.layout import LAYOUTS, LayoutName

FAMILY_OF_LAYOUT = dict(zip(LAYOUTS, ("llama", "qwen2", "glm4", "gpt_oss"), strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on the CPU")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout == "combined" else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_every_worker_reads_its_own_view_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, chat: ChatFormat, layout: LayoutName
) -> None:
    rig = Rig(tiny_model(FAMILY_OF_LAYOUT[layout]), impl="triton")
    play(monkeypatch, rig, chat, layout, 2, num_steps=5, prefill=(23,))
