"""The forward of a model over the shared cache: its interface, and transformers' own."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hogwild_engine.step.attention_hook import ATTENTION_NAME, StepTensors


class Forward(Protocol):
    """Run a model over the shared cache."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tensors: StepTensors,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Write the keys and values of all query tokens and return the logits of some of them.

        Args:
            tokens: token ids, int64 ``[T]`` on the first layer's device.
            positions: block-local positions, int64 ``[T]``.
            tensors: the slots that keys and values go to, and the blocks that each token reads.
            logit_indices: tokens whose logits are wanted, int64 ``[R]``.

        Returns:
            ``[R, V]``.
        """
        ...


class TransformersForward:
    """An unmodified transformers model with our attention implementation."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tensors: StepTensors,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        return self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=logit_indices,
            use_cache=False,
            hogwild=tensors,
        ).logits[0]
