"""Invariant 2: in every layer, attention equals an oracle that materialises the reader's view.

The oracle takes the cached keys and values, turns each key to its place in the view and runs one
ordinary softmax. The views are written down here anew, in terms of the session's blocks.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from rig import Reads, Rig, Script, check_attention, recorded
from tiny import FAMILIES, MAIN_FAMILIES, tiny_model

from hogwild_engine import Protocol, Request, make_workers
from hogwild_engine.block import Block
from hogwild_engine.chat import ChatFormat
from hogwild_engine.layout import LAYOUTS, LayoutName
from hogwild_engine.plan import Feed, Plan
from hogwild_engine.session import Turn

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
    common, others_header, after_other, own_header = script.parallel._parts
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
            if writer.paragraph != self._paragraphs.get(block) and script.parallel._moves:
                self._open[block] = 0  # what stood here is in the common block now
            self._paragraphs[block] = writer.paragraph
            if shared or script.answering:
                self._open[block] = length
            self._open[block] = min(self._open.get(block, 0), length)

    def of(self, block: Block) -> int:
        return self._open.get(id(block), len(block))


def play(
    monkeypatch: pytest.MonkeyPatch,
    rig: Rig,
    chat: ChatFormat,
    layout: LayoutName,
    num_workers: int,
    *,
    sync_interval: int | None = 1,
    num_steps: int = 14,
    prefill: Sequence[int] = (1, 7, 13),
    tolerance: float = 2e-5,
    every: int = 1,
) -> Script:
    """Run a scripted session, prefill in ragged passes, and check the attention of every pass."""
    request = Request(
        ({"role": "user", "content": "Count to five together, please."},),
        workers=make_workers(num_workers),
        protocol=PROTOCOL,
        layout=layout,
        sync_interval=sync_interval,
        max_steps=num_steps,
        max_tokens=3,
    )
    script = Script(rig, chat, request, TEXTS, runs=True)
    visible, limits = Visible(script), random.Random(num_workers)
    with recorded(monkeypatch) as calls:

        def check(turn: Turn) -> None:
            visible.update()
            reads = [
                Reads(
                    feed.block,
                    feed.start,
                    feed.count,
                    [(b, visible.of(b)) for b in others_in_view(script, layout, feed.block)],
                )
                for feed in turn.feeds
            ]
            check_attention(rig, calls, reads, tolerance=tolerance, every=every)
            calls.clear()

        while script.session.finished is None:
            limit = limits.choice(prefill) if script.session.is_prefill else 10_000
            script.step(limit, check)
    if script.parallel is not None:
        moved = len(script.parallel._parts.common) > script.session.usage().prompt_tokens
        assert moved == (layout in ("combined", "interleaved") and sync_interval is not None)
    script.session.release()
    assert rig.all_free
    return script


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [2, 3, 4, 5])
def test_every_worker_reads_its_own_view_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, chat: ChatFormat, layout: LayoutName, num_workers: int
) -> None:
    family = MAIN_FAMILIES[(num_workers + LAYOUTS.index(layout)) % len(MAIN_FAMILIES)]
    script = play(monkeypatch, Rig(tiny_model(family)), chat, layout, num_workers)
    assert len({id(writer.block) for writer in script.writers}) == (
        1 if layout == "arrival" else num_workers
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_views_as_the_oracle_does(
    monkeypatch: pytest.MonkeyPatch, chat: ChatFormat, family: str
) -> None:
    play(monkeypatch, Rig(tiny_model(family)), chat, "combined", 3)


@pytest.mark.parametrize("layout", ["combined", "contiguous"])
@pytest.mark.parametrize("sync_interval", [2, 5, None])
def test_others_become_visible_at_every_kth_step(
    monkeypatch: pytest.MonkeyPatch,
    chat: ChatFormat,
    layout: LayoutName,
    sync_interval: int | None,
) -> None:
    rig = Rig(tiny_model("llama"))
    play(monkeypatch, rig, chat, layout, 3, sync_interval=sync_interval)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_a_single_worker_reads_its_own_text(
    monkeypatch: pytest.MonkeyPatch, chat: ChatFormat, family: str
) -> None:
    play(monkeypatch, Rig(tiny_model(family)), chat, "combined", 1)


@pytest.mark.parametrize(
    ("layout", "num_workers"),
    [("combined", 1), ("combined", 2), ("contiguous", 3), ("arrival", 4), ("combined", 5)],
)
def test_the_embedded_model_reads_views_as_the_oracle_does(
    monkeypatch: pytest.MonkeyPatch,
    chat: ChatFormat,
    smollm_model: Any,
    layout: LayoutName,
    num_workers: int,
) -> None:
    rig = Rig(smollm_model, num_pages=80)
    bounds: dict[str, Any] = {"num_steps": 6, "tolerance": 2e-4, "every": 7}
    play(monkeypatch, rig, chat, layout, num_workers, **bounds)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_borders_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, chat: ChatFormat, page_size: int
) -> None:
    rig = Rig(tiny_model("mistral"), num_pages=max(64, 1500 // page_size), page_size=page_size)
    play(monkeypatch, rig, chat, "combined", 3)


@pytest.mark.parametrize("seed", range(10))
def test_any_views_of_any_blocks_fed_in_any_pieces(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also empty blocks, blocks that stand twice in a view, and several feeds to one block."""
    rng = random.Random(seed)
    rig = Rig(tiny_model(MAIN_FAMILIES[seed % len(MAIN_FAMILIES)]), num_pages=128)
    blocks = [rig.block() for _ in range(rng.randint(1, 5))]
    written = [0] * len(blocks)
    for _ in range(6):
        owed = []
        for index in rng.sample(range(len(blocks)), rng.randint(1, len(blocks))):
            count = rng.choice((1, 1, 2, 7, 13))
            blocks[index].append([rng.randrange(3, 40_000) for _ in range(count)])
            owed += pieces(rng, index, written[index], count)
            written[index] += count
        feeds, reads = [], []
        for index, start, count in owed:
            own = blocks[index]
            others = [block for block in blocks if block is not own]
            seen = rng.choices(others, k=rng.randint(0, 4)) if others else []
            feeds.append(Feed(own, start, count, [*seen, own]))
            reads.append(Reads(own, start, count, [(block, len(block)) for block in seen]))
        with recorded(monkeypatch) as calls:
            rig.run(feeds)
            check_attention(rig, calls, reads)


def pieces(
    rng: random.Random, index: int, start: int, count: int
) -> Sequence[tuple[int, int, int]]:
    """The tokens of one block as one or two feeds: ``(block, start, count)``."""
    middle = rng.randint(0, count)
    parts = [(index, start, middle), (index, start + middle, count - middle)]
    return [part for part in parts if part[2]]


def test_a_plan_is_plain_data_and_runs_after_a_trip_between_processes() -> None:
    rig = Rig(tiny_model("mistral"))
    common, own = rig.block(range(100, 117)), rig.block(range(200, 205))
    plan = Plan()
    plan.add_session([Feed(common, 0, 17, [common]), Feed(own, 0, 5, [common, own], samples=True)])
    travelled = pickle.loads(pickle.dumps(plan))
    assert travelled == plan
    assert torch.equal(rig.runner.run(travelled), rig.runner.run(plan))
