"""The layers of a model over the shared cache: what a forward pass is, and transformers' own."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hogwild_engine.hook import ATTENTION_NAME, PassTensors


class Forward(Protocol):
    """The layers of a model over the shared cache."""

    def __call__(
        self, tokens: list[int], positions: list[int], tensors: PassTensors, keep: list[int]
    ) -> torch.Tensor:
        """Write all rows' keys and values and give the logits of the kept ones.

        Args:
            tokens: token id of each row.
            positions: block-local position of each row.
            tensors: where rows are written and what they read.
            keep: rows whose logits are wanted.

        Returns:
            ``[len(keep), V]``.
        """
        ...


class HookedForward:
    """An unmodified transformers model, its attention implementation switched to ours."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def __call__(
        self, tokens: list[int], positions: list[int], tensors: PassTensors, keep: list[int]
    ) -> torch.Tensor:
        device = tensors.cache.shapes[0].device
        return self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            logits_to_keep=torch.tensor(keep, device=device),
            use_cache=False,
            hogwild=tensors,
        ).logits[0]
