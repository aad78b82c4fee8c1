"""flops: the floating-point operations of a call, of matrix products, convolutions, attention and layers over time.

Of other ops the time is that of the bytes that they move (`step_time`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import fx

from fzero.cost.tensor_cores import Product
from fzero.ir import fx_nodes, fx_values, op_info
from fzero.ir.scan_op import SCAN, body_of
from fzero.recurrent import recurrent_ops as recurrent

Formula = Callable[[fx.Node], int]


def flops(node: fx.Node) -> int:
    """Floating-point operations of a call, by its op's row; 0 where the row has no formula (`OpInfo.flops`)."""
    formula = op_info.of(node.target).flops
    return formula(node) if formula is not None else 0


def product_of(node: fx.Node) -> Product | None:
    """The matrix product that a call is; None for another call, and for products with scales."""
    if op_info.of(node.target).flops is not _product:
        return None
    left, right = _factors(node)
    *batch, rows, inner = left.shape
    return Product(prod(batch), rows, int(right.shape[-1]), inner, left.element_size())


def operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the arguments, in order; an argument that comes twice is there twice."""
    nodes: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), nodes.append)
    return [x for n in nodes for x in fx_values.tensors(n.meta.get("val"))]


def results(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the result; of an op that returns nothing, those that it writes to."""
    written = (n.meta.get("val") for n in fx_nodes.mutated(node))
    return fx_values.tensors(node.meta.get("val")) or [x for value in written for x in fx_values.tensors(value)]


def _factors(node: fx.Node) -> list[torch.Tensor]:
    """The last two operands before `out`."""
    return operands(node)[-2:] if "out" not in node.kwargs else operands(node)[-3:-1]


def _product(node: fx.Node) -> int:
    left, right = _factors(node)
    return 2 * left.numel() * int(right.shape[-1])


def _scaled_product(node: fx.Node) -> int:
    left, right = operands(node)[:2]
    return 2 * left.numel() * int(right.shape[-1])


def _convolution(node: fx.Node) -> int:
    return 2 * _through(operands(node)[1], results(node)[0])


def _convolution_backward(node: fx.Node) -> int:
    return 4 * _through(operands(node)[2], operands(node)[0])


def _through(weight: torch.Tensor, result: torch.Tensor) -> int:
    """Multiplications of a convolution: for each element of the result, a filter."""
    return result.numel() * weight.numel() // max(weight.shape[0], 1)


def _attention(node: fx.Node) -> int:
    query, key = operands(node)[:2]
    return 4 * query.numel() * int(key.shape[-2]) // (2 if _is_causal(node) else 1)


def _attention_backward(node: fx.Node) -> int:
    query, key = operands(node)[1:3]
    return 10 * query.numel() * int(key.shape[-2]) // (2 if _is_causal(node) else 1)


def _is_causal(node: fx.Node) -> bool:
    """Whether a query sees the keys up to its own place alone: half of them."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("is_causal", False))


def _recurrent(node: fx.Node) -> int:
    return recurrent.flops(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))


def _recurrent_backward(node: fx.Node) -> int:
    return 2 * recurrent.flops(*fx.node.map_arg(node.args[5:], lambda n: n.meta["val"]))


def _scan(node: fx.Node) -> int:
    body = body_of(node.args[3])  # type: ignore[arg-type]
    return int(node.args[4]) * sum(flops(n) for n in body.graph.nodes if fx_nodes.is_compute(n))  # type: ignore[arg-type]


_FUSED = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
_MATH = ("attention_math", "attention_math_for_mps")
op_info.fill(
    "flops",
    {
        **{f"aten.{name}": _product for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm")},
        "aten._scaled_mm": _scaled_product,
        **{f"fzero.{way}_{x}": _product for way in ("onednn", "widened") for x in ("mm", "bmm", "addmm", "baddbmm")},
        "aten.convolution": _convolution,
        "aten.convolution_backward": _convolution_backward,
        **{f"aten._scaled_dot_product_{name}": _attention for name in (*_FUSED, *_MATH)},
        **{f"aten._scaled_dot_product_{name}_backward": _attention_backward for name in _FUSED},
        recurrent.FORWARD: _recurrent,
        recurrent.BACKWARD: _recurrent_backward,
        SCAN: _scan,
    },
)
op_info.fill(
    "attends",
    {
        f"aten._scaled_dot_product_{name}{way}": True
        for name in (*_FUSED, *_MATH)
        for way in ("", "_backward")
        if not (way and name in _MATH)
    },
)
