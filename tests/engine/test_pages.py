"""The page pool and blocks on it, under any order of operations."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache, LayerShape
from hogwild_engine.cache.pages import OutOfPagesError, PagePool
from hogwild_engine.cache.prefix_cache import Prefix
from hogwild_engine.cache.rope import Rotation
from oracle import rotate

PAGE_SIZE, NUM_PAGES, DIM = 4, 12, 4
ROTATION = Rotation((1.0, 0.01), DIM)
INV_FREQ = torch.tensor(ROTATION.inv_freq, dtype=torch.float64)


def key_of(token: int) -> torch.Tensor:
    """What a token's key is at position 0; each token's is its own. ``[1, DIM]``."""
    generator = torch.Generator().manual_seed(token)
    return torch.randn(1, DIM, generator=generator)


class BlocksOnPages(RuleBasedStateMachine):
    """Blocks are written, cut, moved, shared, kept, found again and freed at random; a list of
    tokens models each.
    """

    def __init__(self) -> None:
        super().__init__()
        shape = LayerShape(1, DIM, torch.device("cpu"), torch.float32, ROTATION)
        self.cache = KVCache([shape], NUM_PAGES, PAGE_SIZE, keeps_pages=True)
        self.pool = self.cache.pool
        self.blocks: list[Block] = []
        self.models: list[list[int]] = []
        self.next_token = 0
        self.kept: list[list[int]] = []

    def write(self, block: Block, slots: list[int], start: int) -> None:
        """What a step does: keys at block-local positions, values."""
        keys, values = self.cache.layers[0]
        tokens = block.tokens[start:]
        raw = torch.stack([key_of(token) for token in tokens])
        positions = torch.arange(start, start + len(tokens), dtype=torch.float64)
        rotated = rotate(raw, positions, INV_FREQ).float()
        self.cache.backends[0].write(rotated, raw, keys, values, torch.tensor(slots))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.blocks) - 1))

    @rule()
    def make(self) -> None:
        self.blocks.append(Block(self.cache))
        self.models.append([])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), count=st.integers(0, 9), rewound=st.sampled_from((0, 0, 1, 2)))
    def append(self, data: st.DataObject, count: int, rewound: int) -> None:
        index = self.pick(data)
        keep = max(0, len(self.blocks[index]) - rewound)
        self.blocks[index].truncate(keep)
        del self.models[index][keep:]
        block, model = self.blocks[index], self.models[index]
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        before = (list(block.tokens), list(block.pages), self.pool.num_free)
        start = len(block)
        try:
            slots = block.append(tokens)
        except OutOfPagesError:
            assert (block.tokens, block.pages, self.pool.num_free) == before
            return
        model += tokens
        if tokens:
            self.write(block, slots, start)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), length=st.integers(0, 20))
    def truncate(self, data: st.DataObject, length: int) -> None:
        index = self.pick(data)
        self.blocks[index].truncate(length)
        del self.models[index][length:]

    @precondition(lambda self: len(self.blocks) > 1)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        source, target = self.pick(data), self.pick(data)
        if source == target:
            return
        pages = (list(self.blocks[source].pages), list(self.blocks[target].pages))
        try:
            self.blocks[source].move_to(self.blocks[target])
        except OutOfPagesError:
            assert (self.blocks[source].pages, self.blocks[target].pages) == pages
            return
        self.models[target] += self.models[source]
        self.models[source] = []

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        index = self.pick(data)
        free = self.pool.num_free
        try:
            twin = self.blocks[index].share()
        except OutOfPagesError:
            assert self.pool.num_free == free
            return
        assert free - self.pool.num_free == bool(len(twin) % PAGE_SIZE)
        self.blocks.append(twin)
        self.models.append(list(self.models[index]))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        index = self.pick(data)
        block = self.blocks.pop(index)
        self.models.pop(index)
        block.release()
        if twice:
            block.release()

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        index = self.pick(data)
        block, model = self.blocks[index], self.models[index]
        Prefix(model, PAGE_SIZE).keep(self.pool, block, len(model))
        self.kept.append(list(model))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), written=st.integers(0, 5))
    def reuse(self, data: st.DataObject, written: int) -> None:
        """A block that has encoded the first of a kept text's tokens finds the next ones."""
        text = data.draw(st.sampled_from(self.kept))
        block, model = Block(self.cache), text[: min(written, max(0, len(text) - 1))]
        try:
            slots = block.append(model)
        except OutOfPagesError:
            return
        if model:
            self.write(block, slots, 0)
        reached = Prefix(text, PAGE_SIZE).reuse(self.pool, block, len(model))
        self.blocks.append(block)
        self.models.append(list(text[:reached]))

    @invariant()
    def blocks_hold_what_was_written(self) -> None:
        keys, values = self.cache.layers[0]
        for block, model in zip(self.blocks, self.models, strict=True):
            assert block.tokens == model
            assert len(block.pages) == -(-len(model) // PAGE_SIZE)
            if not model:
                continue
            slots = torch.tensor(block.slots(0, len(model)))
            page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
            raw = torch.stack([key_of(token) for token in model])
            assert torch.equal(values[page, offset], raw)
            turned = rotate(raw, torch.arange(len(model)).double(), INV_FREQ)
            torch.testing.assert_close(keys[page, offset].double(), turned, atol=1e-5, rtol=1e-5)

    @invariant()
    def pages_are_counted(self) -> None:
        held = [page for block in self.blocks for page in block.pages]
        for page in range(NUM_PAGES):
            assert self.pool.references(page) == held.count(page)
        assert self.pool.num_free == NUM_PAGES - len(set(held))

    @invariant()
    def kept_pages_are_free_until_they_are_read(self) -> None:
        for page in range(NUM_PAGES):
            held = self.pool.references(page) > 0 or page in self.pool._kept
            assert self.pool._used[page] == held
        assert set(self.pool._kept) <= set(self.pool._key_of)

    def teardown(self) -> None:
        for block in self.blocks:
            block.release()
        assert self.pool.num_free == NUM_PAGES


BlocksOnPages.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


class TestBlocksOnPages(BlocksOnPages.TestCase):
    """pytest collects the machine by this name."""


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    machine = BlocksOnPages()
    machine.make()
    block = machine.blocks[0]
    machine.write(block, block.append([1, 2, 3, 4, 5, 6, 7, 8]), 0)
    twin = block.share()
    twin.truncate(6)
    machine.write(twin, twin.append([9]), 6)
    machine.blocks = [block, twin]
    machine.models = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9]]
    machine.blocks_hold_what_was_written()
    machine.pages_are_counted()
    machine.teardown()


