"""The same request gives the same bits: alone, beside others, however its prompt is split.

`schedules` draws sessions and schedules. Here a few of each run on every path of the C code; with
HOGWILD_TEST_SCHEDULES=200 many do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.activations import ACT2FN

from hogwild_engine.step.activations import PIECE, PiecewiseActivation
from hogwild_kernels.cpu import c_backend

DRAWS = int(os.environ.get("HOGWILD_TEST_SCHEDULES", "1"))
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or ""
ROOT = Path(__file__).parents[2]

NO_AMX = "-mno-amx-tile -mno-amx-bf16 -mno-amx-int8"
PATHS: dict[str, dict[str, str]] = {
    "as built": {},
    "AVX-512": {"CC": f"{COMPILER} {NO_AMX}"},
    "AVX2": {"CC": f"{COMPILER} {NO_AMX} -mno-avx512f", "ATEN_CPU_CAPABILITY": "avx2"},
    "no compiler": {"CC": "false"},
}
"""What the environment says on each path. docs/chat_model.md tells users the same."""
KINDS = ["llama:float32:none", "llama:bfloat16:none", "starcoder2:float32:none"]
if DRAWS > 1:
    KINDS += ["llama:float32:int8", "llama:bfloat16:int8", "gemma2:bfloat16:none"]


def run_on(path: str, program: str, *arguments: str) -> None:
    """Run a program of the harness in a process of its own, on a path of the C code."""
    if path.startswith("AVX") and (not COMPILER or c_backend.build_error()):
        pytest.skip("there is no C compiler")
    folders = (ROOT, ROOT / "engine", ROOT / "kernels", ROOT / "tests" / "harness")
    env = {**os.environ, **PATHS[path], "PYTHONPATH": os.pathsep.join(map(str, folders))}
    program = str(ROOT / "tests" / "harness" / "schedules.py")
    command = [sys.executable, program, str(DRAWS), *KINDS]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60 + 120 * DRAWS
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu_new", "sigmoid"])
@pytest.mark.parametrize("width", [72, 100, 1536])
def test_an_activation_does_not_depend_on_the_size_of_the_step(
    name: str, dtype: torch.dtype, width: int
) -> None:
    function = PiecewiseActivation(ACT2FN[name])
    row = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = function(row[None])[0]
    torch.testing.assert_close(alone, ACT2FN[name](row[None])[0])
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for count in (2, 5, 17, 2 * PIECE // width + 3):
                rows = function(row.expand(1, count, -1))
                assert all(torch.equal(other, alone) for other in rows[0])
        finally:
            torch.set_num_threads(before)
