"""coded_sums: sums over the ranks of an axis that cuts dims, as messages of blocks (`fzero.kernels.codecs`).

all-reduce of x, an addend of each rank              reduce-scatter of x
    encode(x)  -> all-to-all of messages                 the same
    decode_sum -> this rank's part of the sum            the same: its part
    encode     -> all-gather -> decode                   -

Ranks are added in their order in float32. What is small stays as it is: a value without rows of a whole block, such as
the maximum and the sum of a row of logits, or the gradient of a norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes, segments
from fzero.ir.code_ops import OPS, CodeOps
from fzero.kernels.codecs import BLOCK
from fzero.shard.ops import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

aten = torch.ops.aten
CODABLE = (torch.float32, torch.bfloat16, torch.float16)


def coded_sums(gm: fx.GraphModule, codec: str) -> fx.GraphModule:
    """The graph of a rank's region with its sums in this codec: itself where there are none."""
    if not any(map(_is_long, gm.graph.nodes)):
        return gm
    graph = segments.copied(gm.graph)
    for node in [node for node in graph.nodes if _is_long(node)]:
        with graph.inserting_before(node):
            result = _written(graph, node, OPS[codec])
        node.replace_all_uses_with(result)
    return segments.module(graph)


def coded_bytes(gm: fx.GraphModule, codec: str) -> dict[tuple[str, str], float]:
    """Of each sum of a rank's region that `coded_sums` writes, by its axis and its reason: what a rank then sends."""
    sent = {}
    for node in filter(_is_long, gm.graph.nodes):
        n = int(str(node.args[2]))
        _, length = _lengths(node)
        rounds = 1 if node.target is REDUCE_SCATTER else 2 / n
        sent[str(node.args[1]), str(node.meta.get("moved"))] = float(rounds * (n - 1) * length / OPS[codec].per)
    return sent


def _lengths(node: fx.Node) -> tuple[int, int]:
    """The elements of what is padded to whole blocks, of one rank where the sum is scattered; and with the padding."""
    value, n = fx_nodes.operand(node).meta["val"], int(str(node.args[2]))
    scatters = node.target is REDUCE_SCATTER
    size = value.numel() // n if scatters else value.numel()
    return size, -(-size // BLOCK) * BLOCK if scatters else -(-size // (n * BLOCK)) * n * BLOCK


def _is_long(node: fx.Node) -> bool:
    """Whether a node is the sum of a value with rows of whole blocks."""
    if node.target is not REDUCE_SCATTER and not (node.target is ALL_REDUCE and node.args[3] == "sum"):
        return False
    value = fx_nodes.operand(node).meta["val"]
    return value.dtype in CODABLE and value.ndim > 1 and value.shape[-1] >= BLOCK


def _written(graph: fx.Graph, node: fx.Node, ops: CodeOps) -> fx.Node:
    """The nodes that are one sum."""
    like = node.meta["val"]
    axis, n = str(node.args[1]), int(str(node.args[2]))
    scatters = node.target is REDUCE_SCATTER
    at = fx_nodes.operand(node)

    def then(target: Any, *args: Any) -> None:
        nonlocal at
        result = target(at.meta["val"], *args)
        at = graph.call_function(target, (at, *args))
        at.meta = {**node.meta, "val": result}
        if target not in (ALL_TO_ALL, ALL_GATHER):
            at.meta.pop("moved", None)

    size, length = _lengths(node)
    message = int((n * length if scatters else length) / ops.per)
    then(aten.view.default, [n, size] if scatters else [size])
    if length > size:
        then(aten.constant_pad_nd.default, [0, length - size])
    then(ops.encode)
    then(ALL_TO_ALL, axis, n, [n, message // n])
    then(ops.decode_sum, 1)
    if not scatters:
        then(ops.encode)
        then(ALL_GATHER, axis, n, [message])
        then(ops.decode)
    if length > size:
        then(aten.slice.Tensor, 0, 0, size)
    then(aten.view.default, list(like.shape))
    if like.dtype is not torch.float32:
        then(aten._to_copy.default)
        at.kwargs, at.meta["val"] = {"dtype": like.dtype}, like
    return at
