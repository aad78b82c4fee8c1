"""row_attention: block-sparse attention in ATen ops, a block of queries at a time, and its backward. Made for the CPU.

q (B, H, S, D), k (B, G, S, D), v (B, G, S, E); the H / G query heads of a key head stand in one product. For each row
its keys are copied into scratch; then softmax(scale q k^T + mask) v. A row is a block, or small blocks together. The
backward computes the probabilities again, so nothing is kept but q, k and v. Sums go in the order of rows: the bits
repeat. 16-bit operands are computed in fp32.

What the time depends on: scratch of one row in the cache (`_CACHE`), results written into it, for fresh memory costs
page faults, and the fused softmax. Memory: `scratch_bytes`, linear in S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.sparse.block_rows import BlockRow, HeadSpan, Rules, most_keys, rows, spans, together

aten = torch.ops.aten

_CACHE = 4 << 20  # bytes of scratch that heads are taken together for


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call. width: the most key blocks of a block. queries, keys: the most of a row."""

    batch: int
    heads: int
    groups: int
    tokens: int
    key_dim: int
    value_dim: int
    width: int
    queries: int
    keys: int
    itemsize: int  # of the dtype that is computed in
    narrow: bool  # operands have 16 bits

    @staticmethod
    def of(q: Tensor, v: Tensor, columns: Tensor | None, rules: Rules, documents: bool) -> Sizes:
        """Of a call's operands."""
        count = q.shape[2] // rules.block
        width = rules.width(count) if columns is None else min(rules.width(count), columns.shape[-1])
        narrow = q.dtype.itemsize == 2
        (batch, heads, tokens, dim), (groups, *_, value_dim) = q.shape, v.shape[1:]
        queries = min(count, together(rules.block, documents)) * rules.block
        keys = most_keys(rules.block, width, count, documents)
        itemsize = 4 if narrow else q.itemsize
        return Sizes(batch, heads, groups, tokens, dim, value_dim, width, queries, keys, itemsize, narrow)

    def row(self, queries: int, keys: int, copies: int) -> int:
        """Numbers of scratch for a row of one key head: scores, keys and values, then queries and results."""
        stacked = self.heads // self.groups * queries
        return copies * stacked * keys + (keys + 2 * stacked) * (self.key_dim + self.value_dim)

    def scratch(self, copies: int) -> int:
        """Numbers of scratch of a call."""
        widest = self.row(self.queries, self.keys, copies)
        return min(self.batch * self.groups * widest, max(_CACHE // self.itemsize, widest))


@dataclass(frozen=True, slots=True)
class Scores:
    """What is made of the products of queries and keys, as the op says it."""

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None


def copies(backward: bool, softcap: float) -> int:
    """Of the scores of a row: scores and probabilities; in the backward their gradient, and the slope of a softcap."""
    return 3 + bool(softcap) if backward else 2


def scratch_bytes(sizes: Sizes, block: int, copies: int, backward: bool, documents: bool) -> int:
    """The most bytes that a call holds beside operands and results, small values aside."""
    count = sizes.scratch(copies)
    if backward and sizes.narrow:
        count += sizes.batch * sizes.groups * sizes.tokens * (sizes.key_dim + sizes.value_dim)
    masks = 6 + (2 * sizes.width if documents else 0)  # of the bounds; of a row's documents, and of the row before
    return count * sizes.itemsize + (masks * sizes.itemsize + 12) * block * block


def forward(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, rules: Rules, scores: Scores,
    out: Tensor,
) -> None:  # fmt: skip
    """Fills `out` (B, H, S, E)."""
    sizes = Sizes.of(q, v, columns, rules, documents is not None)
    work = _Work(sizes, scores, copies(False, scores.softcap), (q, out), (k, v))
    for span in spans(q.shape[0], q.shape[1], k.shape[1], columns, documents):
        for row in rows(span, q.shape[2] // rules.block, rules, work.flat):
            for tile in work.tiles(span, row):
                into = _of(tile.queries[1], row)
                if not row.runs:
                    into.zero_()
                    continue
                look = work.look(tile, row)
                torch.bmm(look.p, look.v, out=look.into_v)
                into.copy_(look.by_head_into_v)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, rules: Rules,
    scores: Scores, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fills the gradients of q, k and v, all contiguous."""
    sizes = Sizes.of(q, v, columns, rules, documents is not None)
    to_k, to_v = (x.new_zeros(x.shape, dtype=torch.float32) if sizes.narrow else x.zero_() for x in (dk, dv))
    work = _Work(sizes, scores, copies(True, scores.softcap), (q, dq, grad), (k, v, to_k, to_v))
    for span in spans(q.shape[0], q.shape[1], k.shape[1], columns, documents):
        for row in rows(span, q.shape[2] // rules.block, rules, work.flat):
            for tile in work.tiles(span, row):
                _, into_q, source = tile.queries
                if not row.runs:
                    _of(into_q, row).zero_()
                    continue
                look = work.look(tile, row)
                look.by_head_into_v.copy_(_of(source, row))
                dp = torch.bmm(look.into_v, look.v.transpose(1, 2), out=look.s)
                aten._softmax_backward_data.out(dp, look.p, -1, work.dtype, grad_input=look.ds)
                if look.slope is not None:
                    look.ds.mul_(look.slope)
                torch.bmm(look.ds, look.k, out=look.into_q).mul_(scores.scale)
                _of(into_q, row).copy_(look.by_head_into_q)
                _add(tile.summed[1], row, look.p, look.into_v)
                _add(tile.summed[0], row, look.ds, look.q)
    if sizes.narrow:
        dk.copy_(to_k)
        dv.copy_(to_v)


def _of(x: Tensor, row: BlockRow) -> Tensor:
    """The queries of a row."""
    return x.narrow(3, row.start, row.queries)


def _add(into: Tensor, row: BlockRow, left: Tensor, right: Tensor) -> None:
    """into[the row's keys] += left^T right, run by run."""
    place, turned = 0, left.transpose(1, 2)
    for start, stop in row.runs:
        into.narrow(1, start, stop - start).baddbmm_(turned.narrow(1, place, stop - start), right)
        place += stop - start


@dataclass(frozen=True, slots=True)
class _Tile:
    """Heads that are taken together, and the parts of the operands that are theirs.

    queries: (batches, groups, repeats, S, ...). keys: k and v (batches, groups, S, ...). summed: their gradients
    (batches * groups, S, ...). sinks: (groups, repeats, 1).
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, Tensor]
    summed: tuple[Tensor, ...]
    sinks: Tensor | None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Batches, groups and repeats."""
        return tuple(self.queries[0].shape[:3])  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Look:
    """Scratch of a row and tile, N key heads, and the same memory with all dims apart (by_...).

    q: scaled. p: probabilities (N, queries, keys). s: the scores. ds: those of the backward. into_q, into_v: results.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    p: Tensor
    ds: Tensor
    into_q: Tensor
    into_v: Tensor
    by_head_q: Tensor  # (batches, groups, repeats, queries, D), as the next two
    by_head_into_q: Tensor
    by_head_into_v: Tensor
    by_head_k: Tensor  # (batches, groups, keys, D)
    by_head_v: Tensor
    by_head_s: Tensor  # (N, repeats, queries, keys), as the next
    by_head_p: Tensor
    slope: Tensor | None  # of a softcap: of what it makes of a score, by the score


class _Work:
    """A call's operands and its scratch. looks: by heads, queries and keys, of one memory. tilings: of the span that is
    at work, by how many key heads are taken together."""

    def __init__(
        self, sizes: Sizes, scores: Scores, copies: int, by_query: Sequence[Tensor], by_key: Sequence[Tensor]
    ) -> None:
        self.sizes, self.scores, self.copies = sizes, scores, copies
        self.dtype = torch.float32 if sizes.narrow else by_query[0].dtype
        apart = (sizes.groups, sizes.heads // sizes.groups)
        self.by_query, self.by_key = [x.unflatten(1, apart) for x in by_query], by_key
        self.sinks = None if scores.sinks is None else scores.sinks.to(self.dtype).view(*apart, 1)
        self.flat = by_query[0].new_empty(sizes.scratch(copies), dtype=self.dtype)
        self.looks: dict[tuple[tuple[int, int, int], int, int], _Look] = {}
        self.span: HeadSpan | None = None
        self.tilings: dict[int, list[_Tile]] = {}

    def tiles(self, span: HeadSpan, row: BlockRow) -> list[_Tile]:
        """The heads of a span, as many at a time as the cache holds a row of."""
        if span is not self.span:
            self.span, self.tilings = span, {}
        most = max(1, len(self.flat) // self.sizes.row(row.queries, row.keys, self.copies))
        most = min(most, len(span.groups) * len(span.batches))
        if most not in self.tilings:
            self.tilings[most] = list(self._tiles(span, most))
        return self.tilings[most]

    def _tiles(self, span: HeadSpan, most: int) -> Iterator[_Tile]:
        groups = min(most, len(span.groups))
        batches = max(1, most // len(span.groups))
        for i in range(span.batches.start, span.batches.stop, batches):
            for g in range(span.groups.start, span.groups.stop, groups):
                own = slice(i, min(i + batches, span.batches.stop)), slice(g, min(g + groups, span.groups.stop))
                yield _Tile(
                    tuple(x[*own, span.repeats] for x in self.by_query),
                    (self.by_key[0][own], self.by_key[1][own]),
                    tuple(x[own].flatten(0, 1) for x in self.by_key[2:]),
                    None if self.sinks is None else self.sinks[own[1], span.repeats],
                )

    def look(self, tile: _Tile, row: BlockRow) -> _Look:
        """The copies of a row's operands, and its probabilities."""
        key = (tile.heads, row.queries, row.keys)
        if key not in self.looks:
            self.looks[key] = self._carved(*key)
        look = self.looks[key]
        for source, into in zip(tile.keys, (look.by_head_k, look.by_head_v), strict=True):
            place = 0
            for start, stop in row.runs:
                into.narrow(2, place, stop - start).copy_(source.narrow(2, start, stop - start))
                place += stop - start
        self._scaled(_of(tile.queries[0], row), look.by_head_q)
        torch.bmm(look.q, look.k.transpose(1, 2), out=look.s)
        if softcap := self.scores.softcap:
            look.s.div_(softcap).tanh_()
            if look.slope is not None:
                torch.mul(look.s, look.s, out=look.slope).neg_().add_(1)
            look.s.mul_(softcap)
        self._mask(look, row)
        aten._softmax.out(look.s, -1, False, out=look.p)
        if tile.sinks is not None:
            self._lose(look, tile.heads, tile.sinks)
        if row.blind is not None:
            look.by_head_p.masked_fill_(row.blind, 0)
        return look

    def _scaled(self, source: Tensor, into: Tensor) -> None:
        """into = scale source, rounded once."""
        if self.sizes.narrow:
            into.copy_(source).mul_(self.scores.scale)
        else:
            torch.mul(source, self.scores.scale, out=into)

    def _mask(self, look: _Look, row: BlockRow) -> None:
        """Adds -inf to the scores of what a row's queries do not look at."""
        if row.hidden is not None:
            own, other = row.hidden.shape
            block = row.queries // own
            look.by_head_s.view(-1, own, block, other, block).add_(row.hidden[:, None, :, None])
        for query, key, mask in row.edges:
            look.by_head_s.narrow(2, query, len(mask)).narrow(3, key, len(mask)).add_(mask)

    def _lose(self, look: _Look, heads: tuple[int, int, int], sinks: Tensor) -> None:
        """Takes from the probabilities what the sinks of the heads have. The largest says the sum that it is of."""
        lse = look.by_head_s.amax(-1) - look.by_head_p.amax(-1).log_()  # (N, repeats, queries)
        kept = (lse.unflatten(0, heads[:2]) - sinks).sigmoid_()
        look.by_head_p.mul_(kept.view(*look.by_head_p.shape[:3], 1))

    def _carved(self, heads: tuple[int, int, int], queries: int, keys: int) -> _Look:
        batches, groups, repeat = heads
        shape = (*heads, queries)
        n, m, d, e = batches * groups, repeat * queries, self.sizes.key_dim, self.sizes.value_dim
        sizes = [(n, m, d), (n, keys, d), (n, keys, e), *[(n, m, keys)] * self.copies, (n, m, d), (n, m, e)]
        parts, at = [], 0
        for size in sizes:
            parts.append(self.flat[at : at + math.prod(size)].view(size))
            at += math.prod(size)
        q, k, v, s, p, *rest, into_q, into_v = parts
        slope = rest[1] if len(rest) > 1 else None
        return _Look(
            q, k, v, s, p, rest[0] if rest else s, into_q, into_v,
            q.view(*shape, d), into_q.view(*shape, d), into_v.view(*shape, e),
            k.view(batches, groups, keys, d), v.view(batches, groups, keys, e),
            s.view(n, repeat, queries, keys), p.view(n, repeat, queries, keys), slope,
        )  # fmt: skip
