"""varying: the values of a captured step that may differ between ranks."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence

from torch import fx

from fzero.capture.graph import Graph
from fzero.capture.provenance import describe
from fzero.capture.step_ops import AXIS_INDEX, CODED_MEAN, EQUAL, FED_MEAN, REDUCE, REGION
from fzero.errors import CaptureError, leaf_name
from fzero.ir import fx_nodes

log = logging.getLogger("fzero")


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
                "batch without a reduction. Reduce it with fzero.pmean or fzero.coded_mean (as gradients of "
                "value_and_grad(reduce=False) are to be), or keep one per rank with fzero.per_rank"
            )
    return tuple(name for name, node in zip(graph.metric_names, outs[num:], strict=True) if node in varying)


def without_equal(graph: Graph, per_rank: Sequence[str]) -> None:
    """Takes out the nodes of `fzero::equal`, whose operand is the same on all ranks. In place.

    Raises CaptureError for one whose operand may differ.
    """
    nodes = [node for node in graph.gm.graph.nodes if node.target is EQUAL]
    varying = varying_nodes(graph, per_rank) if nodes else set()
    for node in nodes:
        value = node.all_input_nodes[0]
        if value in varying:
            raise CaptureError(
                f"fzero.pmean of {describe(node.meta['val'])} at {node.meta.get('source') or 'the step'}: it may "
                "differ between ranks, and integers have no mean in their dtype. Use fzero.psum or fzero.pmax, or cast "
                "it: fzero.pmean(x.float())"
            )
        node.replace_all_uses_with(value)
        graph.gm.graph.erase_node(node)
    graph.gm.recompile()


def warn_of_whole(graph: Graph, per_rank: Sequence[str]) -> None:
    """Warns of what a loss gets beside a batch that microbatches split: as many rows of this rank's, and all of them.

    A loss may mean that, and shapes that fit by chance (one row in a microbatch, which broadcasts) are no error.
    """
    nodes = [n for n in graph.gm.graph.nodes if n.target is REGION and graph.regions[n.args[1]].microbatches > 1]
    varying = varying_nodes(graph, per_rank) if nodes else set()
    for node in nodes:
        region = graph.regions[node.args[1]]
        given = list(zip(node.args[0], region.sliced, strict=True))
        rows = {one.meta["val"].shape[0] for one, cut in given if cut}
        for one, cut in given:
            value = one.meta["val"]
            if one in varying and not cut and value.ndim and value.shape[0] in rows:
                log.warning(
                    "fzero: the loss at %s is given %s of this rank's rows%s: microbatches=%d do not split it, and "
                    "each sees all its rows. Put it into the batch that the loss gets: {**batch, 'name': x}",
                    region.source, describe(value), f", made at {s}" if (s := one.meta.get("source")) else "",
                    region.microbatches,
                )  # fmt: skip


def varying_nodes(graph: Graph, per_rank: Sequence[str]) -> set[fx.Node]:
    """The nodes whose value may differ between ranks.

    Such a value depends on the batch, on the rank's place or on a leaf in `per_rank`, without a reduction in between.
    Of a region that is told for each of its outputs.
    """
    inputs = fx_nodes.placeholders(graph.gm.graph)
    num = len(graph.state_paths)
    varying = {n for path, n in zip(graph.state_paths, inputs, strict=False) if path in per_rank}
    varying |= set(inputs[num : num + len(graph.batch_paths)])
    within: dict[fx.Node, list[bool]] = {}  # by region, of each of its outputs
    for node in graph.gm.graph.nodes:
        if node.op != "call_function" or node.target is REDUCE:
            continue
        operands = node.all_input_nodes
        if node.target is REGION:
            within[node] = _varying_outputs(graph, node, varying)
        if node.target is operator.getitem and operands[0].target is REGION:
            if within[operands[0]][int(str(node.args[1]))]:
                varying.add(node)
            continue
        coded = node.target is operator.getitem and fx_nodes.operand(node).target in (CODED_MEAN, FED_MEAN)
        if coded and node.args[1] == 0:
            continue  # the mean; what follows it are errors, of each rank its own
        if node.target in (AXIS_INDEX, CODED_MEAN, FED_MEAN) or any(operand in varying for operand in operands):
            varying.add(node)
    return varying


def _varying_outputs(graph: Graph, region: fx.Node, varying: set[fx.Node]) -> list[bool]:
    """Of each output of a region, whether it depends on an input that may differ between ranks."""
    gm = graph.regions[region.args[1]].gm  # type: ignore[index]
    inputs = zip(fx_nodes.placeholders(gm.graph), region.args[0], strict=True)  # type: ignore[arg-type]
    found = {own for own, given in inputs if given in varying}
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return [out in found for out in fx_nodes.outputs(gm.graph)]
