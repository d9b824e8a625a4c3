"""Matrices in C against torch, in every kind of number, with AMX and without."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hogwild_kernels.cpu import c_backend, matrix

KINDS = [
    dtype
    for dtype in (torch.float32, torch.bfloat16, torch.int8)
    if matrix.unsupported_reason(torch.zeros((16, 64), dtype=dtype)) is None
]
AMX = (False, True) if c_backend.build_error() is None and c_backend.has_amx() else (False,)
SHAPES = [(16, 64), (80, 576), (64, 128), (208, 1536), (1056, 320)]
BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}

pytestmark = pytest.mark.skipif(not KINDS, reason="no compiler")


class Problem:
    """A matrix and what it should give."""

    def __init__(
        self,
        kind: torch.dtype,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        use_amx: bool,
        bias: bool = True,
        share: bool = False,
    ) -> None:
        columns, width = shape
        self.kind, self.factors = kind, torch.ones(width)
        self.bias = torch.randn(columns).to(dtype) if bias else None
        if kind == torch.int8:
            whole = torch.randint(-127, 128, shape, dtype=torch.int8)
            scale, self.factors = torch.rand(columns) + 0.1, torch.rand(width) + 0.5
            self.weight = whole * scale[:, None]
            stored, more = whole, (scale, self.factors)
        else:
            self.weight = torch.randn(columns, width).to(kind)
            stored, more = self.weight, ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c_backend, "has_amx", lambda: use_amx)
            self.matrix = matrix.Matrix(stored, self.bias, *more, share=share)

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double() * self.factors
        if self.kind == torch.int8:
            step = x.abs().amax(dim=-1, keepdim=True) / 127
            x = torch.where(step > 0, (x / step).round() * step, 0)
        out = x @ self.weight.double().T
        return out if self.bias is None else out + self.bias.double()

    def error(self, x: torch.Tensor) -> float:
        """The norm of the difference over the norm."""
        exact = self.wanted(x)
        return float((self.matrix(x).double() - exact).norm() / exact.norm())


def dtypes(kind: torch.dtype) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if kind == torch.int8 else [kind]


ARMS = [(kind, dtype, amx) for kind in KINDS for dtype in dtypes(kind) for amx in AMX]


@pytest.mark.parametrize(("kind", "dtype", "amx"), ARMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows(
    kind: torch.dtype, dtype: torch.dtype, amx: bool, shape: tuple[int, int]
) -> None:
    problem = Problem(kind, shape, dtype, use_amx=amx)
    # a number of x that lies between two whole ones may become either
    bound = max(BOUND[dtype], 4e-3 if kind == torch.int8 else 0)
    for rows in (1, 2, 3, 4, 5, 8, 16, 17, 31, 33, 48, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        assert problem.matrix(x).dtype == dtype
        assert problem.error(x) < bound, rows


@pytest.mark.parametrize(("kind", "dtype", "amx"), ARMS, ids=str)
def test_leading_dims_gaps_zeros_and_no_bias(
    kind: torch.dtype, dtype: torch.dtype, amx: bool
) -> None:
    problem = Problem(kind, (32, 128), dtype, use_amx=amx, bias=False)
    x = torch.randn(2, 3, 256).to(dtype)[..., ::2]
    x[1, 2] = 0
    assert problem.error(x) < 5e-3
    assert (problem.matrix(x)[1, 2] == 0).all()
    assert problem.matrix(x[:, :0]).shape == (2, 0, 32)


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize(("kind", "dtype", "amx"), ARMS, ids=str)
def test_the_bits_of_a_row_depend_on_nothing_but_the_row(
    kind: torch.dtype, dtype: torch.dtype, amx: bool, share: bool
) -> None:
    random = Random(f"{kind} {dtype} {amx} {share}")
    before = torch.get_num_threads()
    try:
        for _ in range(4):
            shape = (16 * random.randint(1, 12), 64 * random.randint(1, 26))
            problem = Problem(
                kind, shape, dtype, use_amx=amx, bias=random.random() < 0.5, share=share
            )
            x = torch.randn(600, shape[1]).to(dtype)
            torch.set_num_threads(1)
            alone = torch.cat([problem.matrix(row) for row in x[:, None]])
            for _ in range(12):
                torch.set_num_threads(random.choice((1, 2)))
                rows = random.choice((random.randint(1, 16), random.randint(17, 600)))
                picked = torch.tensor([random.randrange(600) for _ in range(rows)])
                assert torch.equal(problem.matrix(x[picked]), alone[picked]), (shape, rows)
    finally:
        torch.set_num_threads(before)


def test_a_shared_weight_is_not_copied() -> None:
    weight = torch.randn(32, 64)
    shared = matrix.Matrix(weight, share=True)
    weight.zero_()
    assert (shared(torch.randn(3, 64)) == 0).all()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros((16, 64), dtype=torch.float16), "got torch.float16"),
        (torch.zeros(24, 64), "rows in 16s"),
        (torch.zeros(16, 24), "multiple of 64 bytes"),
    ],
)
def test_what_it_cannot_multiply_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matrix.Matrix(weight)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 32), torch.float32), ((1, 2048), torch.float32), ((2, 64), torch.bfloat16)],
)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != torch.bfloat16], ids=str)
def test_x_of_another_width_or_type_is_refused(
    kind: torch.dtype, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = Problem(kind, (64, 64), torch.float32, use_amx=True).matrix
    with pytest.raises(ValueError, match=r"x: wanted \[\.\.\., 64\]"):
        matrix(torch.randn(shape).to(dtype))


@pytest.mark.parametrize(("kind", "dtype", "amx"), ARMS, ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [(0, 3), (4, 40), (5, 0)])
def test_what_is_not_finite_shows_in_its_row_alone(
    kind: torch.dtype, dtype: torch.dtype, amx: bool, fault: float, place: tuple[int, int]
) -> None:
    matrix = Problem(kind, (32, 128), dtype, use_amx=amx).matrix
    x = torch.randn(6, 128).to(dtype)
    x[place] = fault
    bad = ~torch.isfinite(matrix(x))
    assert bad[place[0]].all()
    assert int(bad.any(dim=1).sum()) == 1


@pytest.mark.skipif(torch.int8 not in KINDS, reason="no compiler")
def test_tiny_numbers_are_zero_as_whole_ones() -> None:
    matrix = Problem(torch.int8, (32, 128), torch.float32, use_amx=False, bias=False).matrix
    assert matrix(torch.full((2, 128), 1e-37)).abs().max() == 0


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "build_error", lambda: "no C compiler")
    assert "no C compiler" in str(matrix.unsupported_reason(torch.zeros(16, 64)))
