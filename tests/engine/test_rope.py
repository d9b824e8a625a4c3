"""cos and sin tables: a look-up in the cached table and a computation give the same numbers."""

from __future__ import annotations

import pytest
import torch

from hogwild_engine.cache.rope import MAX_CACHED_POSITIONS, MIN_CACHED_POSITIONS, Rotation


def rotation(sign: int = 1) -> Rotation:
    return Rotation(tuple(1e4 ** (-i / 24) for i in range(24)), 64, sign=sign)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "deltas",
    [
        [],
        [0],
        [5, 5, 0, 1],
        [MIN_CACHED_POSITIONS - 1, 3],
        [MIN_CACHED_POSITIONS],
        [3, MAX_CACHED_POSITIONS - 1, 7],
        [MAX_CACHED_POSITIONS],
        [10**7, 2],
        [-4, 3],
        [-4],
        [3, -MAX_CACHED_POSITIONS],
    ],
    ids=str,
)
def test_a_table_has_cos_and_sin_of_its_deltas(deltas: list[int], sign: int) -> None:
    made = rotation(sign)
    frequencies = torch.zeros(32, dtype=torch.float64)
    frequencies[:24] = torch.tensor(made.inv_freq, dtype=torch.float64)
    angle = torch.tensor(deltas, dtype=torch.float64)[:, None] * frequencies * sign
    for _ in range(2):
        for given in (deltas, torch.tensor(deltas, dtype=torch.int64), torch.tensor(deltas).int()):
            cos, sin = made.table(given)
            assert torch.equal(cos, angle.cos().float())
            assert torch.equal(sin, angle.sin().float())


def test_the_cached_table_grows_up_to_its_maximum() -> None:
    made = rotation()
    for deltas, rows in (
        ([2], MIN_CACHED_POSITIONS),
        ([5000], 8192),
        ([10], 8192),
        ([MAX_CACHED_POSITIONS], 8192),
    ):
        made.table(deltas)
        assert len(made._cached._table[0]) == rows
