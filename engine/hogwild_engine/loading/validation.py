"""Validate a model at load: its logits over several blocks must equal those of a plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hogwild_engine.api.errors import ModelRefusedError
from hogwild_engine.cache.block import Block
from hogwild_engine.step.attention_hook import ATTENTION_NAME
from hogwild_engine.step.batch import Chunk, build_batch
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_kernels.table import BlockRead

VALIDATION_TEXT = (
    "Two people can paint a fence faster than one if each of them sees which boards the other "
    "has painted already, and so can three or four."
)
BLOCK_LENGTHS = (5, 7, 12)
NUM_TOKENS = sum(BLOCK_LENGTHS)

LOGIT_BOUND = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest relative error (norm of the difference over norm) of block-wise against plain logits."""

POSITION_BOUND = {torch.float32: 2e-2, torch.bfloat16: 2e-1, torch.float16: 5e-2}
"""Largest relative error of logits at the end of the context, where angles lose precision."""

FUSED_BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-2}
"""Largest relative error of the fused Llama forward against transformers' forward; in bfloat16 each
of them differs from float32 by about half of that.
"""

CONTROL_FACTOR = 10
"""Without the rotation by deltas, the error must be at least this many times larger."""


def validation_ids(chat: ChatTemplate, vocab_size: int) -> list[int]:
    """Return `NUM_TOKENS` token ids, repeated or wrapped where the tokenizer is an odd one."""
    ids = chat.encode(VALIDATION_TEXT) * NUM_TOKENS
    return [index % vocab_size for index in ids[:NUM_TOKENS]]


def check_positions(model: Any, ids: Sequence[int], context_len: int) -> None:
    """Check that logits depend on distances alone: the same text at the start and at the end of the
    context must have the same logits. Block-local positions rely on it.

    Raises:
        ModelRefusedError: absolute positions matter, for example in a scale that grows with them.
    """
    shift = context_len - len(ids)
    if shift <= 0:
        return
    at_start, at_end = (plain_logits(model, ids, first) for first in (0, shift))
    error, bound = _relative_error(at_end, at_start), POSITION_BOUND[model.dtype]
    if not error < bound:
        detail = (
            f"logits at position {shift} differ from those at 0 by {error:.2g} (relative), wanted "
            f"under {bound:.2g}; use a model whose attention depends on distances alone"
        )
        raise ModelRefusedError("positions", detail)


def num_pages(page_size: int) -> int:
    """Return the pages that `check_logits` fills."""
    return sum(-(-length // page_size) for length in BLOCK_LENGTHS)


def check_logits(
    model: Any, runner: ModelRunner, ids: Sequence[int], *, long: bool = False
) -> tuple[torch.Tensor, float]:
    """Encode a text in three blocks, each in two chunks, and compare with one plain forward.

    Args:
        model: the model that the runner runs.
        runner: runs it over the cache.
        ids: `NUM_TOKENS` token ids.
        long: attend with the kernels for long prompts.

    Returns:
        The logits, float32 ``[T, V]``, and their relative error.

    Raises:
        ModelRefusedError: the logits differ, or are as good without the rotation by deltas, so that
            the comparison proves nothing.
    """
    plain = plain_logits(model, ids)
    bound = LOGIT_BOUND[runner.cache.shapes[0].dtype]
    logits = _blockwise(runner, ids, long=long)
    error = _relative_error(logits, plain)
    if not error < bound:
        detail = (
            f"logits over three blocks differ from the plain forward by {error:.2g} (relative), "
            f"wanted under {bound:.2g}; use another model or dtype='float32'"
        )
        raise ModelRefusedError("logits", detail)
    if any(shape.rotation.inv_freq for shape in runner.cache.shapes):
        wrong = _relative_error(_blockwise(runner, ids, rotates=False, long=long), plain)
        if not wrong > CONTROL_FACTOR * error:
            detail = (
                f"without the extra rotation logits differ by {wrong:.2g}, with it by {error:.2g}: "
                f"the check cannot tell them apart tenfold; load it with dtype='float32'"
            )
            raise ModelRefusedError("control", detail)
    return logits, error


def plain_logits(model: Any, ids: Sequence[int], first_position: int = 0) -> torch.Tensor:
    """Return the logits of a forward with transformers' own attention, float32 ``[T, V]``."""
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    positions = torch.arange(first_position, first_position + len(ids), device=tokens.device)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(input_ids=tokens, position_ids=positions[None], use_cache=False)
            return out.logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def fused_error(fused: ModelRunner, expected: torch.Tensor, ids: Sequence[int]) -> float:
    """Return the relative error of the fused Llama forward over the same blocks.

    Args:
        fused: runs the fused forward.
        expected: logits of transformers' forward, from `check_logits`.
        ids: as in `check_logits`.
    """
    return _relative_error(_blockwise(fused, ids), expected)


def _blockwise(
    runner: ModelRunner, ids: Sequence[int], *, rotates: bool = True, long: bool = False
) -> torch.Tensor:
    blocks: list[Block] = []
    logits = []
    try:
        for length in BLOCK_LENGTHS:
            blocks.append(Block(runner.cache))
            done = sum(BLOCK_LENGTHS[: len(blocks) - 1])
            middle = done + length // 2
            for start, stop in ((done, middle), (middle, done + length)):
                blocks[-1].append(ids[start:stop])
                blocks[-1].publish()
                batch = build_batch([[Chunk(blocks[-1], start - done, stop - start, blocks)]])
                batch.logit_indices = list(range(stop - start))
                batch.long_chunks = [range(stop - start)] if long else []
                if not rotates:
                    batch.reads = [_without_rotation(read) for read in batch.reads]
                logits.append(runner.run(batch).float())
    finally:
        for block in blocks:
            block.release()
    return torch.cat(logits)


def _without_rotation(read: BlockRead) -> BlockRead:
    return read._replace(deltas=[0] * len(read.deltas))


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
