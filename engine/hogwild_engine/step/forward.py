"""The layers of a model over the shared cache: what a forward pass is, and transformers' own."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hogwild_engine.step.attention_hook import ATTENTION_NAME, StepTensors


class Forward(Protocol):
    """The layers of a model over the shared cache."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tensors: StepTensors,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """Write all rows' keys and values and give the logits of the kept ones.

        Args:
            tokens: token id of each row, int64 ``[T]`` on the first layer's device.
            positions: block-local position of each row, int64 ``[T]``.
            tensors: where rows are written and what they read.
            keep: rows whose logits are wanted, int64 ``[R]``.

        Returns:
            ``[R, V]``.
        """
        ...


class TransformersForward:
    """An unmodified transformers model, its attention implementation switched to ours."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tensors: StepTensors,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        return self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=keep,
            use_cache=False,
            hogwild=tensors,
        ).logits[0]
