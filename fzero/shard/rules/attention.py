"""attention: the fused scaled dot product attentions of torch.

    q b(gr)qd, k bgkd, v bgke -> b(gr)qe, logsumexp b(gr)q

g are the heads of k and v, r the heads of q that share one of them. Rows of q may be sharded where no mask depends on
their position: then the gradients of k and v are sums. Rows of k are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.shard.factors import SUM, WHOLE, Call, Dims, Factors, Maker, broadcast
from fzero.shard.rules.rule import Rule, Rules

aten = torch.ops.aten


def attended(call: Call) -> Factors:
    """The forward: output, and statistics that begin with batch and heads. Others are whole (states of generators)."""
    m = Maker(call)
    of = _dims(m, call)
    return m.factors(_given(call, of), of["out"], _statistics(m, call, of, call.results[1].shape))


def attended_back(call: Call) -> Factors:
    """The backward: the gradients of q, k, v, and of a bias. What a gradient lacks, it is a sum over."""
    m = Maker(call)
    of = _dims(m, call)
    of |= {"grad_out": of["out"], "grad_out_": of["out"]}
    of["logsumexp"] = _statistics(m, call, of, call.shape("logsumexp"))
    outs = [of["query"], of["key"], of["value"], of.get("attn_bias", ())]
    return m.factors(_given(call, of), *outs[: len(call.node.meta["val"])])


def _statistics(m: Maker, call: Call, of: dict[str, Dims], shape: Sequence[int]) -> Dims:
    """The dims of logsumexp: batch, heads, and rows, which some kernels pad."""
    exact = tuple(shape) == call.shape("query")[:3]
    return of["query"][:3] if exact else (*of["query"][:2], *m.dims(shape[2:], WHOLE))


def _given(call: Call, of: dict[str, Dims]) -> dict[str, Any]:
    return {name: of[name] for name in call.names if name in of}


def _dims(m: Maker, call: Call) -> dict[str, Dims]:
    """The dims of q, k, v, the output, and of a mask or bias that is broadcast to the scores."""
    (batch, heads, rows, width), (_, shared, cols, _) = call.shape("query"), call.shape("key")
    drawn = bool(call["dropout_p"])
    part = WHOLE if drawn else SUM
    b, g, r = m.dim(batch, part), m.dim(shared, part), m.dim(heads // shared, part)
    rowwise = drawn or call["is_causal"] or "cpu" not in str(call.node.target)
    q, k = m.dim(rows, WHOLE if rowwise else SUM), m.dim(cols, WHOLE)
    d, e = m.dim(width, WHOLE), m.dim(call.shape("value")[3], WHOLE)
    of: dict[str, Dims] = {
        "query": (b, g + r, q, d),
        "key": (b, g, k, d),
        "value": (b, g, k, e),
        "out": (b, g + r, q, e),
    }
    for name in ("attn_mask", "attn_bias"):
        if name in call.names:
            of[name] = broadcast(call.shape(name), (b, g + r, q, k))
    return of


_NAMES = (
    "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
)  # fmt: skip


def _op(name: str) -> Any:
    return getattr(aten, f"_scaled_dot_product_{name}").default


RULES: Rules = {
    **{_op(name): Rule(attended) for name in _NAMES},
    **{_op(f"{name}_backward"): Rule(attended_back) for name in _NAMES},
}
