"""`gpu_check.py` as a whole, at tiny sizes in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from recipes.gpu_check import _targets

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_checks_every_kernel_and_writes_its_results(tmp_path: Path) -> None:
    script, out = ROOT / "recipes" / "gpu_check.py", tmp_path / "gpu.json"
    unset = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-W", "error::FutureWarning", str(script), "--dry-run"]
    done = subprocess.run(
        [*command, "--json", str(out)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found["kernels"]) == 12
    assert all(row["right"] for row in found["kernels"])
    assert {row["how"] for row in found["steps"]} >= {"transformers, sdpa", "no graphs"}
    assert all(row["us"] > 0 for row in found["attention"])
    assert [row["attends"] for row in found["prefill"]] == ["same"]
    assert all(f"{name} left out: it wants a CUDA" in done.stdout for name in ("flash", "varlen"))


def test_targets_are_held_to_what_was_measured() -> None:
    row = {"workers": 4}
    attention = [
        {**row, "context": 65_536, "of_ceiling": 0.8},
        {**row, "context": 16_384, "of_ceiling": 0.5},
        {**row, "context": 1_024, "of_ceiling": 0.1},
    ]
    steps = [
        {"how": "graphs", "workers": workers, "context": 8_192, "ms": ms}
        for workers, ms in ((1, 10.0), (2, 10.5), (4, 12.0), (8, 20.0))
    ]
    met = [target["met"] for target in _targets({"attention": attention, "steps": steps})]
    assert met == [True, False, True, False]
    assert _targets({}) == []
