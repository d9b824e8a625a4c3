"""Attention over blocks by torch's operators on the CPU: each key is read once for all workers.

    for each chunk of 128 tokens of a block, and each 24 rows that see some of them:
        partial softmax: scores, weights, weighted values
    (chunks that 24 rows or fewer see, as in decoding, all at once)
    for each query token and head: merge its partial softmaxes, in the order of its view

A row is a (query token, query head of the group). What depends on the table alone is computed once
for all layers and kept on the table.

A row's result must not depend on what else the step holds. Matrix products of one size are summed
in one order, of two sizes in two: so all have the same size, with empty rows and hidden tokens
where less is needed. Chunks begin at fixed places in their block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hogwild_kernels.api import AttentionSpec, States
from hogwild_kernels.reference import ReferenceBackend, rotate
from hogwild_kernels.table import BlockRead, BlockTable

CHUNK = 128
"""Tokens of a block that one partial softmax takes: 0 to 127, 128 to 255 and so on."""

ROWS = 24
"""Rows of a matrix product. BLAS sums the last rows of others (16, 32) in another order: its inner
loops take 4, 6, 8, 12 or 24 rows at once.
"""


class TorchBackend(ReferenceBackend):
    """Attention by batched matrix products over chunks of the cache."""

    name = "cpu"

    def supports(self, spec: AttentionSpec) -> str | None:
        return None if spec.device.type == "cpu" else "tensors on the CPU"

    def _attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        table: BlockTable,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> States:
        num_rows, num_heads, dim = q.shape
        num_kv_heads = k_pages.shape[2]
        group = num_heads // num_kv_heads
        key = ("cpu", num_rows, group, *k_pages.shape[:2])
        plan = table.derived.get(key)
        if plan is None:
            plan = table.derived[key] = _plan(table, num_rows, group, *k_pages.shape[:2])
        query = q[plan.row_of_pair].float()
        if plan.rotates:
            query = rotate(query, table.cos, table.sin)
        # Round to the cache's dtype, as the other backends do.
        query = query.to(k_pages.dtype).float().view(-1, num_kv_heads, group, dim).transpose(0, 1)
        shape = (num_kv_heads, plan.num_partials, num_rows, group)
        m, sums, acc = torch.full(shape, -torch.inf), torch.zeros(shape), torch.zeros((*shape, dim))
        for chunks in plan.chunks:
            keys, values = _tokens(k_pages, chunks), _tokens(v_pages, chunks)
            values.index_fill_(1, chunks.unseen, 0.0)  # their memory may hold anything
            tiles = _tiles(query[:, chunks.pairs], chunks)
            states = _attend(tiles, keys, values, chunks, scale, softcap)
            at = slice(None), chunks.partials, chunks.rows
            for part, full in zip(states, (m, sums, acc), strict=True):
                full[at] = _untiled(part, chunks, group)
        return _merge(m, sums, acc, sinks, q.dtype)


class Chunks(NamedTuple):
    """C stretches of `CHUNK` tokens, and the query tokens that see some of them: n tiles of each.

    P is the places for query tokens in all tiles; R of them are taken.
    """

    slots: torch.Tensor  # [C * CHUNK]; 0 for tokens that no query token sees
    unseen: torch.Tensor  # [U]: the indices of these tokens
    pairs: torch.Tensor  # [P]; 0 in places that are not taken
    taken: torch.Tensor  # [R]
    rows: torch.Tensor  # [R]
    partials: torch.Tensor  # [R]: index among the partial softmaxes of each query token
    hidden: torch.Tensor  # bool [C, n, ROWS, CHUNK]


class Plan(NamedTuple):
    """A table as chunks. A query token has up to ``num_partials`` partial softmaxes."""

    chunks: list[Chunks]
    num_partials: int
    row_of_pair: torch.Tensor
    rotates: bool


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: Chunks,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the max, the sum and the weighted values of each row, ``[KH * C, n, ROWS]`` and
    ``[…, D]``. q ``[KH * C, n, ROWS, D]``; k, v ``[KH, C * CHUNK, D]``.
    """
    k, v = (x.reshape(len(q), CHUNK, -1) for x in (k, v))
    score = _product(q, k.transpose(1, 2)).mul_(scale)
    if softcap is not None:
        score = torch.tanh(score.div_(softcap)).mul_(softcap)
    score.view(-1, *chunks.hidden.shape).masked_fill_(chunks.hidden, -torch.inf)
    m = score.amax(dim=-1)
    pivot = m.masked_fill(m == -torch.inf, 0.0)
    weight = score.sub_(pivot[..., None]).exp_()
    return m, weight.sum(dim=-1), _product(weight, v)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x @ y``, x ``[B, n, ROWS, K]``, y ``[B, K, N]``, as products of one size."""
    count, tiles = x.shape[:2]
    out = x.new_empty((*x.shape[:-1], y.shape[-1]))
    if tiles < count:
        for tile in range(tiles):
            torch.bmm(x[:, tile], y, out=out[:, tile])
    else:
        for i in range(count):
            torch.bmm(x[i], y[i].expand(tiles, -1, -1), out=out[i])
    return out


def _merge(
    m: torch.Tensor,
    sums: torch.Tensor,
    acc: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> States:
    """Merge partial softmaxes ``[KH, P, T, G]`` in their order: ``torch.sum`` adds in another order
    where another row has more of them.
    """
    most = m.amax(dim=1)
    sink = most.new_full((m.shape[0], 1, m.shape[3]), -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(sink.shape)
    most = torch.maximum(most, sink)
    pivot = most.masked_fill(most == -torch.inf, 0.0)
    total = torch.exp(sink - pivot)
    out = torch.zeros_like(acc[:, 0])
    for partial in range(m.shape[1]):
        share = torch.exp(m[:, partial] - pivot)
        total += share * sums[:, partial]
        out += share[..., None] * acc[:, partial]
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    lse = torch.where(total == 0, -torch.inf, pivot + total.log())
    return out.permute(1, 0, 2, 3).flatten(1, 2).to(dtype), lse.permute(1, 0, 2).flatten(1)


def _tokens(pages: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Return the keys or values of chunks, float32 ``[KH, C * CHUNK, D]``."""
    by_head = pages.flatten(0, 1).transpose(0, 1)
    return by_head.index_select(1, chunks.slots).float().contiguous()


