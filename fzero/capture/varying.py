"""varying: the values of a captured step that may differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fzero.capture.graph import Graph
from fzero.capture.ops import AXIS_INDEX, REDUCE
from fzero.errors import CaptureError, leaf_name
from fzero.ir import fx_nodes


def varying_metrics(graph: Graph, per_rank: Sequence[str]) -> tuple[str, ...]:
    """The names of the metrics that may differ between ranks.

    Raises CaptureError for a leaf of the state that may and is not among `per_rank` (paths of leaves).
    """
    varying = varying_nodes(graph, per_rank)
    outs = fx_nodes.outputs(graph.gm.graph)
    num = len(graph.state_paths)
    for path, node in zip(graph.state_paths, outs[:num], strict=True):
        if node in varying and path not in per_rank:
            where = node.meta.get("source") or "the step"
            raise CaptureError(
                f"{leaf_name('state', path)} would differ between ranks: it is computed at {where} from this rank's "
                "batch without a reduction. Reduce it with fzero.pmean, or keep one per rank with fzero.per_rank"
            )
    return tuple(name for name, node in zip(graph.metric_names, outs[num:], strict=True) if node in varying)


def varying_nodes(graph: Graph, per_rank: Sequence[str]) -> set[fx.Node]:
    """The nodes whose value may differ between ranks.

    Such a value depends on the batch, on the rank's place or on a leaf in `per_rank`, without a reduction in between.
    """
    inputs = fx_nodes.placeholders(graph.gm.graph)
    num = len(graph.state_paths)
    varying = {n for path, n in zip(graph.state_paths, inputs, strict=False) if path in per_rank}
    varying |= set(inputs[num : num + len(graph.batch_paths)])
    for node in graph.gm.graph.nodes:
        if node.op != "call_function" or node.target is REDUCE:
            continue
        index = node.target is AXIS_INDEX
        if index or any(argument in varying for argument in node.all_input_nodes):
            varying.add(node)
    return varying
