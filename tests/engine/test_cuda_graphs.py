"""Steps replayed at rounded sizes against steps without a graph.

Without a GPU, a replay runs the captured step again: input that does not go through the graph's
buffers would be missing in the second step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hogwild_engine import EngineConfig
from hogwild_engine.api.errors import ConfigError
from hogwild_engine.cache.block import Block
from hogwild_engine.engine import Engine
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.step.batch import Chunk
from hogwild_engine.step.cuda_graphs import MAX_QUERY_TOKENS, CudaCapture, DecodeGraphs, rounded_up
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_engine.step.packed_batch import Sizes, pack, unpack
from model_harness import ModelHarness, batch_of
from tiny import tiny_model


class Replays:
    """Counts captures, and replays by running the step again."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(
        self, step: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        self.captures += 1
        output = step().clone()
        return output.fill_(torch.nan), lambda: output.copy_(step())


def with_graphs(harness: ModelHarness, capture: Any) -> ModelHarness:
    graphs = DecodeGraphs(harness.cache.shapes[0].device, capture)
    harness.runner = ModelRunner(harness.runner.forward, harness.cache, harness.windows, graphs)
    return harness


def written(harness: ModelHarness) -> list[Block]:
    """A common block of 19 tokens and two open ones, encoded at once."""
    common, first, second = (
        harness.block(range(100, 119)),
        harness.block([7, 8]),
        harness.block([9]),
    )
    views: Sequence[tuple[Block, Sequence[Block]]] = (
        (common, [common]),
        (first, [common, first]),
        (second, [common, first, second]),
    )
    harness.run([Chunk(block, 0, len(block), view) for block, view in views], all_logits=False)
    return [common, first, second]


def decoded(
    harness: ModelHarness, blocks: list[Block], writers: Sequence[int], token: int
) -> torch.Tensor:
    chunks = []
    for writer in writers:
        block = blocks[writer]
        block.append([token + writer])
        others = [other for other in blocks[1:] if other is not block]
        chunks.append(Chunk(block, len(block) - 1, 1, [blocks[0], *others, block], samples=True))
    return harness.run(chunks, all_logits=False)


def test_replayed_steps_give_the_logits_of_steps_without_a_graph() -> None:
    """With one writer and with two, over blocks that grow past a page."""
    capture = Replays()
    model = tiny_model("qwen2")  # one of its layers has a window
    harnesses = [ModelHarness(model), with_graphs(ModelHarness(model, attention="triton"), capture)]
    blocks = [written(harness) for harness in harnesses]
    prefill_captures = capture.captures
    for step, writers in enumerate([(1, 2), (2,), (1, 2), (1,)]):
        plain, replayed = (
            decoded(harness, made, writers, 200 + 10 * step)
            for harness, made in zip(harnesses, blocks, strict=True)
        )
        torch.testing.assert_close(replayed, plain, atol=2e-4, rtol=2e-4)
    assert capture.captures - prefill_captures == 2  # one for each number of query tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen2", "glm4"])
def test_cuda_graphs_give_the_logits_of_steps_without_a_graph(family: str) -> None:
    model = tiny_model(family).to("cuda")
    harnesses = [ModelHarness(model), with_graphs(ModelHarness(model), CudaCapture())]
    blocks = [written(harness) for harness in harnesses]
    for step, writers in enumerate([(1, 2), (1, 2), (2,), (1, 2), (1,), (1, 2)]):
        plain, replayed = (
            decoded(harness, made, writers, 200 + 10 * step)
            for harness, made in zip(harnesses, blocks, strict=True)
        )
        torch.testing.assert_close(replayed, plain, atol=2e-4, rtol=2e-4)


def test_padding_changes_no_part_and_neither_reads_nor_writes() -> None:
    harness = ModelHarness(tiny_model("mistral"))
    common, own = harness.block(range(100, 117)), harness.block(range(200, 203))
    plan = batch_of([Chunk(common, 0, 17, [common]), Chunk(own, 0, 3, [common, own], samples=True)])
    needed = Sizes.of(plan)
    sizes = rounded_up(needed)
    assert all(size >= need for size, need in zip(sizes, needed, strict=True))
    exact, padded = (unpack(pack(plan, size), size) for size in (needed, sizes))
    for name, part, longer in zip(exact._fields, exact, padded, strict=True):
        head = longer[: len(part), : part.shape[1]] if name == "pages" else longer[: len(part)]
        assert torch.equal(head, part), name
    assert (padded.slots[needed.query_tokens :] == -1).all()
    assert (padded.hi[needed.pairs :] == 0).all()
    assert int(padded.num_rows.sum()) == sizes.pairs


def test_large_batches_run_without_a_graph() -> None:
    capture = Replays()
    harness = with_graphs(ModelHarness(tiny_model("llama")), capture)
    block = harness.block(range(100, 100 + MAX_QUERY_TOKENS + 1))
    assert harness.run([Chunk(block, 0, len(block), [block])]).isfinite().all()
    assert capture.captures == 0


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def capture(step: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    harnesses = [
        ModelHarness(tiny_model("llama")),
        with_graphs(ModelHarness(tiny_model("llama")), capture),
    ]
    plain, replayed = (decoded(harness, written(harness), (1, 2), 200) for harness in harnesses)
    torch.testing.assert_close(replayed, plain)
    assert caplog.text.count("without CUDA graphs") == 1


def test_graphs_without_a_cuda_device_are_refused(tokenizer: Any) -> None:
    config = EngineConfig(device="cpu", num_pages=16, page_size=8, cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"^cuda_graphs: wanted a CUDA device"):
        Engine(config, loaded=Pretrained(tiny_model("llama"), tokenizer))
