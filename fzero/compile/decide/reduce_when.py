"""reduce_when: whether the gradients of microbatches are reduced each, or their sum at the end: from the graph alone.

The two are other sums, with other bits. So the choice looks at nothing of which it is promised that it changes no bit:
stages, homes, prefetch, remat, transfers, the order of a pipeline's work. "end" sends least. A rank then holds whole
gradients, of which it would else keep a share. That is compared with what a rank holds at the least, at stage 3: the
values that one microbatch keeps for its backward, and a share of the state.
"""

from __future__ import annotations

import math

from torch import fx

from fzero.capture.graph import Graph, Region
from fzero.ir import fx_nodes, fx_values
from fzero.ir.decisions import Choice
from fzero.plan.state_plan import Plan

MORE = 0.1  # "end" may hold this part more


def reduce_by_bytes(graph: Graph, plan: Plan) -> Choice[str]:
    """Returns "end" or "each". graph: of one rank of all axes that cut dims."""
    whole = sum(_nbytes(value) for region in graph.regions for value in _gradients(region))
    more = whole - whole // plan.data_ranks
    kept = max(_kept_bytes(region) for region in graph.regions)
    state = sum(math.prod(leaf.local_shape) * leaf.dtype.itemsize for leaf in plan.leaves) // plan.data_ranks
    how = "end" if more <= MORE * (kept + state) else "each"
    reason = (
        f"reduce={how!r}: whole gradients would be {more / 1e9:.3g} GB more on a rank, beside {kept / 1e9:.3g} GB that "
        f"a microbatch keeps for its backward and {state / 1e9:.3g} GB of state at stage 3. Spec(reduce=...) chooses "
        "otherwise"
    )
    if how == "each" and not any(bucket.updates_slices for bucket in plan.buckets.values()):
        parts = max(region.microbatches for region in graph.regions)
        reason += f". At this stage reduce='end' sends {parts} times fewer bytes, and needs no more memory"
    return Choice.least({"end": float(more), "each": 0.0}, how, reason, "bytes of whole gradients")


def _gradients(region: Region) -> list[object]:
    return list(region.values[1 : 1 + len(region.grad_of)])


def _kept_bytes(region: Region) -> int:
    """The bytes of the forward's values, parameters and inputs aside, that the backward reads."""
    kept: set[fx.Node] = set()
    for node in region.gm.graph.nodes:
        if node.meta.get("phase") == "backward":
            kept |= {fx_nodes.base(x) for x in node.all_input_nodes}
    return sum(
        _nbytes(node.meta.get("val"))
        for node in kept
        if fx_nodes.is_compute(node) and node.meta.get("phase") != "backward"
    )


def _nbytes(value: object) -> int:
    return sum(x.numel() * x.element_size() for x in fx_values.tensors(value))
