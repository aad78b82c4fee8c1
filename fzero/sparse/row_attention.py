"""row_attention: block-sparse attention in ATen ops, a block of queries at a time, and its backward. Made for the CPU.

q (B, H, S, D), k (B, G, S, D), v (B, G, S, E); the H / G query heads of a key head stand in one product. For each row
its keys are copied into scratch; then softmax(scale q k^T + mask) v. The backward computes the probabilities again, so
nothing is kept but q, k and v. Sums go in the order of rows: the bits repeat. 16-bit operands are computed in fp32.

What the time depends on: scratch of one row in the cache (`_CACHE`), results written into it, for fresh memory costs
page faults, and the fused softmax. Memory: `scratch_bytes`, linear in S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.sparse.block_rows import BlockRow, HeadSpan, Rules, rows, spans

aten = torch.ops.aten

_CACHE = 4 << 20  # bytes of scratch that heads are taken together for


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call. repeat: query heads of a key head in one span. width: the most key blocks of a row."""

    batch: int
    heads: int
    groups: int
    tokens: int
    key_dim: int
    value_dim: int
    width: int
    itemsize: int  # of the dtype that is computed in
    narrow: bool  # operands have 16 bits

    @staticmethod
    def of(q: Tensor, v: Tensor, columns: Tensor | None, rules: Rules) -> Sizes:
        """Of a call's operands."""
        count = q.shape[2] // rules.block
        width = rules.width(count) if columns is None else min(rules.width(count), columns.shape[-1])
        narrow = q.dtype.itemsize == 2
        (batch, heads, tokens, dim), (groups, *_, value_dim) = q.shape, v.shape[1:]
        return Sizes(batch, heads, groups, tokens, dim, value_dim, width, 4 if narrow else q.itemsize, narrow)

    def row(self, block: int, keys: int, copies: int) -> int:
        """Numbers of scratch for a row of one key head: scores, keys and values, then queries and results."""
        queries = self.heads // self.groups * block
        return copies * queries * keys + (keys + 2 * queries) * (self.key_dim + self.value_dim)

    def scratch(self, block: int, copies: int) -> int:
        """Numbers of scratch of a call."""
        widest = self.row(block, self.width * block, copies)
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
    count = sizes.scratch(block, copies)
    if backward and sizes.narrow:
        count += sizes.batch * sizes.groups * sizes.tokens * (sizes.key_dim + sizes.value_dim)
    masks = 6 + (2 * sizes.width if documents else 0)  # of the bounds; of a row's documents, and of the row before
    return count * sizes.itemsize + (masks * sizes.itemsize + 12) * block * block


