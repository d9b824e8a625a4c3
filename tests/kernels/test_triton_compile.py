"""Resources of the Triton kernels on GPUs that need not be present, against a budget.

They are compiled in a process of their own: the interpreter that other tests use cannot be switched
off again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "harness"
BUDGET = json.loads((TESTS / "kernel_budget.json").read_text())
MAIN = ("decode-16", "prefill-128")
SHAPES = {key.split()[1] for key in BUDGET if key.startswith("sm_")}
LARGEST_SHARED = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448}  # bytes of one program


def compiled(shapes: Sequence[str]) -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(TESTS / "compile_report.py"), "--shapes", *shapes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "shapes",
    [MAIN, pytest.param(sorted(SHAPES - set(MAIN)), marks=pytest.mark.slow)],
    ids=["main", "others"],
)
@pytest.mark.timeout(900)
def test_kernels_stay_within_their_budget(shapes: Sequence[str]) -> None:
    found = compiled(shapes)
    assert {key.split()[1] for key in found} == set(shapes)
    over = [
        f"{key}: {what} {used} of {(BUDGET.get(key) or BUDGET[key.split()[2]])[what]}"
        for key, usage in found.items()
        for what, used in usage.items()
        if used > (BUDGET.get(key) or BUDGET[key.split()[2]])[what]
    ]
    assert not over, over


def test_the_budget_allows_no_spills_and_fits_every_target() -> None:
    for key, bound in BUDGET.items():
        assert bound["spills"] == 0
        assert bound["shared"] <= LARGEST_SHARED.get(key.split()[0], 48_000)
