"""Triton's `write_kv` and `move_kv` against the reference, slot by slot.

They run in Triton's interpreter, or on the GPU where there is one. The interpreter rounds wrongly
to bfloat16 and fp8, so tests of those store numbers that need no rounding.
"""

from __future__ import annotations

import math

import pytest
import torch

from hogwild_kernels import KVScales, move_kv, write_kv
from hogwild_kernels.reference import quantize

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


def nan_scales(layers: int) -> KVScales:
    shape = (layers, NUM_PAGES, PAGE_SIZE, KV_HEADS)
    return KVScales(*(torch.full(shape, math.nan, device=DEVICE) for _ in "kv"))


def layer_of(scales: KVScales, layer: int) -> KVScales:
    return KVScales(*(factors[layer] for factors in scales))


def dequantized(pages: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return pages.float() * factors[..., None]


@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.float16, 80), (torch.bfloat16, 20)], ids=str
)
def test_rows_lie_where_their_slots_say_and_nowhere_else(
    storage: str, dtype: torch.dtype, dim: int
) -> None:
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, device=DEVICE)[:31]
    slots[3] = -1
    k, v = (torch.randn(KV_HEADS, 31, dim, device=DEVICE).to(dtype).transpose(0, 1) for _ in "kv")
    pages = {
        impl: tuple(nan_pages(1, dim, dtype, storage)[0] for _ in "kv")
        for impl in ("triton", "reference")
    }
    for impl, (k_pages, v_pages) in pages.items():
        write_kv(k, v, k_pages, v_pages, slots, impl=impl)
    for got, wanted in zip(pages["triton"], pages["reference"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_writing_casts_to_the_dtype_of_the_pages() -> None:
    k, v = (torch.randn(3, KV_HEADS, 64, device=DEVICE).bfloat16().float() for _ in "kv")
    k_pages, v_pages = (nan_pages(1, 64, torch.bfloat16, "page-major")[0] for _ in "kv")
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    write_kv(k, v, k_pages, v_pages, slots, impl="triton")
    assert torch.equal(k_pages[0, :3], k.bfloat16())
    assert torch.equal(v_pages[0, :3], v.bfloat16())


@pytest.mark.parametrize("storage", ["head-major", "page-major"])
@pytest.mark.parametrize(("dtype", "dim"), list(zip(DTYPES, (64, 80, 24), strict=True)), ids=str)
def test_a_move_turns_keys_and_copies_values_in_every_layer(
    storage: str, dtype: torch.dtype, dim: int
) -> None:
    order = torch.randperm(NUM_PAGES * PAGE_SIZE, device=DEVICE)
    source, target = order[:17], order[17:34]
    angle = torch.randn(17, dim // 2, device=DEVICE) * 10
    keys, values = (nan_pages(2, dim, dtype, storage) for _ in "kv")
    for layer in range(2):
        k, v = (torch.randn(17, KV_HEADS, dim, device=DEVICE).to(dtype) for _ in "kv")
        write_kv(k, v, keys[layer], values[layer], source, impl="reference")
    wanted_keys, wanted_values = keys.clone(), values.clone()
    cos, sin = angle.cos(), angle.sin()
    move_kv(keys, values, source, target, cos, sin, impl="triton")
    move_kv(wanted_keys, wanted_values, source, target, cos, sin, impl="reference")
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(keys, wanted_keys, atol=rounding, rtol=rounding, equal_nan=True)
    torch.testing.assert_close(values, wanted_values, atol=0, rtol=0, equal_nan=True)


def fp8_rows(count: int, dim: int) -> torch.Tensor:
    """Numbers that fp8 holds exactly under the scale that a vector gets, a power of two each."""
    exact = (torch.randn(count, KV_HEADS, dim) * 100).clamp(-440, 440).to(torch.float8_e4m3fn)
    exact = exact.float()
    exact[..., 3] = 448.0
    return (exact * 2.0 ** torch.randint(-9, 9, (count, KV_HEADS, 1))).to(DEVICE)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_an_fp8_cache_keeps_a_scale_a_token_and_head(impl: str) -> None:
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, device=DEVICE)[:11]
    slots[2] = -1
    k, v = fp8_rows(11, 80), fp8_rows(11, 80)
    k[5, 1] = 0
    k_pages, v_pages = (nan_pages(1, 80, torch.float8_e4m3fn, "page-major")[0] for _ in "kv")
    scales = layer_of(nan_scales(1), 0)
    write_kv(k, v, k_pages, v_pages, slots, scales=scales, impl=impl)
    kept = slots >= 0
    index = slots[kept] // PAGE_SIZE, slots[kept] % PAGE_SIZE
    assert torch.equal(dequantized(k_pages, scales.keys)[index], k[kept])
    assert torch.equal(dequantized(v_pages, scales.values)[index], v[kept])
    for factors in scales:
        assert int((~factors.isnan()).any(-1).sum()) == int(kept.sum())


def test_rounding_to_fp8_keeps_three_bits_of_mantissa() -> None:
    x = torch.randn(50, 64) * 10.0 ** torch.randint(-3, 4, (50, 1))
    error = (dequantized(*quantize(x)) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / 2**17)).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_move_in_an_fp8_cache_turns_what_the_scaled_numbers_mean(impl: str) -> None:
    """By a quarter turn, which needs no rounding."""
    order = torch.randperm(NUM_PAGES * PAGE_SIZE, device=DEVICE)
    source, target = order[:7], order[7:14]
    sin = torch.ones(7, 32, device=DEVICE)
    k_pages, v_pages = (nan_pages(2, 64, torch.float8_e4m3fn, "page-major") for _ in "kv")
    scales, rows = nan_scales(2), [(fp8_rows(7, 64), fp8_rows(7, 64)) for _ in range(2)]
    for layer, (k, v) in enumerate(rows):
        write = layer_of(scales, layer)
        write_kv(k, v, k_pages[layer], v_pages[layer], source, scales=write, impl="reference")
    move_kv(k_pages, v_pages, source, target, 0 * sin, sin, scales=scales, impl=impl)
    index = target // PAGE_SIZE, target % PAGE_SIZE
    for layer, (k, v) in enumerate(rows):
        first, second = k.chunk(2, dim=-1)
        keys = dequantized(k_pages[layer], scales.keys[layer])[index]
        assert torch.equal(keys, torch.cat((-second, first), dim=-1))
        assert torch.equal(dequantized(v_pages[layer], scales.values[layer])[index], v)
