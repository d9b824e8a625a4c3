"""Attention over many key/value blocks: tensors in, tensors out. Knows nothing of models, tokens or
workers.
"""

from hogwild_kernels.api import (
    IMPLEMENTATIONS,
    BlockTable,
    KernelArgumentError,
    KVScales,
    block_attention,
    merge_states,
    move_kv,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "BlockTable",
    "KVScales",
    "KernelArgumentError",
    "block_attention",
    "merge_states",
    "move_kv",
    "write_kv",
]
