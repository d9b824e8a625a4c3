"""What a model must show at load before it may decode over a shared cache. No family is trusted by
its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hogwild_engine.api.errors import ModelRefusedError
from hogwild_engine.cache import rope
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import LayerShape
from hogwild_engine.step import attention_hook
from hogwild_engine.step.batch import Batch, Chunk
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_kernels.table import BlockRead

BLOCK_LENGTHS = (5, 7, 12)
PROBE_POSITIONS = (0, 1, 2, 3, 5, 9, 17, 40)

LOGIT_BOUND = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest relative error (norm of the difference over norm) of block-wise against plain logits."""

ROTATION_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative error of a key against the rotation that is assumed for it."""

POSITION_BOUND = {torch.float32: 2e-2, torch.bfloat16: 2e-1, torch.float16: 5e-2}
"""Largest relative error of logits far into the context; angles lose precision there."""

FUSED_BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-2}
"""Largest relative error of the lean forward's logits against those of the hooked one; in bfloat16
each is about half of that away from float32.
"""

CONTROL_FACTOR = 10
"""A wrong rotation must miss the plain logits by this many times what the right one does."""


def layer_shapes(model: Any, device: torch.device) -> tuple[list[LayerShape], list[int | None]]:
    """What each layer stores, and its sliding window, measured by a probe.

    Raises:
        ModelRefusedError: attention does not go through transformers' interface, or rotates in an
            unknown way.
    """
    probe = attention_hook.RopeProbe()
    token = _token(model)
    positions = torch.tensor([PROBE_POSITIONS], device=device)
    model.set_attn_implementation(attention_hook.ATTENTION_NAME)
    ids = torch.full_like(positions, token)
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, use_cache=False, hogwild=probe)
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(probe.keys) != num_layers:
        detail = (
            f"{len(probe.keys)} of {num_layers} layers called the attention interface; "
            "wanted all: use a model whose every layer is attention"
        )
        raise ModelRefusedError("attention interface", detail)
    bound = ROTATION_BOUND[probe.keys[0].dtype]
    rotations = rope.measure(probe.keys, PROBE_POSITIONS, model, bound)
    shapes = [
        LayerShape(key.shape[1], key.shape[2], key.device, key.dtype, rotation, group, softcap)
        for key, rotation, group, softcap in zip(
            probe.keys, rotations, probe.group_sizes, probe.softcaps, strict=True
        )
    ]
    return shapes, probe.windows


def check_positions(model: Any, ids: Sequence[int], context_len: int) -> None:
    """A text far into the context must give what it gives at the start: attention depends on
    distances alone, or block-local positions would be wrong.

    Raises:
        ModelRefusedError: positions matter in another way, by a scale that grows with them, say.
    """
    ids = list(ids)[: sum(BLOCK_LENGTHS)]
    shift = context_len - len(ids)
    if shift <= 0:
        return
    model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    positions = torch.arange(len(ids), device=device)[None]
    with torch.inference_mode():
        near, far = (
            model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=positions + start,
                use_cache=False,
            )
            .logits[0]
            .float()
            for start in (0, shift)
        )
    model.set_attn_implementation(attention_hook.ATTENTION_NAME)
    error, bound = _relative(far, near), POSITION_BOUND[model.dtype]
    if not error < bound:
        detail = (
            f"logits at position {shift} differ from those at 0 by {error:.2g} (relative), wanted "
            f"under {bound:.2g}; use a model whose attention depends on distances alone"
        )
        raise ModelRefusedError("positions", detail)


def num_pages(page_size: int) -> int:
    """Pages that `check_logits` fills."""
    return sum(-(-length // page_size) for length in BLOCK_LENGTHS)


class Blockwise(NamedTuple):
    """Logits of a text that was fed in blocks, float32 ``[T, V]``, and their relative error against
    the plain forward's.
    """

    logits: torch.Tensor
    error: float


def check_logits(
    model: Any, runner: ModelRunner, ids: Sequence[int], *, long: bool = False
) -> Blockwise:
    """Feed a text in three blocks of two pieces each and compare with one plain forward.

    Args:
        model: the model that the runner runs.
        runner: runs it over the cache.
        ids: at least 24 token ids.
        long: let the kernels for long feeds attend.

    Raises:
        ModelRefusedError: the logits differ, or a wrong rotation goes unnoticed.
    """
    ids = list(ids)[: sum(BLOCK_LENGTHS)]
    plain = plain_logits(model, ids)
    bound = LOGIT_BOUND[runner.cache.shapes[0].dtype]
    logits = _blockwise(runner, ids, turned=True, long=long)
    error = _relative(logits, plain)
    if not error < bound:
        detail = (
            f"logits over three blocks differ from the plain forward by {error:.2g} (relative), "
            f"wanted under {bound:.2g}; use another model or dtype='float32'"
        )
        raise ModelRefusedError("logits", detail)
    if any(shape.rotation.inv_freq for shape in runner.cache.shapes):
        wrong = _relative(_blockwise(runner, ids, turned=False, long=long), plain)
        if not wrong > CONTROL_FACTOR * error:
            detail = (
                f"without the extra rotation logits differ by {wrong:.2g}, with it by {error:.2g}: "
                f"the check cannot tell them apart tenfold; load it with dtype='float32'"
            )
            raise ModelRefusedError("control", detail)
    return Blockwise(logits, error)


def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of one plain forward with transformers' own attention, float32 ``[T, V]``."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
            return model(input_ids=tokens, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(attention_hook.ATTENTION_NAME)


def fused_error(lean: ModelRunner, hooked: torch.Tensor, ids: Sequence[int]) -> float:
    """Relative error of the lean forward's logits against the hooked one's over the same blocks."""
    ids = list(ids)[: sum(BLOCK_LENGTHS)]
    return _relative(_blockwise(lean, ids, turned=True), hooked)


def _blockwise(
    runner: ModelRunner, ids: list[int], *, turned: bool, long: bool = False
) -> torch.Tensor:
    blocks: list[Block] = []
    logits = []
    try:
        for length in BLOCK_LENGTHS:
            blocks.append(Block(runner.cache))
            done = sum(BLOCK_LENGTHS[: len(blocks) - 1])
            middle = done + length // 2
            for start, stop in ((done, middle), (middle, done + length)):
                plan = Batch()
                blocks[-1].append(ids[start:stop])
                plan.add_session([Chunk(blocks[-1], start - done, stop - start, blocks)])
                plan.sampled = list(range(stop - start))
                plan.long = [range(stop - start)] if long else []
                if not turned:
                    plan.entries = [_unturned(entry) for entry in plan.entries]
                logits.append(runner.run(plan).float())
    finally:
        for block in blocks:
            block.release()
    return torch.cat(logits)


def _unturned(entry: BlockRead) -> BlockRead:
    return entry._replace(deltas=[0] * len(entry.deltas))


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def _token(model: Any) -> int:
    return min(100, model.config.get_text_config().vocab_size - 1)
