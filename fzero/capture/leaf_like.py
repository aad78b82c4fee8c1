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
from fzero.capture.provenance import describe
from fzero.capture.step_ops import REDUCE, REGION
from fzero.capture.varying import varying_nodes
from fzero.errors import CaptureError, leaf_name
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


def refuse_cut_leaves(graph: Graph, per_rank: Sequence[str]) -> None:
    """Raises CaptureError where microbatches split a leaf that all ranks share, or a value like it, as a batch."""
    calls = [node for node in graph.gm.graph.nodes if node.target is REGION]
    if all(region.microbatches == 1 for region in graph.regions):
        return
    shared = leaf_like(graph, graph.gm, per_rank, [None if path in per_rank else path for path in graph.state_paths])
    for region, inputs in ((graph.regions[node.args[1]], node.args[0]) for node in calls):
        for one, cut in zip(inputs, region.sliced, strict=True):
            if cut and one in shared:
                name = leaf_name("state", shared[one])
                raise CaptureError(
                    f"microbatches={region.microbatches} split an argument of the loss at {region.source} along dim 0, "
                    f"and it holds {name}, {describe(one.meta['val'])}, or what is made of it, which all ranks share. "
                    "Say which argument is the batch, as fzero.value_and_grad(loss, batch_argnum=2); data that the "
                    "state holds, of which each rank has its own, are fzero.per_rank(x)"
                )


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
