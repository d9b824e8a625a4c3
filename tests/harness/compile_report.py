"""Compile the Triton kernels for GPUs that need not be present, and report their resources.

Must run without TRITON_INTERPRET, so in a process of its own:

    python tests/harness/compile_report.py [--shapes decode-16 prefill-128]

prints JSON, one item per kernel: registers per thread, spill instructions and bytes of shared
memory. `kernel_budget.json` holds a bound for each.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from hogwild_kernels.cuda import triton_attention, triton_cache
from hogwild_kernels.table import BlockTable

TARGETS = ("sm_80", "sm_89", "sm_90")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {
    triton_attention: ("split_kernel", "reduce_kernel"),
    triton_cache: ("write_kernel", "move_kernel"),
}
PAGE_SIZE = 32


class Shape(NamedTuple):
    """One layer's attention. The dtype is that of queries and cache."""

    num_rows: int
    group: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None
    sinks: bool = False


SHAPES = {
    "decode-16": Shape(4, 4, 128),
    "decode-32": Shape(8, 4, 128),
    "decode-64": Shape(16, 4, 128),
    "prefill-128": Shape(512, 4, 128),
    "decode-16-d64": Shape(4, 3, 64, sinks=True),
    "prefill-128-d64": Shape(512, 8, 64, sinks=True),
    "decode-16-d80": Shape(4, 1, 80, torch.float16),
    "prefill-128-d96": Shape(512, 1, 96),
    "decode-16-d256": Shape(4, 2, 256, softcap=50.0),
    "prefill-64-d256": Shape(512, 2, 256, softcap=50.0),
    "prefill-32-d256-fp32": Shape(512, 2, 256, torch.float32),
    "decode-16-fp32": Shape(4, 4, 128, torch.float32),
    "prefill-64-fp32": Shape(512, 4, 128, torch.float32),
}


class Recorder:
    """Stands in for a kernel; a launch compiles it for the target and runs nothing."""

    def __init__(self, kernel: Any, target: GPUTarget, found: dict[str, dict[str, int]]) -> None:
        self._kernel, self._target, self._found = kernel, target, found

    def __getitem__(self, grid: Any) -> Any:
        return self._compile

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        kernel, backend = self._kernel, make_backend(self._target)
        binder: Any = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, attrs = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        source = ASTSource(kernel, signature, constants, attrs)
        compiled = triton.compile(source, target=self._target, options=options.__dict__)
        self._found[kernel.fn.__name__] = {
            **_usage(compiled.asm["cubin"]),
            "shared": compiled.metadata.shared,
        }


def _usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(option: str) -> str:
            command = [str(CUOBJDUMP), option, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        registers = re.search(r"REG:(\d+)", dump("-res-usage"))
        assert registers, "cuobjdump printed no registers"
        spills = len(re.findall(r"\b(?:LDL|STL)\b", dump("-sass")))
    return {"registers": int(registers[1]), "spills": spills}


def launch(shape: Shape) -> None:
    """Call every operation once with tensors of this shape, as an engine would."""
    num_pages, heads, dim = 8, 2, shape.dim
    pages = torch.zeros((2, num_pages, PAGE_SIZE, heads, dim), dtype=shape.dtype)
    rows = torch.zeros((shape.num_rows, heads, dim), dtype=shape.dtype)
    q = torch.zeros((shape.num_rows, heads * shape.group, dim), dtype=shape.dtype)
    angles = torch.zeros((shape.num_rows, dim // 2))
    column = torch.zeros(1, dtype=torch.int32)
    table = BlockTable(
        pages=torch.zeros((1, num_pages), dtype=torch.int32),
        first_row=column,
        num_rows=column + shape.num_rows,
        first_pair=column,
        lo=torch.zeros(shape.num_rows, dtype=torch.int32),
        hi=torch.ones(shape.num_rows, dtype=torch.int32),
        cos=angles,
        sin=angles,
    )
    triton_attention.block_attention(
        q,
        pages[0],
        pages[1],
        table,
        scale=1.0,
        softcap=shape.softcap,
        sinks=torch.zeros(q.shape[1], dtype=shape.dtype) if shape.sinks else None,
    )
    slots = torch.zeros(shape.num_rows, dtype=torch.int64)
    triton_cache.write_kv(rows, rows, pages[0], pages[1], slots)
    triton_cache.move_kv(pages, pages, slots, slots, angles, angles)


def report(shape: Shape, sm: str) -> dict[str, dict[str, int]]:
    """Return what each kernel of a batch uses on one target."""
    found: dict[str, dict[str, int]] = {}
    target = GPUTarget("cuda", int(sm.removeprefix("sm_")), 32)
    with ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                recorder = Recorder(getattr(module, name), target, found)
                stack.enter_context(mock.patch.object(module, name, recorder))
        launch(shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    found = {
        f"{sm} {name} {kernel}": usage
        for sm in TARGETS
        for name in parser.parse_args().shapes
        for kernel, usage in report(SHAPES[name], sm).items()
    }
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
