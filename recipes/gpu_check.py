"""Check and measure the Triton kernels and the engine's step on this machine's GPU.

    python recipes/gpu_check.py --json gpu.json
    python recipes/gpu_check.py --dry-run     # tiny sizes on the CPU, in Triton's interpreter

Four parts:

- kernels: every kernel against the reference backend.
- attention: bytes of keys and values read per second, against the read ceiling of the card.
- prefill: a long prompt's attention by Triton, by flash-attn and by torch, where installed.
- steps: a model of Qwen3-8B's shape with random weights, 1, 2, 4 and 8 workers over one cache,
  against transformers on one sequence.

The last lines say which targets are met. Needs torch 2.11, triton 3.6 and transformers 5.17 or
newer, and 24 GB of memory on the card (`--layers` makes the model smaller).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "kernels", ROOT / "engine", ROOT):
    sys.path.insert(0, str(folder))

CONTEXTS = (1_024, 4_096, 16_384, 65_536)
STEP_CONTEXTS = (1_024, 8_192, 16_384)
WORKERS = (1, 2, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a kernel is wrong, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--layers", type=int, help="layers of the model, 36 by default")
    parser.add_argument(
        "--only", choices=("kernels", "attention", "prefill", "steps"), help="run one part only"
    )
    options = parser.parse_args(argv)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --dry-run runs tiny sizes on the CPU")
    device = "cpu" if options.dry_run else "cuda"
    torch.manual_seed(0)
    start = time.perf_counter()
    found: dict[str, Any] = {"machine": _machine(device), "dry_run": options.dry_run}
    print("\n".join(f"{name}: {value}" for name, value in found["machine"].items()))
    parts = {
        "kernels": _kernels,
        "attention": _attention,
        "prefill": _prefill,
        "steps": _steps,
    }
    for name, part in parts.items():
        if options.only in (None, name):
            print(f"\n{name}", flush=True)
            found[name] = part(device, options)
    found["targets"] = _targets(found)
    found["seconds"] = time.perf_counter() - start
    print(f"\ntargets (all parts took {found['seconds']:.0f} s)")
    _print_rows(found["targets"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(row["right"] for row in found.get("kernels", [])) else 1


def _kernels(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    from recipes.gpu_kernels import check_kernels

    rows = check_kernels(device, tiny=options.dry_run)
    _print_rows(rows)
    return rows


def _attention(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    from recipes.gpu_kernels import measure_attention, read_ceiling

    tiny = options.dry_run
    ceiling = read_ceiling(device, tiny=tiny)
    print(f"read ceiling {ceiling / 1e9:.0f} GB/s")
    rows = []
    for workers in (2,) if tiny else WORKERS:
        for context in (40,) if tiny else CONTEXTS:
            row = measure_attention(device, workers, context, tiny=tiny)
            row["of_ceiling"] = row.pop("bytes_per_s") / ceiling
            rows.append(row)
            _print_rows([row], header=len(rows) == 1)
    return rows


def _prefill(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    from hogwild_kernels.backends import PREFILL_BACKENDS
    from recipes.gpu_kernels import measure_prefill, prefill_spec

    tiny = options.dry_run
    rows = []
    for name in ("same", *PREFILL_BACKENDS):
        library = PREFILL_BACKENDS.get(name)
        if library and (reason := library.supports(prefill_spec(device))):
            print(f"{name} left out: it wants {reason}")
            continue
        for context in (40,) if tiny else CONTEXTS:
            rows.append(measure_prefill(device, name, context, tiny=tiny))
            _print_rows(rows[-1:], header=len(rows) == 1)
    return rows


def _steps(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    from recipes.gpu_steps import Bench, baseline, random_model

    tiny = options.dry_run
    model = random_model(device, tiny=tiny, layers=options.layers)
    contexts = (40,) if tiny else STEP_CONTEXTS
    rounds = 1 if tiny else 20
    rows: list[dict[str, Any]] = []

    def add(how: str, workers: int, context: int, seconds: float) -> None:
        row = {"how": how, "workers": workers, "context": context, "ms": seconds * 1e3}
        rows.append(row)
        _print_rows([row], header=len(rows) == 1)

    for context in contexts:
        name, seconds = baseline(model, device, context, rounds)
        add(f"transformers, {name}", 1, context, seconds)
    for graphs in (False,) if tiny else (False, True):
        bench = Bench(model, device, max(contexts), graphs=graphs)
        for context in contexts:
            for workers in (1, 2) if tiny else WORKERS:
                how = "graphs" if graphs else "no graphs"
                add(how, workers, context, bench.step_s(workers, context, rounds))
    return rows


def _targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of the sizes that were measured, and whether they are met."""
    rows = []
    for context, wanted in ((65_536, 0.75), (16_384, 0.60)):
        for row in found.get("attention", []):
            if (row["workers"], row["context"]) == (4, context):
                got = row["of_ceiling"]
                name = f"attention, 4 workers at {context}, of read ceiling"
                rows.append({"target": name, "wanted": wanted, "got": got, "met": got >= wanted})
    steps = {
        (row["how"], row["workers"]): row["ms"]
        for row in found.get("steps", [])
        if row["context"] == 8_192
    }
    for how in ("graphs", "no graphs"):
        for workers, wanted in ((2, 1.08), (4, 1.15)):
            if (how, workers) in steps:
                got = steps[how, workers] / steps[how, 1]
                name = f"step, {workers} workers to one at 8192, {how}"
                rows.append({"target": name, "wanted": wanted, "got": got, "met": got <= wanted})
    return rows


def _machine(device: str) -> dict[str, str]:
    import torch
    import transformers
    import triton

    card, driver = "CPU, Triton's interpreter", ""
    if device == "cuda":
        card = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    versions = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    return {"card": card, "driver": driver, **versions}


def _print_rows(rows: Sequence[dict[str, Any]], *, header: bool = True) -> None:
    """Print a table with columns of fixed width, so that rows can be printed one by one."""
    for index, row in enumerate(rows):
        wide = [10 if i else 48 if isinstance(v, str) else 10 for i, v in enumerate(row.values())]
        if header and index == 0:
            print("  ".join(key.ljust(width) for key, width in zip(row, wide, strict=True)))
        cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("  ".join(c.ljust(w) for c, w in zip(cells, wide, strict=True)), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
