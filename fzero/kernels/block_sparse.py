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

REGISTERS = 255  # of a thread: left alone, the assembler keeps to 128 for some tiles, and spills

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
def _walk(count, number, tiles, before, after, TILE: tl.constexpr, RATIO: tl.constexpr, TABLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the first step of a walk over tiles, past the last): of the table's entries, or of those within the bounds."""
    if TABLE:
        return 0, tl.load(count) * RATIO
    first = 0
    last = tiles
    if before >= 0:
        first = tl.where(number * TILE < before, 0, (number * TILE - before) // TILE)
    if after >= 0:
        last = tl.minimum(tiles, ((number + 1) * TILE - 1 + after) // TILE + 1)
    return first, last


@jit
def _met(line, step, TILE: tl.constexpr, RATIO: tl.constexpr, TABLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of a step's tile."""
    first = step * TILE
    if TABLE:
        first = (tl.load(line + step // RATIO) * RATIO + step % RATIO) * TILE
    return first + tl.arange(0, TILE)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    out, q, k, v, table, counts, ids, qb, qh, qs, kb, kh, ks, vb, vh, vs, tb, th, heads, repeat, shared, tiles, width,
    left, right, scale, dim, value_dim, TILE: tl.constexpr,
    RATIO: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TABLE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    number, place = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = place // heads, place % heads
    k += b * kb + h // repeat * kh
    v += b * vb + h // repeat * vh
    line = b * tb + h // shared * th + number // RATIO
    i = number * TILE + tl.arange(0, TILE)
    queries = _tile(q + b * qb + h * qh, i, qs, dim, DIM)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, VALUE_DIM), tl.float32)
    first, last = _walk(counts + line, number, tiles, left, right, TILE, RATIO, TABLE)
    for step in range(first, last):
        j = _met(table + line * width, step, TILE, RATIO, TABLE)
        s = _scores(
            queries, _tile(k, j, ks, dim, DIM), i, j, ids + b * tiles * TILE, scale, left, right, DOCUMENTS
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
    _put(out + place * tiles * TILE * value_dim, i, acc, value_dim, VALUE_DIM)


@jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    dq, lse, delta, grad, q, k, v, table, counts, ids, gb, gh, gs, qb, qh, qs, kb, kh, ks, vb, vh, vs, tb, th, heads,
    repeat, shared, tiles, width, left, right, scale, dim, value_dim, TILE: tl.constexpr,
    RATIO: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TABLE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    number, place = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = place // heads, place % heads
    k += b * kb + h // repeat * kh
    v += b * vb + h // repeat * vh
    ids += b * tiles * TILE
    line = b * tb + h // shared * th + number // RATIO
    i = number * TILE + tl.arange(0, TILE)
    queries = _tile(q + b * qb + h * qh, i, qs, dim, DIM)
    incoming = _tile(grad + b * gb + h * gh, i, gs, value_dim, VALUE_DIM)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mean = tl.zeros((TILE,), tl.float32)
    first, last = _walk(counts + line, number, tiles, left, right, TILE, RATIO, TABLE)
    for step in range(first, last):
        j = _met(table + line * width, step, TILE, RATIO, TABLE)
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
    acc = tl.zeros((TILE, DIM), tl.float32)
    for step in range(first, last):
        j = _met(table + line * width, step, TILE, RATIO, TABLE)
        keys = _tile(k, j, ks, dim, DIM)
        s = _scores(queries, keys, i, j, ids, scale, left, right, DOCUMENTS)
        dp = tl.dot(incoming, tl.trans(_tile(v, j, vs, value_dim, VALUE_DIM)), input_precision="tf32x3")
        ds = tl.exp(s - log[:, None]) * (dp - mean[:, None])
        acc += tl.dot(ds.to(keys.dtype), keys, input_precision="tf32x3")
    _put(dq + place * tiles * TILE * dim, i, acc * scale, dim, DIM)
    tl.store(lse + place * tiles * TILE + i, log)
    tl.store(delta + place * tiles * TILE + i, mean)


@jit
def _columns_kernel(  # type: ignore[no-untyped-def]
    dk, dv, lse, delta, grad, q, k, v, table, counts, ids, gb, gh, gs, qb, qh, qs, kb, kh, ks, vb, vh, vs, tb, th,
    groups, repeat, shared, tiles, width, left, right, scale, dim, value_dim, TILE: tl.constexpr,
    RATIO: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TABLE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """`table` holds the rows that look at each column."""
    number, place = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, g = place // groups, place % groups
    ids += b * tiles * TILE
    j = number * TILE + tl.arange(0, TILE)
    keys = _tile(k + b * kb + g * kh, j, ks, dim, DIM)
    values = _tile(v + b * vb + g * vh, j, vs, value_dim, VALUE_DIM)
    to_k = tl.zeros((TILE, DIM), tl.float32)
    to_v = tl.zeros((TILE, VALUE_DIM), tl.float32)
    for member in range(repeat):
        h = g * repeat + member
        line = b * tb + h // shared * th + number // RATIO
        told = (b * groups * repeat + h) * tiles * TILE
        first, last = _walk(counts + line, number, tiles, right, left, TILE, RATIO, TABLE)
        for step in range(first, last):
            i = _met(table + line * width, step, TILE, RATIO, TABLE)
            queries = _tile(q + b * qb + h * qh, i, qs, dim, DIM)
            incoming = _tile(grad + b * gb + h * gh, i, gs, value_dim, VALUE_DIM)
            s = _scores(queries, keys, i, j, ids, scale, left, right, DOCUMENTS)
            p = tl.exp(s - tl.load(lse + told + i)[:, None])
            to_v += tl.dot(tl.trans(p.to(incoming.dtype)), incoming, input_precision="tf32x3")
            dp = tl.dot(incoming, tl.trans(values), input_precision="tf32x3")
            ds = p * (dp - tl.load(delta + told + i)[:, None])
            to_k += tl.dot(tl.trans(ds.to(queries.dtype)), queries, input_precision="tf32x3")
    _put(dk + place * tiles * TILE * dim, j, to_k * scale, dim, DIM)
    _put(dv + place * tiles * TILE * value_dim, j, to_v, value_dim, VALUE_DIM)


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


def tile_for(block: int, dims: int, dtype: torch.dtype) -> int:
    """Tokens of a tile: the largest power of two that divides a block and whose rows of `dims` stay in registers.

    Of fp32 products there are three each, in tf32. 0: no tile has room.

    >>> tile_for(64, 64, torch.bfloat16), tile_for(64, 64, torch.float32), tile_for(48, 64, torch.bfloat16)
    (64, 32, 16)
    """
    room = 32 * 64 if dtype == torch.float32 else 64 * 128
    fits = [t for t in (64, 32, 16) if block % t == 0 and t * max(16, 1 << (dims - 1).bit_length()) <= room]
    return fits[0] if fits else 0


def attention_out(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, block: int, left: int,
    right: int, scale: float, *, out: Tensor,
) -> Tensor:  # fmt: skip
    """`fzero::block_sparse_attention.out`: fp32, bf16 or fp16 with dims side by side, blocks that `tile_for` takes."""
    (head, tail), constants = _common(q, k, v, columns, documents, block, q.shape[1])
    numbers = (left, right, scale, q.shape[3], v.shape[3])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    programs = q.shape[0] * q.shape[1] * (q.shape[2] // constants["TILE"])
    args = (out, q, k, v, *head, *strides, *tail, *numbers)
    stages = 3 if constants["DIM"] <= 128 else 1  # more would spill
    _triton.launch(_forward_kernel, programs, q.device, *args, num_stages=stages, maxnreg=REGISTERS, **constants)
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
    operands = (lse, delta, grad, q, k, v)
    turned = None if columns is None else by_column(columns)
    for kernel, into, table, x in ((_rows_kernel, (dq,), columns, q), (_columns_kernel, (dk, dv), turned, k)):
        (head, tail), constants = _common(q, k, v, table, documents, block, x.shape[1])
        programs = x.shape[0] * x.shape[1] * (x.shape[2] // constants["TILE"])
        args = (*into, *operands, *head, *strides, *tail, *numbers)
        small = q.element_size() == 2 and constants["TILE"] * max(q.shape[3], v.shape[3]) <= 4096
        if kernel is _columns_kernel and small:
            constants["num_warps"] = 4  # with eight it spills on sm_80
        # of more stages it would spill
        _triton.launch(kernel, programs, q.device, *args, num_stages=1, maxnreg=REGISTERS, **constants)
    return dq, dk, dv


def _common(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, documents: Tensor | None, block: int, programs_heads: int
) -> tuple[tuple[tuple[Any, ...], tuple[Any, ...]], dict[str, Any]]:
    """((table, counts, ids), what follows the strides), and the constants of a launch."""
    heads, repeat = q.shape[1], q.shape[1] // k.shape[1]
    tile = tile_for(block, max(q.shape[3], v.shape[3]), q.dtype)
    wide = [max(16, 1 << (x.shape[3] - 1).bit_length()) for x in (q, v)]
    constants: dict[str, Any] = {
        "TILE": tile, "RATIO": block // tile, "DIM": wide[0], "VALUE_DIM": wide[1], "TABLE": table is not None,
        "DOCUMENTS": documents is not None, "num_warps": 8 if tile * max(wide) * q.element_size() >= 32 * 64 * 4 else 4,
    }  # fmt: skip
    ids, tiles = q if documents is None else documents.contiguous(), q.shape[2] // tile
    if table is None:
        return ((q, q, ids), (0, 0, programs_heads, repeat, heads, tiles, 1)), constants
    table = table.contiguous()
    counts = (table >= 0).sum(-1, dtype=torch.int32)
    rows = table.shape[2]
    by_batch, by_head = (rows * table.shape[1] if table.shape[0] > 1 else 0), (rows if table.shape[1] > 1 else 0)
    shared = heads // table.shape[1]
    return ((table, counts, ids), (by_batch, by_head, programs_heads, repeat, shared, tiles, table.shape[3])), constants
