"""Scripted sessions on one small cache, and what tests read off them."""

from __future__ import annotations

from typing import Any

from hogwild_engine import Protocol, Request, make_workers
from hogwild_engine.api.events import Finished, WorkerFinished
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import ModelHarness, Script
from tiny import tiny_model

END = 2
PROSE = Protocol(name="prose", rules="Be quick.", stagger=0, min_chars=0, max_repeats=None)
TASK = ({"role": "user", "content": "Do it."},)


class SessionHarness:
    """Makes scripted sessions on one small cache and takes their pages back."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.harness = ModelHarness(tiny_model("llama"), num_pages=600)
        self.chat = chat
        self.scripts: list[Script] = []

    def script(
        self,
        texts: dict[str, list[str | int]] | None = None,
        *,
        chat: ChatTemplate | None = None,
        **options: Any,
    ) -> Script:
        settings = {"workers": make_workers(2), "protocol": PROSE, "max_steps": 30, "max_tokens": 4}
        request = Request(options.pop("messages", TASK), **{**settings, **options})
        script = Script(self.harness, chat or self.chat, request, texts or {})
        self.scripts.append(script)
        return script

    def clear(self) -> None:
        for script in self.scripts:
            script.session.release()
        self.scripts.clear()
        assert self.harness.all_free


def steps(script: Script, count: int) -> None:
    """Run ``count`` forward steps; the first one encodes the prompt and samples too."""
    for _ in range(count):
        script.step()


def history(script: Script) -> list[tuple[str, int, str, bool]]:
    return [(p.worker, p.number, p.text, p.complete) for p in script.parallel.history]


def ends(script: Script) -> dict[str, str]:
    """Why each worker ended; each ends once."""
    finished = script.of(WorkerFinished)
    assert len({event.worker for event in finished}) == len(finished)
    reasons = {event.worker: event.reason for event in finished}
    assert script.parallel.ends == reasons
    return reasons


def common_text(script: Script) -> str:
    """What was added to the common block behind the prompt."""
    prompt = script.session.usage().prompt_tokens
    return script.chat.decode(script.parallel.shared.common.tokens[prompt:])


def own_text(script: Script, number: int) -> str:
    return script.chat.decode(script.writers[number].block.tokens)


def done(script: Script) -> Finished:
    assert script.session.finished is not None
    return script.session.finished