def forward(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, rules: Rules, scores: Scores,
    out: Tensor,
) -> None:  # fmt: skip
    """Fills `out` (B, H, S, E)."""
    work = _Work(q, k, v, columns, rules, scores, backward=False)
    target = work.by_rows(out)
    for span in spans(q.shape[0], q.shape[1], k.shape[1], columns, documents):
        for row in rows(span, work.count, rules, work.flat):
            if not row.runs:
                target[_heads(span)][:, :, :, row.number] = 0
            for tile in work.tiles(span, row):
                look = work.look(tile, row)
                torch.bmm(look.p, look.v, out=look.into_v)
                target[tile.heads][:, :, :, row.number] = look.by_head_into_v


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, rules: Rules,
    scores: Scores, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fills the gradients of q, k and v, all contiguous."""
    work = _Work(q, k, v, columns, rules, scores, backward=True)
    target, source = work.by_rows(dq), work.by_rows(grad)
    to_k, to_v = (work.flat.new_zeros(x.shape) if work.narrow else x.zero_() for x in (dk, dv))
    for span in spans(q.shape[0], q.shape[1], k.shape[1], columns, documents):
        for row in rows(span, work.count, rules, work.flat):
            if not row.runs:
                target[_heads(span)][:, :, :, row.number] = 0
            for tile in work.tiles(span, row):
                look = work.look(tile, row)
                look.by_head_into_v.copy_(source[tile.heads][:, :, :, row.number])
                dp = torch.bmm(look.into_v, look.v.transpose(1, 2), out=look.s)
                aten._softmax_backward_data.out(dp, look.p, -1, work.dtype, grad_input=look.ds)
                if look.slope is not None:
                    look.ds.mul_(look.slope)
                torch.bmm(look.ds, look.k, out=look.into_q).mul_(scores.scale)
                target[tile.heads][:, :, :, row.number] = look.by_head_into_q
                for into, left, right in ((to_v, look.p, look.into_v), (to_k, look.ds, look.q)):
                    _add(into[tile.keys].flatten(0, 1), row, left, right)
    if work.narrow:
        dk.copy_(to_k)
        dv.copy_(to_v)


def _add(into: Tensor, row: BlockRow, left: Tensor, right: Tensor) -> None:
    """into[the row's keys] += left^T right, run by run."""
    place = 0
    for start, stop in row.runs:
        part = left[:, :, place : place + stop - start].transpose(1, 2)
        into[:, start:stop].baddbmm_(part, right)
        place += stop - start


def _heads(span: HeadSpan) -> tuple[slice, slice, slice]:
    return _slice(span.batches), _slice(span.groups), span.repeats


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Heads that are taken together. heads: of a (B, G, H / G, ...) tensor. shape: batches, groups, repeats, block."""

    heads: tuple[slice, slice, slice]
    shape: tuple[int, int, int, int]

    @property
    def keys(self) -> tuple[slice, slice]:
        """Of a (B, G, ...) tensor."""
        return self.heads[:2]


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
    by_head_q: Tensor  # (batches, groups, repeats, block, D), as the next two
    by_head_into_q: Tensor
    by_head_into_v: Tensor
    by_head_k: Tensor  # (batches, groups, keys, D)
    by_head_v: Tensor
    by_head_s: Tensor  # (N, repeats, block, keys), as the next
    by_head_p: Tensor
    slope: Tensor | None  # of a softcap: of what it makes of a score, by the score


class _Work:
    """A call's operands and its scratch. looks: by shape of a tile and number of keys, of one memory."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, rules: Rules, scores: Scores, backward: bool
    ) -> None:
        self.sizes = Sizes.of(q, v, columns, rules)
        self.narrow, self.dtype = self.sizes.narrow, torch.float32 if self.sizes.narrow else q.dtype
        self.block, self.count, self.scores = rules.block, q.shape[2] // rules.block, scores
        self.copies = copies(backward, scores.softcap)
        self.k, self.v, self.q = k, v, self.by_rows(q)
        self.flat = q.new_empty(self.sizes.scratch(rules.block, self.copies), dtype=self.dtype)
        self.looks: dict[tuple[tuple[int, ...], int], _Look] = {}

    def by_rows(self, x: Tensor) -> Tensor:
        """(B, H, S, D) as (B, G, H / G, rows, block, D)."""
        groups = self.sizes.groups
        return x.unflatten(2, (self.count, self.block)).unflatten(1, (groups, self.sizes.heads // groups))

    def tiles(self, span: HeadSpan, row: BlockRow) -> Iterator[_Tile]:
        """The heads of a span, as many at a time as the cache holds a row of."""
        if not row.runs:
            return
        each = self.sizes.row(self.block, row.keys, self.copies)
        most, repeat = max(1, len(self.flat) // each), span.repeats.stop - span.repeats.start
        per_batch = min(most, len(span.groups))
        batches = max(1, most // len(span.groups))
        for i in range(span.batches.start, span.batches.stop, batches):
            own = slice(i, min(i + batches, span.batches.stop))
            for g in range(span.groups.start, span.groups.stop, per_batch):
                groups = slice(g, min(g + per_batch, span.groups.stop))
                shape = (own.stop - own.start, groups.stop - groups.start, repeat, self.block)
                yield _Tile((own, groups, span.repeats), shape)

    def look(self, tile: _Tile, row: BlockRow) -> _Look:
        """The copies of a row's operands, and its probabilities."""
        key = (tile.shape, row.keys)
        if key not in self.looks:
            self.looks[key] = self._carved(*key)
        look = self.looks[key]
        for source, into in ((self.k[tile.keys], look.by_head_k), (self.v[tile.keys], look.by_head_v)):
            place = 0
            for start, stop in row.runs:
                into[:, :, place : place + stop - start].copy_(source[:, :, start:stop])
                place += stop - start
        look.by_head_q.copy_(self.q[tile.heads][:, :, :, row.number])
        torch.bmm(look.q.mul_(self.scores.scale), look.k.transpose(1, 2), out=look.s)
        if softcap := self.scores.softcap:
            look.s.div_(softcap).tanh_()
            if look.slope is not None:
                torch.mul(look.s, look.s, out=look.slope).neg_().add_(1)
            look.s.mul_(softcap)
        for place, mask in row.edges:
            look.by_head_s[..., place : place + self.block].add_(mask)
        aten._softmax.out(look.s, -1, False, out=look.p)
        if self.scores.sinks is not None:
            self._lose(look, tile, self.scores.sinks)
        if row.blind is not None:
            look.by_head_p.masked_fill_(row.blind, 0)
        return look

    def _lose(self, look: _Look, tile: _Tile, sinks: Tensor) -> None:
        """Takes from the probabilities what the sinks of the heads have. The largest says the sum that it is of."""
        batches, groups, repeat, block = tile.shape
        lse = look.by_head_s.amax(-1) - look.by_head_p.amax(-1).log_()
        own = sinks.to(self.dtype).view(self.sizes.groups, -1)[tile.heads[1:]]
        kept = (lse.view(batches, groups, repeat, block) - own[..., None]).sigmoid_()
        look.by_head_p.mul_(kept.view(-1, repeat, block, 1))

    def _carved(self, shape: tuple[int, int, int, int], keys: int) -> _Look:
        batches, groups, repeat, block = shape
        n, m, d, e = batches * groups, repeat * block, self.sizes.key_dim, self.sizes.value_dim
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
            s.view(n, repeat, block, keys), p.view(n, repeat, block, keys), slope,
        )  # fmt: skip
