"""attend: `fzero.sparse.attention`, scaled dot product attention over the pairs of a layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fzero.errors import SpecError
from fzero.sparse.block_layout import BlockLayout
from fzero.sparse.block_layouts import INTEGERS
from fzero.sparse.sparse_ops import FORWARD


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T) v over the pairs of a query and a key that `layout` has: (batch, heads, tokens, value dim).

    layout: of `sliding_window`, `fixed` and others. dropout_p: must be 0. q: (batch, heads, tokens, dim). k, v: as q,
    or with fewer heads, of which each serves heads / their number of q's. All of one dtype: fp64, fp32, bf16 or fp16.
    scale: None is dim ** -0.5. key_padding_mask: bool (batch, tokens), True at padding. documents: int (batch, tokens):
    a token sees tokens of its own id, of 32 bits; a negative id is padding. A token of padding, or without a key, has
    the result 0 and gives no gradient. softcap: scores s become softcap tanh(s / softcap), as in Gemma 2. sinks:
    (heads,), one more score of each head, which takes its part of every query's probabilities and has no value, as in
    gpt-oss.

    Time and memory are linear in tokens for layouts whose rows do not grow. No probabilities are kept.

    Raises SpecError: of a layout for another length, of tokens that the block does not divide, of dropout, of
    torch.func.grad and forward-mode derivatives.

    >>> from fzero import sparse
    >>> q, k, v = torch.randn(3, 2, 4, 64, 8).unbind(0)
    >>> layout = sparse.sliding_window(64, window=20, causal=True, block=16)
    >>> wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=layout.tokens())
    >>> torch.allclose(sparse.attention(q, k, v, layout), wanted, atol=1e-6)
    True
    """
    if dropout_p:
        raise SpecError(
            f"attention(dropout_p={dropout_p}): probabilities are not kept, so none can be dropped; needed 0. Drop the "
            "result instead: fzero.random.dropout(key, out, p)"
        )
    _operands(q, k, v, layout, sinks)
    ids = _ids(q, key_padding_mask, documents)
    rules, columns = layout.rules, layout.columns
    if columns is not None and columns.device != q.device:
        columns = columns.to(q.device)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    ends = () if softcap is None and sinks is None else (sinks, softcap or 0.0)
    try:
        out: Tensor = FORWARD(q, k, v, columns, ids, rules.block, rules.left, rules.right, factor, *ends)
    except RuntimeError as error:
        if "functorch transforms" not in str(error):
            raise
        raise SpecError(
            f"attention: torch.func.grad of it is asked for. Take torch.autograd.grad, or {_MASKED}"
        ) from None
    return out


_MASKED = "F.scaled_dot_product_attention(q, k, v, attn_mask=layout.tokens(heads))"


def _operands(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, sinks: Tensor | None) -> None:
    """Raises SpecError for what is no operand, and for a derivative that the op has not: torch takes it to be 0."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.shape[-1]:
            given = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise SpecError(f"attention: {name} is {given}; needed (batch, heads, tokens, dim)")
    if not isinstance(layout, BlockLayout):
        raise SpecError(
            f"attention: layout is a {type(layout).__name__}; needed one of sparse.sliding_window and others, of a "
            "bool mask sparse.from_mask(mask)"
        )
    tokens = q.shape[-2]
    if tokens != layout.seq_len:
        needed = f"a layout of {tokens} tokens"
        if tokens < layout.seq_len:
            needed += f", or {layout.seq_len - tokens} tokens of padding and a key_padding_mask"
        raise SpecError(f"attention: q has {tokens} tokens, the layout {layout.seq_len}; needed {needed}")
    if any(unpack_dual(x).tangent is not None for x in (q, k, v, sinks) if x is not None):
        raise SpecError(
            f"attention: a forward-mode derivative (jvp, jacfwd) is asked for, which it has not. Take {_MASKED}"
        )


def _ids(q: Tensor, key_padding_mask: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """int32 (batch, tokens): the document of each token, negative for padding; None where all is one."""
    shape = (q.shape[0], q.shape[2])
    for name, x in (("documents", documents), ("key_padding_mask", key_padding_mask)):
        if x is not None and not isinstance(x, Tensor):
            raise SpecError(f"attention: {name} is a {type(x).__name__}; needed a tensor of shape {shape}")
    if documents is not None and (documents.shape != shape or documents.dtype not in INTEGERS):
        raise SpecError(f"attention: documents is {documents.dtype} {tuple(documents.shape)}; needed int {shape}")
    if key_padding_mask is None:
        return None if documents is None else documents.to(torch.int32)
    if key_padding_mask.shape != shape or key_padding_mask.dtype is not torch.bool:
        given = f"{key_padding_mask.dtype} {tuple(key_padding_mask.shape)}"
        raise SpecError(f"attention: key_padding_mask is {given}; needed bool {shape}, True at padding")
    ids = torch.zeros(shape, dtype=torch.int32, device=q.device) if documents is None else documents.to(torch.int32)
    return ids.masked_fill(key_padding_mask, -1)
