"""Attention over many key/value blocks: tensors in, tensors out. Knows nothing of models, tokens or
workers.
"""

from hogwild_kernels.api import (
    BlockTable,
    KernelArgumentError,
    block_attention,
    merge_states,
    move_kv,
    write_kv,
)

__all__ = [
    "BlockTable",
    "KernelArgumentError",
    "block_attention",
    "merge_states",
    "move_kv",
    "write_kv",
]
