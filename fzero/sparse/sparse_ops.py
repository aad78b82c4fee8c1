"""sparse_ops: `fzero::block_sparse_attention` and its backward, and their rows: shapes, memory, operations, placements.

q (B, H, S, D), k (B, G, S, D), v (B, G, S, E), where G divides H: the result is (B, H, S, E). fp64, fp32, bf16 or fp16.
columns, documents, left, right: what a query sees (`block_rows`). scale: of the scores. A query without a key has 0.
softcap: scores s become softcap tanh(s / softcap); 0 is none. sinks (H,): one more score for each query of a head: it
takes a part of the probabilities and has no value.
Both ops have `out=` forms, so a program gives them memory. The backward has no gradient of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fzero.errors import SpecError
from fzero.ir import op_info
from fzero.ir.op_info import OpInfo
from fzero.shard.factors import SUM, WHOLE, Call, Dims, Factors, Maker
from fzero.shard.rules.rule import Rule
from fzero.sparse import row_attention
from fzero.sparse.block_rows import Rules
from fzero.sparse.row_attention import Scores, Sizes

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? columns, Tensor? documents"
_NUMBERS = "int block, int left, int right, float scale, Tensor? sinks=None, float softcap=0.0"
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define(f"block_sparse_attention({_OPERANDS}, {_NUMBERS}) -> Tensor")
_LIBRARY.define(f"block_sparse_attention.out({_OPERANDS}, {_NUMBERS}, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.define(f"block_sparse_attention_backward(Tensor grad, {_OPERANDS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"block_sparse_attention_backward.out(Tensor grad, {_OPERANDS}, {_NUMBERS}, *, Tensor(a!) dq, Tensor(b!) dk, "
    "Tensor(c!) dv) -> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
FORWARD = torch.ops.fzero.block_sparse_attention.default
BACKWARD = torch.ops.fzero.block_sparse_attention_backward.default


def check(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, block: int, left: int,
    right: int, scale: float, sinks: Tensor | None = None, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Raises SpecError for operands that do not belong together."""
    batch, heads, tokens, dim = _four("q", q)
    groups = _four("k", k)[1]
    for name, x, shape in (("k", k, (batch, groups, tokens, dim)), ("v", v, (batch, groups, tokens, v.shape[-1]))):
        _needs(_four(name, x) == shape, f"{name} has shape {tuple(x.shape)}", f"{shape}, as q and k say")
        _needs(x.dtype is q.dtype, f"{name} is {x.dtype}, q is {q.dtype}", "one dtype; cast it")
    _needs(q.dtype in FLOATS, f"q is {q.dtype}", "fp64, fp32, bf16 or fp16")
    _needs(groups > 0 and heads % groups == 0, f"q has {heads} heads, k has {groups}", "a multiple of those of k")
    _needs(block > 0 and tokens % block == 0, f"{tokens} tokens in blocks of {block}", "a multiple; pad the tokens")
    _needs(left >= -1 and right >= -1, f"left={left}, right={right}", "numbers of tokens, or -1 for no bound")
    _needs(0 <= softcap < math.inf, f"softcap={softcap}", "a positive number, or 0 for none")
    if sinks is not None:
        given = f"sinks is {sinks.dtype} of shape {tuple(sinks.shape)}"
        _needs(sinks.shape == (heads,) and sinks.dtype in FLOATS, given, f"a score for each of {heads} heads")
    if columns is not None:
        fits = columns.ndim == 4 and columns.shape[0] in (1, batch) and columns.shape[1] in (1, groups, heads)
        fits = fits and columns.shape[2] == tokens // block and columns.shape[3] > 0 and columns.dtype is torch.int32
        given = f"columns is {columns.dtype} of shape {tuple(columns.shape)}"
        _needs(fits, given, f"int32 (1 or {batch}, 1, {groups} or {heads}, {tokens // block}, at least 1)")
    if documents is not None:
        given = f"documents is {documents.dtype} of shape {tuple(documents.shape)}"
        _needs(documents.dtype is torch.int32 and documents.shape == (batch, tokens), given, f"int32 {(batch, tokens)}")


