"""What every attention backend does: its operations, their shapes, and the checks of arguments.

T query tokens, H query heads, KH key/value heads, D head dim. Pages may have any strides as long as
D is contiguous and the slots of consecutive pages are evenly spaced: page-major ``[P, S, KH, D]``
and head-major storage seen through a transpose both are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hogwild_kernels.table import BlockTable

States = tuple[torch.Tensor, torch.Tensor]
"""Outputs ``[T, H, D]`` and the natural log-sum-exp of their scores, float32 ``[T, H]``."""


class KernelArgumentError(ValueError):
    """An argument has the wrong shape, type or device, or a requested backend cannot run."""


class AttentionSpec(NamedTuple):
    """What a layer asks of an attention backend.

    Args:
        device: where queries and cache are.
        dtype: of queries and cache.
        head_dim: D.
        group_size: query heads per key/value head, H / KH.
        softcap: as in `AttentionBackend.attend`.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    group_size: int = 1
    softcap: float | None = None


class AttentionBackend:
    """Attention over a paged cache, and writes to it. Chosen once at load, by `supports`."""

    name: str
    # The same operations behind the checks; a subclass defines them.
    _attend: Callable[..., States]
    _write: Callable[..., None]
    _move: Callable[..., None]

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return ``None`` if the backend can run such layers, else what it wants instead."""
        raise NotImplementedError

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        table: BlockTable,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> States:
        """Compute softmax attention of each query token over the keys it sees in all blocks.

        Args:
            q: queries, rotated at block-local positions. ``[T, H, D]``.
            k_pages: keys, rotated at block-local positions. ``[num_pages, page_size, KH, D]``.
            v_pages: values. ``[num_pages, page_size, KH, D]``.
            table: which query token reads which block, and the extra rotation of its query there.
            scale: factor on the scores before softcap and softmax.
            softcap: scores become ``softcap * tanh(score / softcap)``.
            sinks: a logit per head that joins the softmax's denominator and has no value. ``[H]``.

        Returns:
            The output in q's dtype, 0 for query tokens that see nothing, and the natural
            log-sum-exp of the visible scores, sinks included; -inf if there are none.

        Raises:
            KernelArgumentError: an argument does not fit.
            IndexError: the table points outside of the tensors.
        """
        _check_attention(q, k_pages, v_pages, table, softcap, sinks)
        return self._attend(q, k_pages, v_pages, table, scale=scale, softcap=softcap, sinks=sinks)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write new keys and values to their slots, in place.

        Args:
            k: keys, rotated at block-local positions. ``[T, KH, D]``.
            v: values. ``[T, KH, D]``.
            k_pages: ``[num_pages, page_size, KH, D]``.
            v_pages: ``[num_pages, page_size, KH, D]``.
            slots: ``page * page_size + offset`` of each token; a token with a negative slot is not
                written. int64 ``[T]``.

        Raises:
            KernelArgumentError: an argument does not fit.
        """
        _check_pages(k_pages, v_pages, "[num_pages, page_size, KH, D]")
        check(slots.dtype == torch.int64, "slots", "dtype int64", slots.dtype)
        _check_shapes((slots.shape[0], *k_pages.shape[2:]), k=k, v=v)
        self._write(k, v, k_pages, v_pages, slots)

    def move(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """Copy tokens from slot to slot in all layers at once; rotate keys, copy values unchanged.

        Args:
            k_pages: ``[L, num_pages, page_size, KH, D]``, layers that share one rotation.
            v_pages: ``[L, num_pages, page_size, KH, D]``.
            source: slots to read. int64 ``[N]``.
            target: slots to write; none of them is among ``source``. int64 ``[N]``.
            cos: cosines of the keys' rotation, float32 ``[N, D/2]``.
            sin: sines of the keys' rotation, float32 ``[N, D/2]``.

        Raises:
            KernelArgumentError: an argument does not fit.
        """
        _check_pages(k_pages, v_pages, "[L, num_pages, page_size, KH, D]")
        for name, slots in (("source", source), ("target", target)):
            check(slots.dtype == torch.int64, name, "dtype int64", slots.dtype)
        _check_shapes(tuple(source.shape), target=target)
        _check_shapes((source.shape[0], k_pages.shape[4] // 2), cos=cos, sin=sin)
        self._move(k_pages, v_pages, source, target, cos, sin)


def check(holds: bool, name: str, wanted: str, got: object) -> None:
    """Raise `KernelArgumentError` naming the argument unless ``holds``."""
    if not holds:
        raise KernelArgumentError(f"{name}: wanted {wanted}, got {got!r}")


def _check_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: BlockTable,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    _check_pages(k_pages, v_pages, "[num_pages, page_size, KH, D]")
    check(q.dim() == 3, "q", "three dims [T, H, D]", tuple(q.shape))
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    check(dim == k_pages.shape[3], "q", f"head dim {k_pages.shape[3]} as k_pages has", dim)
    check(num_heads % num_kv_heads == 0, "q", f"a multiple of {num_kv_heads} heads", num_heads)
    check(dim % 2 == 0, "q", "an even head dim", dim)
    _check_table(table, dim)
    if sinks is not None:
        _check_shapes((num_heads,), sinks=sinks)
    if softcap is not None:
        check(softcap > 0, "softcap", "a positive number", softcap)


def _check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, dims: str) -> None:
    check(k_pages.dim() == dims.count(",") + 1, "k_pages", dims, tuple(k_pages.shape))
    _check_shapes(tuple(k_pages.shape), v_pages=v_pages)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check(pages.stride(-1) == 1, name, "a contiguous last dim", pages.stride())


def _check_table(table: BlockTable, dim: int) -> None:
    check(table.pages.dim() == 2, "table.pages", "two dims [B, P]", tuple(table.pages.shape))
    check(table.lo.dim() == 1, "table.lo", "one dim [N]", tuple(table.lo.shape))
    of_read, of_pair = (table.pages.shape[0],), (table.num_pairs,)
    shapes = {
        "first_row": of_read,
        "num_rows": of_read,
        "first_pair": of_read,
        "hi": of_pair,
        "cos": (*of_pair, dim // 2),
        "sin": (*of_pair, dim // 2),
    }
    for name, shape in shapes.items():
        _check_shapes(shape, **{f"table.{name}": getattr(table, name)})
    for name in ("pages", "lo", *shapes):
        dtype, wanted = getattr(table, name).dtype, torch.int32
        if name in ("cos", "sin"):
            wanted = torch.float32
        check(dtype == wanted, f"table.{name}", f"dtype {wanted}", dtype)


def _check_shapes(wanted: tuple[int, ...], **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        check(tensor.shape == wanted, name, f"shape {wanted}", tuple(tensor.shape))
