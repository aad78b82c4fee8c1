"""leaf_like: which values of a step are like a leaf of the state: made of it elementwise, and the same on all ranks.

Such a value lies as its leaf does. SAM's perturbed parameters do, an average that a loss reads before it is kept, and
the gradients for them.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import fx

from fzero.capture.graph import Graph
from fzero.capture.step_ops import REDUCE, REGION
from fzero.capture.varying import varying_nodes
from fzero.ir import fx_nodes

Place = TypeVar("Place", bound=Hashable)


def leaf_like(
    graph: Graph, gm: fx.GraphModule, per_rank: Sequence[str], places: Sequence[Place | None]
) -> dict[fx.Node, Place]:
    """The leaves of the step's outer graph `gm`, and the values that are like one, with its place.

    per_rank: paths of leaves of which each rank has its own. places: of each leaf of the state, equal for leaves that
    lie beside one another; None of one that lies nowhere.
    """
    varying = varying_nodes(replace(graph, gm=gm), per_rank)
    leaves = {node: place for node, place in zip(fx_nodes.placeholders(gm.graph), places, strict=False) if place}
    shapes = {place: node.meta["val"].shape for node, place in leaves.items()}
    found: dict[fx.Node, Place] = dict(leaves)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node in varying:
            continue
        of = {found[a] for a in _made_of(graph, node) if a in found}
        value = node.meta["val"]
        if len(of) == 1 and (not isinstance(value, torch.Tensor) or value.shape == shapes[next(iter(of))]):
            found[node] = of.pop()
    return found


def _made_of(graph: Graph, node: fx.Node) -> Sequence[fx.Node]:
    """The values that a value is like if they are like a leaf: of a gradient, what it is the gradient for."""
    if node.target is operator.getitem or fx_nodes.is_pointwise(node):
        return node.all_input_nodes
    source = fx_nodes.operand(node) if node.target is REDUCE else node
    if source.target is not operator.getitem or fx_nodes.operand(source).target is not REGION:
        return ()
    call = fx_nodes.operand(source)
    region, number = graph.regions[int(str(call.args[1]))], int(str(source.args[1])) - 1
    inputs: list[fx.Node] = list(call.args[0])  # type: ignore[arg-type]
    return [inputs[region.grad_of[number]]] if 0 <= number < len(region.grad_of) else ()