def _four(name: str, x: Tensor) -> tuple[int, int, int, int]:
    _needs(x.ndim == 4, f"{name} has shape {tuple(x.shape)}", "(batch, heads, tokens, dim)")
    return tuple(x.shape)  # type: ignore[return-value]


def _needs(ok: bool, given: str, needed: str) -> None:
    if not ok:
        raise SpecError(f"block_sparse_attention: {given}; needed {needed}")


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    check(q, k, v, *rest)
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _forward_out(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, block: int, left: int,
    right: int, scale: float, sinks: Tensor | None = None, softcap: float = 0.0, *, out: Tensor,
) -> Tensor:  # fmt: skip
    check(q, k, v, columns, documents, block, left, right, scale, sinks, softcap)
    args = (q, k, v, columns, documents, block, left, right, scale)
    own = _own_kernel(torch.ops.fzero.block_sparse_attention.out, sinks, softcap, *args, out=out)
    if own is not None:
        own(*args, out=out)
        return out
    with torch.no_grad():
        scores = Scores(scale, softcap, sinks)
        row_attention.forward(q, k, v, columns, documents, Rules(block, left, right), scores, out)
    return out


def _own_kernel(op: Any, sinks: Tensor | None, softcap: float, *args: Any, **outs: Any) -> Any:
    """The device's own kernel for a call; None where it has none, as for softcaps and sinks."""
    return None if sinks is not None or softcap else op_info.kernel_for(op, *args, **outs)


def _forward(*args: Any) -> Tensor:
    return _forward_out(*args, out=_fake(*args))


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    check(q, k, v, *rest)
    shape = (*q.shape[:3], v.shape[3])
    _needs(grad.shape == shape and grad.dtype is q.dtype, f"grad is {grad.dtype} of {tuple(grad.shape)}", f"{shape}")
    return _dense(q), _dense(k), _dense(v)


