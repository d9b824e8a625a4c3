"""Invariant 2: in every layer, attention equals an oracle that materialises the parser's view.

The oracle takes the cached keys and values, turns each key to its place in the view and runs one
ordinary softmax. The views are written down here anew, in terms of the session's blocks.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hogwild_engine.api.layout import LAYOUTS, LayoutName
from hogwild_engine.step.batch import Chunk
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import ModelHarness, Reads, batch_of, check_attention, recorded
from tiny import FAMILIES, MAIN_FAMILIES, tiny_model
from views import play


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [2, 3, 4, 5])
def test_every_worker_reads_its_own_view_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate, layout: LayoutName, num_workers: int
) -> None:
    family = MAIN_FAMILIES[(num_workers + list(LAYOUTS).index(layout)) % len(MAIN_FAMILIES)]
    script = play(monkeypatch, ModelHarness(tiny_model(family)), chat, layout, num_workers)
    assert len({id(writer.block) for writer in script.writers}) == (
        1 if layout == "arrival" else num_workers
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_views_as_the_oracle_does(
    monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate, family: str
) -> None:
    play(monkeypatch, ModelHarness(tiny_model(family)), chat, "combined", 3)


@pytest.mark.parametrize("layout", ["combined", "contiguous"])
@pytest.mark.parametrize("sync_interval", [2, 5, None])
def test_others_become_visible_at_every_kth_step(
    monkeypatch: pytest.MonkeyPatch,
    chat: ChatTemplate,
    layout: LayoutName,
    sync_interval: int | None,
) -> None:
    harness = ModelHarness(tiny_model("llama"))
    play(monkeypatch, harness, chat, layout, 3, sync_interval=sync_interval)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_a_single_worker_reads_its_own_text(
    monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate, family: str
) -> None:
    play(monkeypatch, ModelHarness(tiny_model(family)), chat, "combined", 1)


@pytest.mark.parametrize(
    ("layout", "num_workers"),
    [("combined", 1), ("combined", 2), ("contiguous", 3), ("arrival", 4), ("combined", 5)],
)
def test_the_embedded_model_reads_views_as_the_oracle_does(
    monkeypatch: pytest.MonkeyPatch,
    chat: ChatTemplate,
    smollm_model: Any,
    layout: LayoutName,
    num_workers: int,
) -> None:
    harness = ModelHarness(smollm_model, num_pages=80)
    bounds: dict[str, Any] = {"num_steps": 6, "tolerance": 2e-4, "every": 7}
    play(monkeypatch, harness, chat, layout, num_workers, **bounds)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_borders_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate, page_size: int
) -> None:
    harness = ModelHarness(
        tiny_model("mistral"), num_pages=max(64, 1500 // page_size), page_size=page_size
    )
    play(monkeypatch, harness, chat, "combined", 3)


@pytest.mark.parametrize("seed", range(10))
def test_any_views_of_any_blocks_fed_in_any_pieces(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also empty blocks, blocks that stand twice in a view, and several chunks to one block."""
    rng = random.Random(seed)
    harness = ModelHarness(tiny_model(MAIN_FAMILIES[seed % len(MAIN_FAMILIES)]), num_pages=128)
    blocks = [harness.block() for _ in range(rng.randint(1, 5))]
    written = [0] * len(blocks)
    for _ in range(6):
        pending = []
        for index in rng.sample(range(len(blocks)), rng.randint(1, len(blocks))):
            count = rng.choice((1, 1, 2, 7, 13))
            blocks[index].append([rng.randrange(3, 40_000) for _ in range(count)])
            pending += pieces(rng, index, written[index], count)
            written[index] += count
        chunks, reads = [], []
        for index, start, count in pending:
            own = blocks[index]
            others = [block for block in blocks if block is not own]
            seen = rng.choices(others, k=rng.randint(0, 4)) if others else []
            chunks.append(Chunk(own, start, count, [*seen, own]))
            reads.append(Reads(own, start, count, [(block, len(block)) for block in seen]))
        with recorded(monkeypatch) as calls:
            harness.run(chunks)
            check_attention(harness, calls, reads)


def pieces(
    rng: random.Random, index: int, start: int, count: int
) -> Sequence[tuple[int, int, int]]:
    """The tokens of one block as one or two chunks: ``(block, start, count)``."""
    middle = rng.randint(0, count)
    parts = [(index, start, middle), (index, start + middle, count - middle)]
    return [part for part in parts if part[2]]


def test_a_plan_is_plain_data_and_runs_after_a_trip_between_processes() -> None:
    harness = ModelHarness(tiny_model("mistral"))
    common, own = harness.block(range(100, 117)), harness.block(range(200, 205))
    plan = batch_of([Chunk(common, 0, 17, [common]), Chunk(own, 0, 5, [common, own], samples=True)])
    travelled = pickle.loads(pickle.dumps(plan))
    assert travelled == plan
    assert torch.equal(harness.runner.run(travelled), harness.runner.run(plan))
