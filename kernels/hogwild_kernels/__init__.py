"""Attention over many blocks of a paged KV cache: tensors in, tensors out.

Knows nothing of models, tokens or workers. The package itself imports nothing, so that settings can
read `hogwild_kernels.names` without loading torch.
"""