def _backward_out(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, columns: Tensor | None, documents: Tensor | None, block: int,
    left: int, right: int, scale: float, sinks: Tensor | None = None, softcap: float = 0.0, *, dq: Tensor, dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rules = Rules(block, left, right)
    args, outs = (grad, q, k, v, columns, documents, block, left, right, scale), {"dq": dq, "dk": dk, "dv": dv}
    own = _own_kernel(torch.ops.fzero.block_sparse_attention_backward.out, sinks, softcap, *args, **outs)
    if own is not None:
        own(*args, **outs)
        return dq, dk, dv
    with torch.no_grad():
        scores = Scores(scale, softcap, sinks)
        row_attention.backward(grad, q, k, v, columns, documents, rules, scores, dq, dk, dv)
    return dq, dk, dv


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _backward_fake(*args)
    return _backward_out(*args, dq=dq, dk=dk, dv=dv)


for _name, _fake_rule, _pure, _out in (
    ("block_sparse_attention", _fake, _forward, _forward_out),
    ("block_sparse_attention_backward", _backward_fake, _backward, _backward_out),
):
    torch.library.register_fake(f"fzero::{_name}", _fake_rule, lib=_LIBRARY)
    torch.library.impl(f"fzero::{_name}", "CompositeExplicitAutograd", _pure, lib=_LIBRARY)
    torch.library.impl(f"fzero::{_name}.out", "CompositeExplicitAutograd", _out, lib=_LIBRARY)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, block, left, right, scale, sinks, softcap = inputs
    ctx.save_for_backward(*operands, sinks, None if sinks is None else output)
    ctx.numbers = (block, left, right, scale)
    ctx.softcap = softcap


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *operands, sinks, out = ctx.saved_tensors
    ends = (sinks, ctx.softcap)
    of_sinks = None
    if sinks is not None and ctx.needs_input_grad[9]:
        q, k, v, *rest = operands
        seen = FORWARD(q, k, v.new_ones((*v.shape[:3], 1)), *rest, *ctx.numbers, *ends)[..., 0]
        of_sinks = (((seen - 1) * (grad * out).sum(-1)).sum((0, 2))).to(sinks.dtype)
    return *BACKWARD(grad, *operands, *ctx.numbers, *ends), *[None] * 6, of_sinks, None


def _refused(ctx: Any, *grads: Tensor) -> None:
    raise SpecError(
        "block_sparse_attention: a gradient of its gradient is asked for, which it has not. Where a loss holds a "
        "gradient, take F.scaled_dot_product_attention(q, k, v, attn_mask=layout.tokens(heads))"
    )


torch.library.register_autograd("fzero::block_sparse_attention", _gradients, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd("fzero::block_sparse_attention_backward", _refused, lib=_LIBRARY)


# --- what is known of them --------------------------------------------------------------------------------------------


def _factors(call: Call) -> Factors:
    """Batch and heads may be sharded, query heads of one key head too: the gradients of k and v are sums then."""
    (batch, heads, tokens, dim), groups, m = call.shape("q"), call.shape("k")[1], Maker(call)
    b, g, r = m.dim(batch, SUM), m.dim(groups, SUM), m.dim(heads // groups, SUM)
    s, d, e = m.dim(tokens, WHOLE), m.dim(dim, WHOLE), m.dim(call.shape("v")[3], WHOLE)
    of: dict[str, Dims] = {"q": (b, g + r, s, d), "k": (b, g, s, d), "v": (b, g, s, e), "grad": (b, g + r, s, e)}
    if call["columns"] is not None:
        tables, own, *rest = call.shape("columns")
        by_head = () if own == 1 else g if own == groups else g + r
        of["columns"] = (() if tables == 1 else b, by_head, *m.dims(rest, WHOLE))
    if call["documents"] is not None:
        of["documents"] = (b, m.dim(tokens, WHOLE))
    if call["sinks"] is not None:
        of["sinks"] = (g + r,)
    backward = "grad" in call.names
    outs = [of["q"], of["k"], of["v"]] if backward else [of["grad"]]
    return m.factors({name: of[name] for name in call.names if name in of}, *outs)


def _sizes(node: fx.Node) -> tuple[Sizes, int]:
    call = Call.of(node)
    columns = None if call["columns"] is None else call["columns"].meta["val"]
    rules = Rules(call["block"], call["left"], call["right"])
    documents = call["documents"] is not None
    return Sizes.of(call["q"].meta["val"], call["v"].meta["val"], columns, rules, documents), call["block"]


def _scratch(backward: bool) -> Callable[[fx.Node], int]:
    def formula(node: fx.Node) -> int:
        sizes, block = _sizes(node)
        call = Call.of(node)
        copies = row_attention.copies(backward, call["softcap"])
        return row_attention.scratch_bytes(sizes, block, copies, backward, call["documents"] is not None)

    return formula


def _operations(of_key: int, of_value: int) -> Callable[[fx.Node], int]:
    """Of the products of queries and keys, by how many have D and E numbers."""

    def formula(node: fx.Node) -> int:
        s, block = _sizes(node)
        return 2 * s.batch * s.heads * s.tokens * s.width * block * (of_key * s.key_dim + of_value * s.value_dim)

    return formula


for _name, _row in (
    ("block_sparse_attention", OpInfo(workspace=_scratch(False), flops=_operations(1, 1))),
    ("block_sparse_attention_backward", OpInfo(workspace=_scratch(True), flops=_operations(3, 2))),
):
    op_info.add(f"fzero.{_name}", OpInfo(placements=Rule(_factors), fake="kept", out_form="call", attends=True))
    op_info.add(f"fzero.{_name}", _row)
