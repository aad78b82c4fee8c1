"""cast_first: a cast of a view of all of an input becomes a view of the input's cast.

Under autocast a product casts what it reads: of `x @ w.t()` the view `t(w)`. A program casts a parameter on its shard,
before the gather (`passes/cast_before_gather`), if its uses begin with the cast. The bits are the same.

    t = t(w);  c = bf16(t);  y = mm(x, c)        becomes   c = bf16(w);  t = t(c);  y = mm(x, t)
"""

from __future__ import annotations

import torch
from torch import fx

from fzero.ir import fx_nodes, fx_values

CAST = torch.ops.aten._to_copy.default


def cast_first(gm: fx.GraphModule, inputs: list[fx.Node]) -> None:
    """Moves such casts of these placeholders, where the result lies in memory as the view does. In place."""
    for node in list(gm.graph.nodes):
        if not is_cast(node) or fx_nodes.base(node.args[0]) not in inputs or node.args[0] in inputs:
            continue
        chain = _views(fx_nodes.operand(node), node.meta["val"])
        if chain is None:
            continue
        dtype, holder = node.kwargs["dtype"], fx_nodes.base(node.args[0])
        with gm.graph.inserting_before(node):
            value = gm.graph.call_function(CAST, (holder,), {"dtype": dtype})
            value.meta = {**node.meta, "val": _as(holder.meta["val"], dtype)}
            for view in chain:
                value = fx_nodes.copy_node(gm.graph, view, {view.all_input_nodes[0]: value}.__getitem__)
                value.meta = {**view.meta, "val": _as(view.meta["val"], dtype)}
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    fx_nodes.drop_dead(gm.graph)
    gm.recompile()


def is_cast(node: fx.Node) -> bool:
    """Whether a node casts a tensor to another dtype and does nothing else."""
    return node.target is CAST and set(node.kwargs) == {"dtype"}


def _views(node: fx.Node, cast: torch.Tensor) -> list[fx.Node] | None:
    """The views from a placeholder to `node`, in order. None where one leaves elements out or reads them as another
    dtype, or where the cast of `node` lies in memory in another way."""
    if fx_values.steps(node.meta["val"]) != fx_values.steps(cast):
        return None
    chain: list[fx.Node] = []
    while fx_nodes.is_compute(node):
        source = fx_nodes.operand(node)
        values = [n.meta["val"] for n in (source, node)]
        plain = all(isinstance(value, torch.Tensor) for value in values) and node.all_input_nodes == [source]
        if not plain or len({(value.dtype, value.numel()) for value in values}) > 1:
            return None
        chain.append(node)
        node = source
    return chain[::-1]


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fake tensor in another dtype, of the same strides."""
    with fx_values.mode_of(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
