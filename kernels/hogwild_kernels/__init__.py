"""Attention over many key/value blocks: tensors in, tensors out. Knows nothing of models, tokens or
workers.
"""

from hogwild_kernels.api import (
    IMPLEMENTATIONS,
    PREFILLS,
    BlockRead,
    BlockTable,
    KernelArgumentError,
    KVScales,
    Run,
    block_attention,
    merge_states,
    move_kv,
    prefill_implementation,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "PREFILLS",
    "BlockRead",
    "BlockTable",
    "KVScales",
    "KernelArgumentError",
    "Run",
    "block_attention",
    "merge_states",
    "move_kv",
    "prefill_implementation",
    "write_kv",
]
