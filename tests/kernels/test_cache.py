"""Writing and moving keys and values: what changes, what stays, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hogwild_kernels.api import KernelArgumentError
from hogwild_kernels.backends import BACKENDS
from oracle import rotate

REFERENCE = BACKENDS["reference"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NUM_PAGES, PAGE_SIZE, KV_HEADS = 7, 16, 3


def empty_pages(layers: int, dim: int, dtype: torch.dtype, storage: str) -> torch.Tensor:
    """NaN-filled ``[L, num_pages, page_size, KH, D]``."""
    if storage == "head-major":
        sizes = (layers, KV_HEADS, NUM_PAGES, PAGE_SIZE, dim)
        return torch.full(sizes, math.nan, dtype=dtype).permute(0, 2, 3, 1, 4)
    return torch.full((layers, NUM_PAGES, PAGE_SIZE, KV_HEADS, dim), math.nan, dtype=dtype)


def at(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of one layer's pages by slot."""
    return pages[slots // PAGE_SIZE, slots % PAGE_SIZE]


def num_written(pages: torch.Tensor) -> int:
    return int((~pages.isnan()).any(-1).any(-1).sum())


@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 63, 111])
def test_tokens_are_written_to_their_slots_and_nowhere_else(
    storage: str, dtype: torch.dtype, count: int
) -> None:
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE)[:count]
    k, v = (torch.randn(count, KV_HEADS, 64).to(dtype) for _ in range(2))
    k_pages, v_pages = (empty_pages(1, 64, dtype, storage)[0] for _ in range(2))
    REFERENCE.write(k, v, k_pages, v_pages, slots)
    assert torch.equal(at(k_pages, slots), k)
    assert torch.equal(at(v_pages, slots), v)
    assert num_written(k_pages) == num_written(v_pages) == count


def test_a_negative_slot_is_not_written() -> None:
    slots = torch.tensor([5, -1, 20, -7])
    k, v = torch.randn(4, KV_HEADS, 64), torch.randn(4, KV_HEADS, 64)
    k_pages, v_pages = (empty_pages(1, 64, torch.float32, "page-major")[0] for _ in range(2))
    REFERENCE.write(k, v, k_pages, v_pages, slots)
    assert torch.equal(at(k_pages, slots[[0, 2]]), k[[0, 2]])
    assert torch.equal(at(v_pages, slots[[0, 2]]), v[[0, 2]])
    assert num_written(k_pages) == num_written(v_pages) == 2


def test_writing_casts_to_the_dtype_of_the_pages() -> None:
    k, v = torch.randn(3, KV_HEADS, 64), torch.randn(3, KV_HEADS, 64)
    k_pages, v_pages = (empty_pages(1, 64, torch.bfloat16, "page-major")[0] for _ in range(2))
    REFERENCE.write(k, v, k_pages, v_pages, torch.tensor([0, 1, 2]))
    assert torch.equal(k_pages[0, :3], k.bfloat16())