def found(pool: PagePool, keys: str) -> str:
    return "".join(key for key in keys if pool.find(key.encode()) is not None)


def keeping(keys: str) -> tuple[PagePool, dict[str, int]]:
    """A pool of two pages a key, of which one each is released but kept, in order."""
    pool = PagePool(2 * len(keys), 8, keeps_pages=True)
    pages = dict(zip(keys, pool.allocate(len(keys)), strict=True))
    for key, page in pages.items():
        pool.give_key(page, key.encode())
    for page in pages.values():
        pool.release([page])
    return pool, pages


def test_kept_pages_count_as_free_and_go_least_recently_used_first() -> None:
    pool, pages = keeping("abcde")
    assert pool.num_free == 10
    assert found(pool, "abcde") == "abcde"
    pool.share([pages["a"]])
    assert pool.num_free == 9
    pool.release([pages["a"]])
    pool.allocate(3)
    assert found(pool, "abcde") == "ade"
    pool.allocate(5)
    assert found(pool, "abcde") == "a"
    pool.allocate(2)
    assert found(pool, "abcde") == ""


def test_kept_pages_leave_half_of_the_free_ones_blank() -> None:
    pool = PagePool(12, 8, keeps_pages=True)
    for start in range(0, 60, 3):
        pages = pool.allocate(3)
        for page, key in zip(pages, range(start, start + 3), strict=True):
            pool.give_key(page, bytes([key]))
        pool.release(reversed(pages))
        kept = [key for key in range(start + 3) if pool.find(bytes([key])) is not None]
        assert kept == list(range(start + 3))[-6:] if start else [0, 1, 2]
        assert pool.num_free == 12


