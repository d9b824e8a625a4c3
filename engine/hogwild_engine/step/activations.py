"""Activation functions whose results do not depend on the size of the step.

torch computes most elements of a tensor with vector instructions and the last ones, of each
thread's share, with the C library, whose exponential function rounds in another way. Here no
element is the last one: a call takes whole vectors, and too few elements to share among threads.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2CLS

PIECE = 1 << 14
"""Elements of a call: torch shares 32,768 among threads."""

VECTORS = 64
"""Elements that torch's kernels take at once, or a multiple of it: two AVX-512 vectors of 32."""

_ELEMENTWISE = {made[0] if isinstance(made, tuple) else made for made in ACT2CLS.values()}
_ELEMENTWISE -= {nn.PReLU}  # has weights, and no exponential function


class PiecewiseActivation(nn.Module):
    """An elementwise function, applied to pieces of fixed size.

    Args:
        function: a module that maps each element by itself.
    """

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        size = flat.shape[0]
        if size < PIECE and size % VECTORS == 0:
            return self.function(flat).view(x.shape)
        flat = nn.functional.pad(flat, (0, -size % VECTORS))
        return torch.cat([self.function(piece) for piece in flat.split(PIECE)])[:size].view(x.shape)


def replace_activations(model: nn.Module) -> None:
    """Replace the activation functions of transformers' modules, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _ELEMENTWISE and not isinstance(parent, PiecewiseActivation):
                setattr(parent, name, PiecewiseActivation(child))
