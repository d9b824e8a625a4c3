"""LangChain's standard suite, whole, on a bigger model: run by ``make test-models MODEL=…``."""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel

from standard import Lone, Team

pytestmark = [pytest.mark.model, pytest.mark.timeout(3000)]

MODEL = {
    "model": os.environ.get("HOGWILD_TEST_MODEL", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "num_pages": 512,
    "temperature": 0,
    "seed": 0,
}


class TestLone(Lone):
    long_answer = 128

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**MODEL, "workers": 1, "max_tokens": 24}


class TestTeam(Team):
    long_answer = 128

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**MODEL, "workers": 2, "max_steps": 12, "max_tokens": 24}

    @pytest.mark.xfail(
        reason="the team of Qwen2.5-Coder-1.5B names the keys '/setup' and '/punchline'",
        strict=False,  # another model may do better
    )
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)
