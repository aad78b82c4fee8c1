"""What the fused ops of CUDA compute, in plain torch on the CPU, and random calls of them.

`REFERENCES[op]` is called in the op's place. The backwards use the saved output and logsumexp, as the kernels do.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
NAMES = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")


def named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {a.name: v for a, v in zip(op._schema.arguments, args, strict=False)} | kwargs
    return {a.name: a.default_value for a in op._schema.arguments} | given


def scores(a: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The scaled, masked scores, and k and v with a head for each head of q."""
    q, k, v = a["query"], a["key"], a["value"]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if a.get("attn_bias") is not None:
        s = s + a["attn_bias"]
    return s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), -torch.inf) if a["is_causal"] else s, k, v


def forward(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    a = named(op, args, kwargs)
    s, _, v = scores(a)
    rest = [torch.zeros(0) if "Tensor" in str(r.type) else 0 for r in op._schema.returns[2:]]
    return s.softmax(-1) @ v, s.logsumexp(-1), *rest


def backward(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    a = named(op, args, kwargs)
    grad = a.get("grad_out", a.get("grad_out_"))
    s, k, v = scores(a)
    p = (s - a["logsumexp"].unsqueeze(-1)).exp()
    ds = p * (grad @ v.transpose(-1, -2) - (grad * a["out"]).sum(-1, keepdim=True))
    scale, heads = a["query"].shape[-1] ** -0.5, a["key"].shape[1]
    dk, dv = ds.transpose(-1, -2) @ a["query"] * scale, p.transpose(-1, -2) @ grad
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    bias = a.get("attn_bias")
    grads = (ds @ k * scale, dk, dv, None if bias is None else ds.sum_to_size(bias.shape))
    return grads[: len(op._schema.returns)]


def rms_norm_backward(op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    grad, x, _, rstd, weight, _ = args
    normal, own = x * rstd, grad * weight
    return rstd * (own - normal * (own * normal).mean(-1, keepdim=True)), (grad * normal).flatten(0, -2).sum(0)


def attention(op: Any, d: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with grouped heads; causal, or with a bias that is broadcast, where the op takes one."""
    d.fixed(b=d.choice((1, 2, 6)), g=d.choice((2, 3, 6)), r=d.choice((1, 2)), q=6, k=6, e=4)
    d.of["h"] = d.of["g"] * d.of["r"]
    bias = d.choice((None, "bhqk", "b1qk", "1hqk", "11qk")) if "attn_bias" in named(op, (), {}) else None
    known: dict[str, Any] = {"query": d.x("bhqe"), "key": d.x("bgke"), "value": d.x("bgke"), "dropout_p": 0.0}
    known |= {"is_causal": bias is None and d.random() < 0.5, "attn_bias": None if bias is None else d.x(bias)}
    known["out"], known["logsumexp"], *_ = forward(op, **known)
    known |= {"grad_out": d.x("bhqe"), "compute_log_sumexp": True, "grad_input_mask": [True] * 4}
    known["grad_out_"] = known["grad_out"]
    spare = {"Tensor": torch.zeros(0), "int": 0, "bool": False}
    arguments = [a for a in op._schema.arguments if not a.kwarg_only]
    return tuple(known.get(a.name, spare.get(str(a.type))) for a in arguments), {}


REFERENCES: dict[Any, Callable[..., Any]] = {aten._fused_rms_norm_backward.default: rms_norm_backward}
ATTENTIONS: dict[Any, Callable[..., Any]] = {}
for _name in NAMES:
    for _op, _run in (
        (getattr(aten, f"_scaled_dot_product_{_name}").default, forward),
        (getattr(aten, f"_scaled_dot_product_{_name}_backward").default, backward),
    ):
        REFERENCES[_op] = _run
        ATTENTIONS[_op] = functools.partial(attention, _op)
REFERENCES = {op: functools.partial(run, op) for op, run in REFERENCES.items()}