def _tiles(query: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Return queries ``[KH, P, G, D]`` in tiles, ``[KH * C, n, ROWS, D]``; spare rows are 0."""
    num_heads, _, group, dim = query.shape
    count, tiles, size, _ = chunks.hidden.shape
    rows = size // group * group
    query = query.reshape(num_heads * count, tiles, rows, dim)
    return query if rows == size else torch.nn.functional.pad(query, (0, 0, 0, size - rows))


def _untiled(x: torch.Tensor, chunks: Chunks, group: int) -> torch.Tensor:
    """Return ``[KH * C, n, ROWS, …]`` as ``[KH, R, G, …]``."""
    count, _, size, _ = chunks.hidden.shape
    x = x[:, :, : size // group * group]
    return x.reshape(len(x) // count, len(chunks.pairs), group, *x.shape[3:])[:, chunks.taken]


def _tile_shape(group: int) -> tuple[int, int]:
    """Return how many query tokens a tile holds, and its rows."""
    size = -(-group // ROWS) * ROWS
    return size // group, size


def _plan(table: BlockTable, num_rows: int, group: int, num_pages: int, page_size: int) -> Plan:
    """Cut every block read into chunks; leave out query tokens that see nothing of one."""
    reads = table.checked_reads(num_rows, num_pages, page_size)
    first_partial, num_partials = _partials(reads, table.window, num_rows)
    few: list[Chunks] = []
    many: list[Chunks] = []
    row_of_pair: list[int] = []
    for read in reads:
        first_pair = len(row_of_pair)
        row_of_pair += range(read.first_row, read.first_row + len(read.hi))
        seen = [(lo, hi) for lo, hi in zip(read.lo(table.window), read.hi, strict=True) if lo < hi]
        if not seen:
            continue
        lo, hi = torch.tensor(read.lo(table.window)), torch.tensor(read.hi)
        partial = torch.tensor(first_partial[first_pair : len(row_of_pair)])
        pages = torch.tensor(read.pages)
        first, last = min(low for low, _ in seen), max(high for _, high in seen)
        for start in range(first // CHUNK * CHUNK, last, CHUNK):
            token = torch.arange(start, start + CHUNK)
            sees = (token >= lo[:, None]) & (token < hi[:, None])
            index = sees.any(dim=1).nonzero()[:, 0]
            if not len(index):
                continue
            anyone = sees.any(dim=0)
            slots = pages[(token // page_size).clamp(max=len(pages) - 1)] * page_size
            slots = torch.where(anyone, slots + token % page_size, 0)
            partials = partial[index] + start // CHUNK - lo[index] // CHUNK
            hidden = _hidden(sees[index], group)
            places = torch.arange(len(index))
            pairs = places.new_zeros(len(hidden) * _tile_shape(group)[0])
            pairs[places] = index + first_pair
            unseen = (~anyone).nonzero()[:, 0]
            made = (slots, unseen, pairs, places, index + read.first_row, partials, hidden[None])
            (few if len(hidden) == 1 else many).append(Chunks(*made))
    return Plan(
        [_joined(few), *many] if few else many,
        max(1, *num_partials),
        torch.tensor(row_of_pair, dtype=torch.int64),
        rotates=any(any(read.deltas) for read in reads),
    )


def _joined(chunks: list[Chunks]) -> Chunks:
    """Return chunks of one tile each as one."""
    columns = [list(column) for column in zip(*chunks, strict=True)]
    slots, unseen, pairs, taken, rows, partials, hidden = columns
    for number, (tokens, places) in enumerate(zip(unseen, taken, strict=True)):
        unseen[number] = tokens + number * CHUNK
        taken[number] = places + number * len(pairs[0])
    return Chunks(*map(torch.cat, (slots, unseen, pairs, taken, rows, partials, hidden)))


def _partials(
    reads: tuple[BlockRead, ...], window: int | None, num_rows: int
) -> tuple[list[int], list[int]]:
    """Return the index of each pair's first partial softmax among those of its query token, in the
    order of the view, and how many each query token has.

    A block that stands further left in a view has a larger delta.
    """
    pairs_of_row: list[list[tuple[int, int, int]]] = [[] for _ in range(num_rows)]
    pair = 0
    for read in reads:
        for i, (lo, hi) in enumerate(zip(read.lo(window), read.hi, strict=True)):
            if lo < hi:
                count = (hi - 1) // CHUNK - lo // CHUNK + 1
                pairs_of_row[read.first_row + i].append((-read.deltas[i], pair, count))
            pair += 1
    first_partial, num_partials = [0] * pair, [0] * num_rows
    for row, pairs in enumerate(pairs_of_row):
        for _, number, count in sorted(pairs):
            first_partial[number] = num_partials[row]
            num_partials[row] += count
    return first_partial, num_partials


def _hidden(sees: torch.Tensor, group: int) -> torch.Tensor:
    """Return what no row sees, bool ``[tiles, ROWS, CHUNK]``, from what query tokens see."""
    rows, size = _tile_shape(group)
    tiles = -(-len(sees) // rows)
    padded = torch.zeros((tiles * rows, sees.shape[1]), dtype=torch.bool)
    padded[: len(sees)] = sees
    hidden = torch.ones((tiles, size, sees.shape[1]), dtype=torch.bool)
    hidden[:, : rows * group] = ~padded.repeat_interleave(group, dim=0).view(
        tiles, rows * group, -1
    )
    return hidden
