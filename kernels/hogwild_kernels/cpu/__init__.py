"""Attention, matrices and sampling on the CPU: torch operators, and C compiled on first use."""