def test_a_page_that_is_read_stays_however_many_are_taken() -> None:
    pool, pages = keeping("abc")
    pool.share([pages["b"]])
    pool.allocate(5)
    assert found(pool, "abc") == "b"


def test_a_prefix_outlives_what_follows_it() -> None:
    machine = BlocksOnPages()
    block, text = Block(machine.cache), list(range(5 * PAGE_SIZE))
    block.append(text)
    Prefix([*text, 0], PAGE_SIZE).keep(machine.pool, block, len(text))
    block.release()
    machine.pool.allocate(NUM_PAGES - 6)
    again = Block(machine.cache)
    assert Prefix([*text, 0], PAGE_SIZE).reuse(machine.pool, again, 0) == 3 * PAGE_SIZE


def test_pages_that_are_kept_do_not_scatter_what_is_written_later() -> None:
    """Many sessions come and go: blocks that grow by turns stay on long runs of pages."""
    rng, pool, live = random.Random(0), PagePool(512, 8, keeps_pages=True), []
    runs, blocks = 0, 0
    for step in range(2000):
        if len(live) < 4:
            prompt = pool.allocate(rng.randrange(20, 60))
            for page in prompt:
                pool.give_key(page, f"{step} {page}".encode())
            live.append((prompt, pool.allocate(1), rng.randrange(6, 20)))
        for session in list(live):
            prompt, grown, length = session
            grown += pool.allocate(1, grown[-1])
            if len(grown) == length:
                for pages in (grown, prompt):
                    runs += 1 + sum(b != a + 1 for a, b in pairwise(pages))
                    blocks += 1
                    pool.release(reversed(pages))
                live.remove(session)
    assert runs < 1.5 * blocks


def test_a_page_that_is_written_again_is_not_found() -> None:
    machine = BlocksOnPages()
    block, text = Block(machine.cache), list(range(2 * PAGE_SIZE))
    block.append(text)
    Prefix([*text, 0], PAGE_SIZE).keep(machine.pool, block, len(text))
    block.truncate(len(text) - 1)
    block.append([99])
    again = Block(machine.cache)
    assert Prefix([*text, 0], PAGE_SIZE).reuse(machine.pool, again, 0) == PAGE_SIZE


def test_a_page_is_found_by_all_tokens_before_it() -> None:
    machine = BlocksOnPages()
    block, text = Block(machine.cache), list(range(3 * PAGE_SIZE))
    block.append(text)
    Prefix([*text, 0], PAGE_SIZE).keep(machine.pool, block, len(text))
    for place, reached in ((0, 0), (PAGE_SIZE, 1), (2 * PAGE_SIZE + 1, 2)):
        other = [*text, 0]
        other[place] += 100
        again = Block(machine.cache)
        assert Prefix(other, PAGE_SIZE).reuse(machine.pool, again, 0) == reached * PAGE_SIZE


def test_a_pool_that_is_too_empty_gives_no_page_at_all() -> None:
    pool = PagePool(4, 8)
    pool.allocate(2)
    with pytest.raises(OutOfPagesError):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_growing_block_stays_on_consecutive_pages() -> None:
    pool = PagePool(64, 8)
    blocks = [pool.allocate(1) for _ in range(4)]
    for _ in range(10):
        for pages in blocks:
            pages += pool.allocate(1, pages[-1])
    for pages in blocks:
        assert pages == list(range(pages[0], pages[0] + 11))


def test_a_page_is_free_when_its_last_reader_is_gone() -> None:
    pool = PagePool(3, 8)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 3
