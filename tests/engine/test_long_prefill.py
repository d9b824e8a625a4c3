"""Long prompt chunks by a prefill backend, against the same batches without one.

The prefill backend is the definition itself here (`sequences.plain`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hogwild_engine import EngineConfig
from hogwild_engine.api.errors import ConfigError, ModelRefusedError
from hogwild_engine.engine import Engine
from hogwild_engine.loading import load
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.step import batch
from hogwild_engine.step.batch import Chunk, build_batch
from hogwild_engine.step.packed_batch import Sizes, pack, unpack
from hogwild_kernels.backends import PREFILL_BACKENDS
from hogwild_kernels.cuda.long_runs import runs
from hogwild_kernels.table import BlockTable
from model_harness import ModelHarness
from sequences import plain
from tiny import tiny_model

ATTENTION = "triton" if find_spec("triton") and not torch.cuda.is_available() else "reference"
LONG = 20
LONG_PROMPTS = "reference, flash for long prompts"


@pytest.fixture(autouse=True)
def long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LONG_CHUNK", LONG)


def ranges_by_runs(table: BlockTable, rows: set[int]) -> dict[tuple[int, int], tuple[int, int]]:
    """What runs let each (query token, block read) see."""
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for run in runs(table):
        for index in range(run.num_rows):
            diagonal = run.hi - run.num_rows + index
            before, after = run.window
            lo = max(run.lo, diagonal - before) if before >= 0 else run.lo
            hi = min(run.hi, diagonal + after + 1) if after >= 0 else run.hi
            key = run.first_row + index, run.read
            assert key not in seen
            assert run.first_pair + index == pair_of(table, *key)
            assert before < 0 or after == 0 or run.num_rows <= run.hi - run.lo
            seen[key] = lo, hi
    assert {row for row, _ in seen} == rows
    return seen


def pair_of(table: BlockTable, row: int, read: int) -> int:
    return int(table.first_pair[read]) + row - int(table.first_row[read])


def ranges_by_columns(table: BlockTable, rows: set[int]) -> dict[tuple[int, int], tuple[int, int]]:
    pairs = zip(
        table.row_of_pair().tolist(),
        table.read_of_pair().tolist(),
        zip(table.lo.tolist(), table.hi.tolist(), strict=True),
        strict=True,
    )
    return {(row, read): span for row, read, span in pairs if row in rows and span[0] < span[1]}


@pytest.mark.parametrize("seed", range(8))
def test_runs_say_what_the_columns_say_in_every_window(seed: int) -> None:
    """Random batches: several sessions, long and short chunks, blocks twice in a view."""
    rng = random.Random(seed)
    harness = ModelHarness(tiny_model("llama"), num_pages=200)
    sessions = []
    for _ in range(rng.randint(1, 3)):
        common = harness.block(range(rng.randint(1, 60)))
        own = [harness.block(range(rng.randint(1, 70))) for _ in range(3)]
        chunks = []
        for block in (common, *own):
            start = rng.randint(0, len(block) - 1)
            others = [other for other in own if other is not block]
            view = [common, *others, block] if block is not common else [common]
            if rng.random() < 0.3 and block is not common:
                view.insert(0, common)
            chunks.append(Chunk(block, start, len(block) - start, view))
        rng.shuffle(chunks)
        sessions.append(chunks)
        for chunk in chunks:
            for block in chunk.view:
                block.publish()
    made = build_batch(sessions)
    rows = {row for long in made.long_chunks for row in long}
    sizes = Sizes.of(made)
    rotation = harness.cache.shapes[0].rotation
    for window in (None, 1, 2, 7, 20, 33, 64, 100, 1000):
        table = unpack(pack(made, sizes), sizes).table(rotation, window, made)
        assert ranges_by_runs(table, rows) == ranges_by_columns(table, rows)
        deltas = table.cos[[run.first_pair for run in runs(table)]]
        for run, cos in zip(runs(table), deltas, strict=True):
            of_run = table.cos[run.first_pair : run.first_pair + run.num_rows]
            assert (of_run == cos).all()


def logits_of_steps(harness: ModelHarness) -> list[torch.Tensor]:
    """Decode with two workers beside a long and a short chunk; then encode a long one alone."""
    common, first, second = map(harness.block, (range(100, 119), [7, 8], [9]))
    harness.run([Chunk(common, 0, 19, [common])])
    prompt = harness.block(range(200, 231))
    logits = []
    for start, count in ((0, LONG + 3), (LONG + 3, 8)):
        chunks = [
            Chunk(first, 0, 2, [common, second, first], samples=True),
            Chunk(second, 0, 1, [common, first, second], samples=True),
        ]
        for block in (common, first, second):
            block.publish()
        made = build_batch([chunks, [Chunk(prompt, start, count, [prompt], samples=True)]])
        made.logit_indices = list(range(len(made.tokens)))
        logits.append(harness.runner.run(made))
    history = harness.block(range(300, 330))
    logits.append(harness.run([Chunk(history, 0, 30, [common, prompt, history], samples=True)]))
    return logits


@pytest.mark.skipif(torch.cuda.is_available(), reason="the harness's model is on the CPU")
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", ATTENTION),  # beside the Triton kernels, in their interpreter
        ("qwen2", "reference"),  # a window of 6 in one layer
        ("mistral", "reference"),
        ("gemma2", "reference"),  # softcap
        ("gpt_oss", "reference"),  # sinks
        ("smollm3", "reference"),  # layers without rope
        ("glm4", "reference"),  # interleaved pairs, half of the dims
    ],
)
def test_a_prefill_backend_leads_to_the_same_logits_beside_decoding(
    sequence_calls: list[tuple[int, int]], family: str, attention: str
) -> None:
    model = tiny_model(family)
    plain = logits_of_steps(ModelHarness(model, attention="reference", prefill="same"))
    assert not sequence_calls
    alone = logits_of_steps(ModelHarness(model, attention=attention, prefill="flash"))
    assert max(rows for rows, _ in sequence_calls) == 30
    for got, wanted in zip(alone, plain, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.fixture
def load_engine(tokenizer: Any) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        config = EngineConfig(
            device="cpu", num_pages=16, page_size=8, attention="reference", **options
        )
        return Engine(config, Pretrained(tiny_model("llama"), tokenizer))

    return make


def test_a_prefill_backend_that_was_requested_and_cannot_run_is_an_error(
    load_engine: Callable[..., Engine],
) -> None:
    message = r"^prefill_attention: wanted for 'varlen' a CUDA device"
    with pytest.raises(ConfigError, match=message):
        load_engine(prefill_attention="varlen")


def test_an_attention_backend_that_cannot_read_this_cache_is_an_error_of_the_setting(
    tokenizer: Any,
) -> None:
    config = EngineConfig(dtype="float16", attention="native", num_pages=16)
    with pytest.raises(ConfigError, match=r"^attention: wanted for 'native'"):
        Engine(config, Pretrained(tiny_model("llama").half(), tokenizer))


def test_a_prefill_backend_is_checked_at_load(
    sequence_calls: list[tuple[int, int]], load_engine: Callable[..., Engine]
) -> None:
    with load_engine(prefill_attention="flash") as engine:
        assert {backend.name for backend in engine._cache.backends} == {LONG_PROMPTS}
    assert (6, 12) in sequence_calls
    sequence_calls.clear()
    # "auto" chooses a prefill backend only beside the attention "auto" or "triton".
    with load_engine(prefill_attention="auto") as engine:
        assert {backend.name for backend in engine._cache.backends} == {"reference"}
    assert not sequence_calls


@pytest.mark.usefixtures("sequence_calls")
def test_a_requested_prefill_backend_with_wrong_logits_is_refused(
    load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = plain(*tensors, **options)
        return out, lse / math.log(2)

    monkeypatch.setattr(PREFILL_BACKENDS["flash"], "attend", off)
    with pytest.raises(ModelRefusedError, match="'logits'"):
        load_engine(prefill_attention="flash")


@pytest.mark.skipif(ATTENTION != "triton", reason="auto chooses one only beside Triton")
@pytest.mark.usefixtures("sequence_calls")
@pytest.mark.parametrize("fault", [RuntimeError("no kernel image"), None], ids=["raises", "is off"])
def test_auto_does_without_a_prefill_backend_that_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception | None
) -> None:
    def off(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if fault:
            raise fault
        out, lse = plain(*tensors, **options)
        return 2 * out, lse

    monkeypatch.setattr(PREFILL_BACKENDS["flash"], "attend", off)
    harness = ModelHarness(tiny_model("llama"), attention="triton")
    backends = load._checked_prefill(harness.model, harness.runner, list(range(24)), "auto")
    assert {backend.name for backend in backends} == {"triton"}
    assert "long prompts attend through the attention backend" in caplog.text