@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "dim"), [(1, 64), (31, 80), (55, 128)])
def test_a_move_rotates_keys_and_copies_values_in_every_layer(
    storage: str, dtype: torch.dtype, count: int, dim: int
) -> None:
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE)
    source, target = slots[:count], slots[count : 2 * count]
    inv_freq = 10_000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    deltas = torch.randint(-300, 300, (count,)).double()
    angle = deltas[:, None] * inv_freq
    k_pages, v_pages = (empty_pages(3, dim, dtype, storage) for _ in range(2))
    for layer in range(3):
        k, v = (torch.randn(count, KV_HEADS, dim).to(dtype) for _ in range(2))
        REFERENCE.write(k, v, k_pages[layer], v_pages[layer], source)
    before = [at(pages, source) for pages in (*k_pages, *v_pages)]
    REFERENCE.move(k_pages, v_pages, source, target, angle.cos().float(), angle.sin().float())
    for layer in range(3):
        rotated = rotate(before[layer], deltas, inv_freq)
        torch.testing.assert_close(
            at(k_pages[layer], target).double(),
            rotated,
            atol=4 * ROUNDING[dtype],
            rtol=ROUNDING[dtype],
        )
        assert torch.equal(at(v_pages[layer], target), before[3 + layer])
        assert torch.equal(at(k_pages[layer], source), before[layer])
        assert torch.equal(at(v_pages[layer], source), before[3 + layer])
        assert num_written(k_pages[layer]) == num_written(v_pages[layer]) == 2 * count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_move_by_nothing_is_a_copy_to_the_bit(dtype: torch.dtype) -> None:
    k_pages, v_pages = (torch.randn(2, NUM_PAGES, PAGE_SIZE, KV_HEADS, 64).to(dtype) for _ in "kv")
    source, target = torch.arange(0, 20), torch.arange(40, 60)
    still = torch.zeros(20, 32)
    REFERENCE.move(k_pages, v_pages, source, target, still.cos(), still.sin())
    for pages in (*k_pages, *v_pages):
        assert torch.equal(at(pages, target), at(pages, source))


def write_arguments() -> dict[str, Any]:
    pages = {n: torch.zeros(NUM_PAGES, PAGE_SIZE, KV_HEADS, 64) for n in ("k_pages", "v_pages")}
    rows = {name: torch.zeros(4, KV_HEADS, 64) for name in "kv"}
    return {**rows, **pages, "slots": torch.arange(4)}


BAD_WRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "k has other heads": ("k", {"k": torch.zeros(4, 1, 64)}),
    "v has another length": ("v", {"v": torch.zeros(3, KV_HEADS, 64)}),
    "k_pages has too few dims": ("k_pages", {"k_pages": torch.zeros(PAGE_SIZE, KV_HEADS, 64)}),
    "v_pages has another shape": ("v_pages", {"v_pages": torch.zeros(2, PAGE_SIZE, KV_HEADS, 64)}),
    "slots are not int64": ("slots", {"slots": torch.arange(4, dtype=torch.int32)}),
}


@pytest.mark.parametrize("what", list(BAD_WRITES))
def test_a_bad_argument_of_write_is_named(what: str) -> None:
    name, change = BAD_WRITES[what]
    with pytest.raises(KernelArgumentError, match=rf"^{name}: wanted .+, got .+"):
        REFERENCE.write(**{**write_arguments(), **change})


def move_arguments() -> dict[str, Any]:
    pages = {n: torch.zeros(2, NUM_PAGES, PAGE_SIZE, KV_HEADS, 64) for n in ("k_pages", "v_pages")}
    slots = {"source": torch.arange(4), "target": torch.arange(4, 8)}
    return {**pages, **slots, "cos": torch.ones(4, 32), "sin": torch.zeros(4, 32)}


BAD_MOVES: dict[str, tuple[str, dict[str, Any]]] = {
    "k_pages has too few dims": ("k_pages", {"k_pages": torch.zeros(2, PAGE_SIZE, KV_HEADS, 64)}),
    "v_pages has another shape": (
        "v_pages",
        {"v_pages": torch.zeros(1, NUM_PAGES, PAGE_SIZE, KV_HEADS, 64)},
    ),
    "source is not int64": ("source", {"source": torch.arange(4, dtype=torch.int32)}),
    "target is not int64": ("target", {"target": torch.arange(4, dtype=torch.int32)}),
    "target has another length": ("target", {"target": torch.arange(3)}),
    "cos has another shape": ("cos", {"cos": torch.ones(4, 64)}),
    "sin has another shape": ("sin", {"sin": torch.ones(3, 32)}),
}


@pytest.mark.parametrize("what", list(BAD_MOVES))
def test_a_bad_argument_of_move_is_named(what: str) -> None:
    name, change = BAD_MOVES[what]
    with pytest.raises(KernelArgumentError, match=rf"^{name}: wanted .+, got .+"):
        REFERENCE.move(**{**move_arguments(), **change})
