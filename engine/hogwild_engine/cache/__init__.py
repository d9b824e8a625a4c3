"""The KV cache: pages, blocks, prefix cache, RoPE."""
