"""Attention on CUDA: Triton kernels, and flash-attn or torch for long prompts."""
