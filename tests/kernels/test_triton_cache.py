"""Writes and moves by Triton against the reference, slot by slot.

They run in Triton's interpreter, or on the GPU if there is one. The interpreter rounds wrongly to
bfloat16, so tests in that dtype store numbers that need no rounding.
"""

from __future__ import annotations

import math

import pytest
import torch

from hogwild_kernels.backends import BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NUM_PAGES, PAGE_SIZE, KV_HEADS = 5, 16, 3


def nan_pages(layers: int, dim: int, dtype: torch.dtype, storage: str) -> torch.Tensor:
    """NaN-filled ``[L, num_pages, page_size, KH, D]``."""
    sizes = (layers, NUM_PAGES, PAGE_SIZE, KV_HEADS, dim)
    if storage == "head-major":
        pages = torch.full((layers, KV_HEADS, NUM_PAGES, PAGE_SIZE, dim), math.nan, device=DEVICE)
        return pages.to(dtype).permute(0, 2, 3, 1, 4)
    return torch.full(sizes, math.nan, device=DEVICE).to(dtype)


@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.float16, 80), (torch.bfloat16, 20)], ids=str
)
def test_tokens_are_written_to_their_slots_and_nowhere_else(
    storage: str, dtype: torch.dtype, dim: int
) -> None:
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, device=DEVICE)[:31]
    slots[3] = -1
    k, v = (torch.randn(KV_HEADS, 31, dim, device=DEVICE).to(dtype).transpose(0, 1) for _ in "kv")
    pages = {
        name: tuple(nan_pages(1, dim, dtype, storage)[0] for _ in "kv")
        for name in ("triton", "reference")
    }
    for name, (k_pages, v_pages) in pages.items():
        BACKENDS[name].write(k, v, k_pages, v_pages, slots)
    for got, wanted in zip(pages["triton"], pages["reference"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_writing_casts_to_the_dtype_of_the_pages() -> None:
    k, v = (torch.randn(3, KV_HEADS, 64, device=DEVICE).bfloat16().float() for _ in "kv")
    k_pages, v_pages = (nan_pages(1, 64, torch.bfloat16, "page-major")[0] for _ in "kv")
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    BACKENDS["triton"].write(k, v, k_pages, v_pages, slots)
    assert torch.equal(k_pages[0, :3], k.bfloat16())
    assert torch.equal(v_pages[0, :3], v.bfloat16())


@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize(("dtype", "dim"), list(zip(DTYPES, (64, 80, 24), strict=True)), ids=str)
def test_a_move_rotates_keys_and_copies_values_in_every_layer(
    storage: str, dtype: torch.dtype, dim: int
) -> None:
    order = torch.randperm(NUM_PAGES * PAGE_SIZE, device=DEVICE)
    source, target = order[:17], order[17:34]
    angle = torch.randn(17, dim // 2, device=DEVICE) * 10
    keys, values = (nan_pages(2, dim, dtype, storage) for _ in "kv")
    for layer in range(2):
        k, v = (torch.randn(17, KV_HEADS, dim, device=DEVICE).to(dtype) for _ in "kv")
        BACKENDS["reference"].write(k, v, keys[layer], values[layer], source)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    cos, sin = angle.cos(), angle.sin()
    BACKENDS["triton"].move(keys, values, source, target, cos, sin)
    BACKENDS["reference"].move(wanted_keys, wanted_values, source, target, cos, sin)
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(keys, wanted_keys, atol=rounding, rtol=rounding, equal_nan=True)
    torch.testing.assert_close(values, wanted_values, atol=0, rtol=0, equal_nan=True)
