"""Block-sparse attention: softmax(scale q k^T + mask) v over the key blocks of each row, and its backward.

A program is a block of queries of one head, or (dk, dv) a block of keys of one key head: it walks the blocks that it
sees, in ascending order, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Nothing is added up by
atomics, so the bits repeat. Three kernels:

    forward   out = sum p v / sum p
    rows      the same walk for lse and delta = sum p (grad . v) / sum p; then dq = scale sum p (grad . v - delta) k
    columns   dv = sum p grad, dk = scale sum p (grad . v - delta) q, over the rows that look at the block

Only q, k and v come from the forward: `rows` finds the statistics again, two products of a row's nine.

Byte floor, S tokens, w blocks of `block` tokens a row: q, k, v and out once, k and v again for what the caches lose.
The table of columns is int32 (1 or batch, 1, key heads or heads, rows, width), ascending, then -1; without one the
bounds say which blocks are seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.kernels import _triton
from fzero.kernels._triton import jit, tl

# ---- device functions ------------------------------------------------------------------------------------------------


@jit
def _tile(base, index, stride, dims, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `index` of a (tokens, dims) tensor, zeros beyond dims."""
    at = tl.arange(0, WIDE)
    return tl.load(base + index[:, None] * stride + at[None, :], mask=(at < dims)[None, :], other=0.0)


@jit
def _put(base, index, value, dims, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes rows of a contiguous (tokens, dims) tensor."""
    at = tl.arange(0, WIDE)
    tl.store(base + index[:, None] * dims + at[None, :], value.to(base.dtype.element_ty), mask=(at < dims)[None, :])


@jit
def _scores(q, k, i, j, ids, scale, left, right, DOCUMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 scores of queries i and keys j, -inf where a key is not seen."""
    s = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    ahead = j[None, :] - i[:, None]
    seen = ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
    if DOCUMENTS:
        own, other = tl.load(ids + i), tl.load(ids + j)
        seen = seen & (own[:, None] == other[None, :]) & (other >= 0)[None, :]
    return tl.where(seen, s, float("-inf"))


@jit
def _walk(table, count, row, rows, before, after, BLOCK: tl.constexpr, TABLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the first step of a walk, past the last): of the table's entries, or of the blocks within the bounds."""
    if TABLE:
        return 0, tl.load(count)
    first = 0
    last = rows
    if before >= 0:
        first = tl.where(row * BLOCK < before, 0, (row * BLOCK - before) // BLOCK)
    if after >= 0:
        last = tl.minimum(rows, ((row + 1) * BLOCK - 1 + after) // BLOCK + 1)
    return first, last


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    out, q, k, v, table, counts, ids, qb, qh, qs, kb, kh, ks, vb, vh, vs, tb, th, heads, repeat, shared, rows, width,
    left, right, scale, dim, value_dim, BLOCK: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TABLE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) % rows, (tl.program_id(0) // rows).to(tl.int64)
    b, h = place // heads, place % heads
    k += b * kb + h // repeat * kh
    v += b * vb + h // repeat * vh
    line = b * tb + h // shared * th + row
    i = row * BLOCK + tl.arange(0, BLOCK)
    queries = _tile(q + b * qb + h * qh, i, qs, dim, DIM)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, VALUE_DIM), tl.float32)
    first, last = _walk(table, counts + line, row, rows, left, right, BLOCK, TABLE)
    for step in range(first, last):
        column = tl.load(table + line * width + step) if TABLE else step
        j = column * BLOCK + tl.arange(0, BLOCK)
        s = _scores(
            queries, _tile(k, j, ks, dim, DIM), i, j, ids + b * rows * BLOCK, scale, left, right, DOCUMENTS
        )  # fmt: skip
        higher = tl.maximum(most, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - safe[:, None])
        shrink = tl.exp(most - safe)
        total = total * shrink + tl.sum(p, 1)
        values = _tile(v, j, vs, value_dim, VALUE_DIM)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="tf32x3")
        most = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    _put(out + place * rows * BLOCK * value_dim, i, acc, value_dim, VALUE_DIM)


@jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    dq, lse, delta, grad, q, k, v, table, counts, ids, gb, gh, gs, qb, qh, qs, kb, kh, ks, vb, vh, vs, tb, th, heads,
    repeat, shared, rows, width, left, right, scale, dim, value_dim, BLOCK: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TABLE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) % rows, (tl.program_id(0) // rows).to(tl.int64)
    b, h = place // heads, place % heads
    k += b * kb + h // repeat * kh
    v += b * vb + h // repeat * vh
    ids += b * rows * BLOCK
    line = b * tb + h // shared * th + row
    i = row * BLOCK + tl.arange(0, BLOCK)
    queries = _tile(q + b * qb + h * qh, i, qs, dim, DIM)
    incoming = _tile(grad + b * gb + h * gh, i, gs, value_dim, VALUE_DIM)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    first, last = _walk(table, counts + line, row, rows, left, right, BLOCK, TABLE)
    for step in range(first, last):
        column = tl.load(table + line * width + step) if TABLE else step
        j = column * BLOCK + tl.arange(0, BLOCK)
        s = _scores(queries, _tile(k, j, ks, dim, DIM), i, j, ids, scale, left, right, DOCUMENTS)
        higher = tl.maximum(most, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - safe[:, None])
        shrink = tl.exp(most - safe)
        dp = tl.dot(incoming, tl.trans(_tile(v, j, vs, value_dim, VALUE_DIM)), input_precision="tf32x3")
        total = total * shrink + tl.sum(p, 1)
        mean = mean * shrink + tl.sum(p * dp, 1)
        most = higher
    blind = total == 0.0
    log = tl.where(blind, float("inf"), most + tl.log(tl.where(blind, 1.0, total)))
    mean = mean / tl.where(blind, 1.0, total)
    acc = tl.zeros((BLOCK, DIM), tl.float32)
    for step in range(first, last):
        column = tl.load(table + line * width + step) if TABLE else step
        j = column * BLOCK + tl.arange(0, BLOCK)
        keys = _tile(k, j, ks, dim, DIM)
        s = _scores(queries, keys, i, j, ids, scale, left, right, DOCUMENTS)
        dp = tl.dot(incoming, tl.trans(_tile(v, j, vs, value_dim, VALUE_DIM)), input_precision="tf32x3")
        ds = tl.exp(s - log[:, None]) * (dp - mean[:, None])
        acc += tl.dot(ds.to(keys.dtype), keys, input_precision="tf32x3")
    _put(dq + place * rows * BLOCK * dim, i, acc * scale, dim, DIM)
    tl.store(lse + place * rows * BLOCK + i, log)
    tl.store(delta + place * rows * BLOCK + i, mean)


@jit
def _columns_kernel(  # type: ignore[no-untyped-def]
    dk, dv, lse, delta, grad, q, k, v, table, counts, ids, gb, gh, gs, qb, qh, qs, kb, kh, ks, vb, vh, vs, tb, th,
    groups, repeat, shared, rows, width, left, right, scale, dim, value_dim, BLOCK: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TABLE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """`table` holds the rows that look at each column."""
    column, place = tl.program_id(0) % rows, (tl.program_id(0) // rows).to(tl.int64)
    b, g = place // groups, place % groups
    ids += b * rows * BLOCK
    j = column * BLOCK + tl.arange(0, BLOCK)
    keys = _tile(k + b * kb + g * kh, j, ks, dim, DIM)
    values = _tile(v + b * vb + g * vh, j, vs, value_dim, VALUE_DIM)
    to_k = tl.zeros((BLOCK, DIM), tl.float32)
    to_v = tl.zeros((BLOCK, VALUE_DIM), tl.float32)
    for number in range(repeat):
        h = g * repeat + number
        line = b * tb + h // shared * th + column
        told = (b * groups * repeat + h) * rows * BLOCK
        first, last = _walk(table, counts + line, column, rows, right, left, BLOCK, TABLE)
        for step in range(first, last):
            row = tl.load(table + line * width + step) if TABLE else step
            i = row * BLOCK + tl.arange(0, BLOCK)
            queries = _tile(q + b * qb + h * qh, i, qs, dim, DIM)
            incoming = _tile(grad + b * gb + h * gh, i, gs, value_dim, VALUE_DIM)
            s = _scores(queries, keys, i, j, ids, scale, left, right, DOCUMENTS)
            p = tl.exp(s - tl.load(lse + told + i)[:, None])
            to_v += tl.dot(tl.trans(p.to(incoming.dtype)), incoming, input_precision="tf32x3")
            dp = tl.dot(incoming, tl.trans(values), input_precision="tf32x3")
            ds = p * (dp - tl.load(delta + told + i)[:, None])
            to_k += tl.dot(tl.trans(ds.to(queries.dtype)), queries, input_precision="tf32x3")
    _put(dk + place * rows * BLOCK * dim, j, to_k * scale, dim, DIM)
    _put(dv + place * rows * BLOCK * value_dim, j, to_v, value_dim, VALUE_DIM)


# ---- launchers -------------------------------------------------------------------------------------------------------


def by_column(columns: Tensor) -> Tensor:
    """int32 (..., columns, rows): the rows that look at each column in ascending order, then -1.

    >>> by_column(torch.tensor([[0, -1], [0, 1]], dtype=torch.int32)).tolist()
    [[0, 1], [1, -1]]
    """
    rows = columns.shape[-2]
    index = columns.long()
    own = torch.zeros(*columns.shape[:-1], rows + 1, dtype=torch.bool, device=columns.device)
    own = own.scatter_(-1, index.where(index >= 0, rows), True)[..., :rows].mT
    order = torch.argsort((~own).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return order.masked_fill(torch.arange(rows, device=columns.device) >= own.sum(-1, keepdim=True), -1)


def attention_out(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, block: int, left: int,
    right: int, scale: float, *, out: Tensor,
) -> Tensor:  # fmt: skip
    """`fzero::block_sparse_attention.out`: fp32, bf16 or fp16 with dims side by side, blocks of 16, 32, 64 or 128."""
    args, constants = _common(q, k, v, columns, documents, block, q.shape[1])
    numbers = (left, right, scale, q.shape[3], v.shape[3])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    head, tail = args
    programs = q.shape[0] * q.shape[1] * (q.shape[2] // block)
    _triton.launch(_forward_kernel, programs, q.device, out, q, k, v, *head, *strides, *tail, *numbers, **constants)
    return out


def backward_out(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, block: int,
    left: int, right: int, scale: float, *, dq: Tensor, dk: Tensor, dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`fzero::block_sparse_attention_backward.out`; scratch is two fp32 numbers for each query."""
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    numbers = (left, right, scale, q.shape[3], v.shape[3])
    strides = (*grad.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    lse, delta = q.new_empty((2, *q.shape[:3]), dtype=torch.float32).unbind(0)
    rows = q.shape[2] // block
    (head, tail), constants = _common(q, k, v, columns, documents, block, q.shape[1])
    operands = (lse, delta, grad, q, k, v)
    programs = q.shape[0] * q.shape[1] * rows
    _triton.launch(_rows_kernel, programs, q.device, dq, *operands, *head, *strides, *tail, *numbers, **constants)
    turned = None if columns is None else by_column(columns)
    (head, tail), constants = _common(q, k, v, turned, documents, block, k.shape[1])
    programs = k.shape[0] * k.shape[1] * rows
    _triton.launch(
        _columns_kernel, programs, q.device, dk, dv, *operands, *head, *strides, *tail, *numbers, **constants
    )  # fmt: skip
    return dq, dk, dv


def _common(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, documents: Tensor | None, block: int, programs_heads: int
) -> tuple[tuple[tuple[Any, ...], tuple[Any, ...]], dict[str, Any]]:
    """((table, counts, ids), what follows the strides), and the constants of a launch."""
    rows, heads, repeat = q.shape[2] // block, q.shape[1], q.shape[1] // k.shape[1]
    wide = [max(16, 1 << (x.shape[3] - 1).bit_length()) for x in (q, v)]
    constants: dict[str, Any] = {
        "BLOCK": block, "DIM": wide[0], "VALUE_DIM": wide[1], "TABLE": table is not None,
        "DOCUMENTS": documents is not None, "num_warps": 8 if block * max(wide) > 64 * 64 else 4,
    }  # fmt: skip
    ids = q if documents is None else documents.contiguous()
    if table is None:
        return ((q, q, ids), (0, 0, programs_heads, repeat, heads, rows, 1)), constants
    table = table.contiguous()
    counts = (table >= 0).sum(-1, dtype=torch.int32)
    by_batch = rows * table.shape[1] if table.shape[0] > 1 else 0
    by_head = rows if table.shape[1] > 1 else 0
    shared = heads // table.shape[1]
    return ((table, counts, ids), (by_batch, by_head, programs_heads, repeat, shared, rows, table.shape[3])), constants
