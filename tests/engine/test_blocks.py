"""Invariants 3 and 4: blocks read as one text, and a move turns keys, keeps values, stores once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from hogwild_engine import Protocol, Request, make_workers
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.session import ScheduledStep
from hogwild_engine.step.batch import Chunk
from hogwild_engine.text.chat_template import ChatTemplate
from model_harness import ModelHarness, Script, plain
from oracle import rotate
from tiny import FAMILIES, MAIN_FAMILIES, tiny_model

SPLITS = ((1,), (63,), (5, 0, 31), (1, 1, 1), (7, 20, 0, 13), (3, 9, 27, 1, 6))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 40_000) for _ in range(count)]


def forward(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of one plain forward over ``tokens``, without a cache."""
    with plain(model):
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def feed(
    harness: ModelHarness, block: Block, others: Sequence[Block], rng: random.Random | None = None
) -> torch.Tensor:
    """Encode all of ``block`` behind ``others``, in one step or in ragged pieces; its logits."""
    cuts = {0, len(block)} | (set(rng.choices(range(len(block)), k=2)) if rng else set())
    logits = [
        harness.run([Chunk(block, start, stop - start, [*others, block])])
        for start, stop in pairwise(sorted(cuts))
    ]
    return torch.cat(logits) if logits else torch.empty(0)


def check_equal(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-4) -> None:
    """Within ``tolerance`` of the largest logit."""
    assert got.shape == wanted.shape
    assert float((got - wanted).abs().max()) < tolerance * float(wanted.abs().max())


def check_blockwise(harness: ModelHarness, lengths: Sequence[int], seed: int = 0) -> None:
    """Feed one text as blocks, each in ragged pieces, and compare with the plain forward."""
    rng, tokens = random.Random(seed), random_tokens(sum(lengths), seed)
    ends = [0, *accumulate(lengths)]
    blocks: list[Block] = []
    logits = []
    for start, stop in pairwise(ends):
        blocks.append(harness.block(tokens[start:stop]))
        if stop > start:
            logits.append(feed(harness, blocks[-1], blocks[:-1], rng))
    check_equal(torch.cat(logits), forward(harness.model, tokens))
    for block in blocks:
        block.release()


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_read_as_one_plain_text_in_every_family(family: str) -> None:
    harness = ModelHarness(tiny_model(family))
    for seed, lengths in enumerate(SPLITS):
        check_blockwise(harness, lengths, seed)
    assert harness.all_free


@pytest.mark.parametrize("fused", [False, True])
def test_blocks_read_as_one_plain_text_on_the_embedded_model(
    smollm_model: Any, fused: bool
) -> None:
    harness = ModelHarness(smollm_model, num_pages=32, fused=fused)
    for lengths in ((41,), (7, 20, 0, 13), (3, 9, 11, 1, 6)):
        check_blockwise(harness, lengths)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_each_worker_reads_the_others_as_if_they_stood_before_it(family: str) -> None:
    """Two blocks that read each other in turn: each sees the text in an order of its own."""
    harness = ModelHarness(tiny_model(family))
    common, first, second, own = (random_tokens(n, n) for n in (13, 7, 11, 5))
    shared = harness.block(common)
    feed(harness, shared, [])
    left, right = harness.block(first), harness.block(second)
    feed(harness, left, [shared])
    feed(harness, right, [shared])
    ours = harness.block(own)
    got = feed(harness, ours, [shared, left])
    check_equal(got, forward(harness.model, [*common, *first, *own])[-len(own) :])
    ours.release()
    theirs = harness.block(own)
    got = feed(harness, theirs, [shared, right])
    check_equal(got, forward(harness.model, [*common, *second, *own])[-len(own) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_moved_paragraph_is_turned_once_and_its_values_are_as_they_were(family: str) -> None:
    harness = ModelHarness(tiny_model(family), page_size=8)
    common, paragraph = harness.block(random_tokens(21)), harness.block(random_tokens(13, 1))
    feed(harness, common, [])
    feed(harness, paragraph, [common])
    layers = range(len(harness.cache.layers))
    before = [(harness.stored(layer, common), harness.stored(layer, paragraph)) for layer in layers]
    tokens = [*common.tokens, *paragraph.tokens]
    paragraph.move_to(common)
    assert common.tokens == tokens
    assert not paragraph.tokens
    assert not paragraph.pages
    for layer, ((old_keys, old_values), (keys, values)) in zip(layers, before, strict=True):
        moved_keys, moved_values = harness.stored(layer, common)
        assert torch.equal(moved_keys[:21], old_keys)
        assert torch.equal(moved_values[:21], old_values)
        assert torch.equal(moved_values[21:], values)
        turned = rotate(keys, 21.0, harness.inv_freq(layer))
        torch.testing.assert_close(moved_keys[21:].double(), turned, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_move_reads_the_history_as_one_text(family: str) -> None:
    """Three moves at odd places, then logits of the next block against a plain forward."""
    harness = ModelHarness(tiny_model(family), page_size=8)
    common = harness.block(random_tokens(19))
    feed(harness, common, [])
    for index, length in enumerate((1, 13, 31)):
        paragraph = harness.block(random_tokens(length, 10 + index))
        feed(harness, paragraph, [common])
        paragraph.move_to(common)
    own = harness.block(random_tokens(5, 20))
    wanted = forward(harness.model, [*common.tokens, *own.tokens])[-5:]
    check_equal(feed(harness, own, [common]), wanted)


@pytest.mark.parametrize("num_workers", [2, 5])
def test_every_token_is_written_once_however_many_workers_read_it(
    chat: ChatTemplate, num_workers: int
) -> None:
    """The cache starts full of NaN: a step fills as many slots as it has tokens, no more."""
    harness = ModelHarness(tiny_model("llama"), num_pages=128)
    protocol = Protocol(name="x", rules="Go.", stagger=0, min_chars=0, paragraph_end="blank_line")
    request = Request(
        ({"role": "user", "content": "Hello"},),
        workers=make_workers(num_workers),
        protocol=protocol,
        max_steps=12,
        max_tokens=2,
    )
    script = Script(harness, chat, request, {"Alice": [" a few words.\n\n"]}, runs=True)
    slots_used: set[int] = set()

    def check(turn: ScheduledStep) -> None:
        new = {slot for f in turn.chunks for slot in f.block.slots(f.start, f.start + f.count)}
        assert len(new) == sum(f.count for f in turn.chunks)
        slots_used.update(new)
        for keys, values in harness.cache.layers:
            for pages in (keys, values):
                written = (~pages.isnan()).all(-1).all(-1).flatten().nonzero()[:, 0].tolist()
                assert set(written) <= slots_used | moved
        blocks = script.session.phase.blocks
        pages = [page for block in blocks for page in block.pages]
        assert len(pages) == len(set(pages))
        size = harness.cache.pool.page_size
        assert len(pages) == sum(-(-len(block) // size) for block in blocks)
        assert harness.cache.pool.num_free == harness.cache.pool.num_pages - len(pages)

    moved: set[int] = set()
    while script.session.finished is None:
        script.step(check=check)
        common = script.parallel.shared.common
        moved.update(common.slots(0, len(common)))
    assert script.parallel.history
