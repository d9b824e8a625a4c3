"""Scripted sessions whose attention is compared with an oracle, step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import pytest

from hogwild_engine import Protocol, Request, make_workers
from hogwild_engine.api.layout import LayoutName
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.session import ScheduledStep
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import ModelHarness, Reads, Script, check_attention, recorded

PROTOCOL = Protocol(
    name="headed",
    rules="Be quick.",
    history_header="### Past\n\n",
    others_header="### Others\n\n",
    after_other="<...>\n\n",
    own_header="<...>\n\n### Own\n\n",
    stagger=1,
    paragraph_end="blank_line",
    min_chars=0,
    max_repeats=None,
)

TEXTS = {
    "Alice": [" One two three.\n\n", " Four.\n\n", " Five six seven eight"],
    "Bob": [" A much longer paragraph that goes on and on"],
    "Carol": [" x.\n\n", " y.\n\n", " z.\n\n"],
    "Dave": [" Early end.", 2],
    "Worker5": [" Late but here.\n\n", " And again"],
}


def others_in_view(script: Script, layout: LayoutName, block: Block) -> list[Block]:
    """What stands before ``block`` in its writer's view, by the table of the published layouts."""
    if script.parallel is None:  # a single worker's text is one block
        return []
    common, others_header, after_other, own_header = script.parallel.shared
    written = [writer.block for writer in script.writers if len(writer.block)]
    others = [other for other in written if other is not block]
    if block is common:
        return []
    if all(block is not writer.block for writer in script.writers):
        if not script.answering or block in (others_header, after_other, own_header):
            return [common]
        if layout == "arrival":
            return [common, *written[:1]]
        header, parting = ([others_header], [after_other]) if layout == "combined" else ([], [])
        return [common, *(header if written else []), *chain(*([w, *parting] for w in written))]
    if layout in ("interleaved", "arrival") or script.session.request.sync_interval is None:
        return [common]
    if layout == "contiguous" or not others:
        return [common, *others]
    parted = chain(*([other, after_other] for other in others[:-1]))
    return [common, others_header, *parted, others[-1], own_header]


class Visible:
    """How much of each block others may see: all of it, or as much as at the last common step."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._open: dict[int, int] = {}
        self._paragraphs: dict[int, int] = {}

    def update(self) -> None:
        script, interval = self._script, self._script.session.request.sync_interval
        if script.parallel is None:
            return
        shared = interval is not None and script.parallel.step % interval == 0
        for writer in script.writers:
            block, length = id(writer.block), len(writer.block)
            if (
                writer.paragraph != self._paragraphs.get(block)
                and script.parallel.layout.moves_paragraphs
            ):
                self._open[block] = 0  # what stood here is in the common block now
            self._paragraphs[block] = writer.paragraph
            if shared or script.answering:
                self._open[block] = length
            self._open[block] = min(self._open.get(block, 0), length)

    def of(self, block: Block) -> int:
        return self._open.get(id(block), len(block))


def play(
    monkeypatch: pytest.MonkeyPatch,
    harness: ModelHarness,
    chat: ChatTemplate,
    layout: LayoutName,
    num_workers: int,
    *,
    sync_interval: int | None = 1,
    num_steps: int = 14,
    prefill: Sequence[int] = (1, 7, 13),
    tolerance: float = 2e-5,
    every: int = 1,
) -> Script:
    """Run a scripted session, prefill in ragged steps, and check the attention of every step."""
    request = Request(
        ({"role": "user", "content": "Count to five together, please."},),
        workers=make_workers(num_workers),
        protocol=PROTOCOL,
        layout=layout,
        sync_interval=sync_interval,
        max_steps=num_steps,
        max_tokens=3,
    )
    script = Script(harness, chat, request, TEXTS, runs=True)
    visible, limits = Visible(script), random.Random(num_workers)
    with recorded(monkeypatch) as calls:

        def check(turn: ScheduledStep) -> None:
            visible.update()
            reads = [
                Reads(
                    chunk.block,
                    chunk.start,
                    chunk.count,
                    [(b, visible.of(b)) for b in others_in_view(script, layout, chunk.block)],
                )
                for chunk in turn.chunks
            ]
            check_attention(harness, calls, reads, tolerance=tolerance, every=every)
            calls.clear()

        while script.session.finished is None:
            limit = limits.choice(prefill) if script.session.is_prefill else 10_000
            script.step(limit, check)
    if script.parallel is not None:
        moved = len(script.parallel.shared.common) > script.session.usage().prompt_tokens
        assert moved == (layout in ("combined", "interleaved") and sync_interval is not None)
    script.session.release()
    assert harness.all_free
    return script
