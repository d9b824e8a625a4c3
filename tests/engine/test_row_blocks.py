"""Linear layers are batch invariant in every form: a row of output depends on its row of input."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from hogwild_engine.step import linear_packing
from hogwild_engine.step.row_blocks import RowBlocks, block_sizes, invariant_sizes

FORMS = ("NativeLinear", "PackedLinear", "nn.Linear")
INT8_FORMS = ("NativeInt8Linear", "PackedInt8Linear")
ALL = [(form, dtype) for form in INT8_FORMS + FORMS for dtype in (torch.float32, torch.bfloat16)]
ALL.append(("nn.Linear", torch.float16))  # no other form takes it
# the widths of SmolLM2-135M, and sizes that the C code does not take
SHAPES = [(80, 576), (576, 1536), (50, 100), (33, 1537)]


def layer_of(
    monkeypatch: pytest.MonkeyPatch, form: str, shape: tuple[int, int], dtype: torch.dtype
) -> torch.nn.Module:
    """What `pack_linear` makes of a layer if all forms before ``form`` fail."""

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such operator here")

    names = INT8_FORMS + FORMS if "Int8" in form else FORMS
    for name in names[: names.index(form)]:
        monkeypatch.setattr(linear_packing, name, fail)
    linear_packing._warn_once.cache_clear()
    bias = torch.randn(shape[0]).to(dtype)
    quantization = "int8" if "Int8" in form else "none"
    return linear_packing.pack_linear(torch.randn(shape).to(dtype), bias, quantization)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("form", "dtype"), ALL, ids=str)
def test_the_bits_of_a_row_depend_on_nothing_but_the_row(
    monkeypatch: pytest.MonkeyPatch, form: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    layer = layer_of(monkeypatch, form, shape, dtype)
    random = Random(f"{form} {dtype} {shape}")
    x = torch.randn(600, shape[1]).to(dtype)
    x[::7] *= 1000
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = layer(x)
        for rows in (1, 1, 1, 2, 3, 5, 8, 13, 31, 33, 65, 130, 250, 257, 600):
            torch.set_num_threads(random.choice((1, 2)))
            picked = torch.tensor([random.randrange(600) for _ in range(rows)])
            assert torch.equal(layer(x[picked]), together[picked]), rows
    finally:
        torch.set_num_threads(before)


def test_sizes_that_differ_are_not_used() -> None:
    """An operator that rounds differently from 64 rows on, and whose pairs feel their place."""

    class Choosy(torch.nn.Module):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.stack([self.weight @ row for row in x])
            if len(x) == 2:
                out[1] += 1
            return out * (1 + 1e-6) if len(x) >= 64 else out

    assert invariant_sizes(Choosy, (48, 64), torch.float32, has_bias=False) == (1, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("rows", "sizes", "blocks"),
    [
        (0, (1, 4), []),
        (3, (1, 4), [4]),
        (1, (2, 64), [2]),
        (9, (1, 4), [4, 4, 1]),
        (40, (4, 64), [4] * 10),
        (50, (4, 64), [64]),
        (130, (1, 64), [64, 64, 1, 1]),
    ],
)
def test_rows_are_split_with_little_padding(
    rows: int, sizes: tuple[int, ...], blocks: list[int]
) -> None:
    assert list(block_sizes(rows, sizes)) == blocks


def test_shapes_of_the_input_are_kept() -> None:
    layer = RowBlocks(torch.nn.Linear(8, 3).requires_grad_(False), (2, 4))
    for shape in [(8,), (0, 8), (2, 3, 8), (1, 7, 8)]:
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), layer.linear(x))
