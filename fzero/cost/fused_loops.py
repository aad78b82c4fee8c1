"""fused_loops: the work of a segment whose loops over elements run fused, as `Spec(compile=)` has them.

A run of loops between two other calls is one kernel. It reads what comes from outside, and writes what is read outside.
That is roughly what a device runs: its own clusters (`fzero.codegen.fusion`) are of a program that is lowered there,
and a plan is made where there is no device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx

from fzero.cost.node_work import CallWork, in_memory, work_of
from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.op_info import of


def fused_works(gm: fx.GraphModule) -> Sequence[CallWork]:
    """What each call of a segment does, with its loops fused. It is computed once (`segments.notes`)."""
    notes = segments.notes(gm)
    if "fused_loops" not in notes:
        notes["fused_loops"] = [_kernel(run) if _is_loop(run) else work_of(run[0]) for run in _runs(gm.graph)]
    found: Sequence[CallWork] = notes["fused_loops"]
    return found


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The runs of loops with nothing between them that computes, and each other call by itself."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if not fx_nodes.is_compute(node) or fx_nodes.is_view(node):
            continue
        source = fx_nodes.operand(node) if node.target is operator.getitem else node
        if fx_nodes.is_compute(source) and of(source.target).fusion:
            run.append(node)
        elif node.target is not operator.getitem:
            if run:
                yield run
            yield [node]
            run = []
    if run:
        yield run


def _is_loop(run: Sequence[fx.Node]) -> bool:
    return len(run) > 1 or run[0].target is operator.getitem  # a result that is read behind another call


def _kernel(run: Sequence[fx.Node]) -> CallWork:
    """The kernel of a whole run."""
    inside, sources, written = set(run), dict[fx.Node, int](), 0
    for node in run:
        over = fx_nodes.mutated(node)
        for given in node.all_input_nodes:
            source = given
            while source not in inside and fx_nodes.is_view(source):
                source = fx_nodes.operand(source)
            if source not in inside and not (given in over and fx_nodes.op_name(node) == "copy_"):
                sources.setdefault(source, _size(given))
        several = isinstance(node.meta.get("val"), tuple)  # each has a node of its own
        if over:
            written += sum(map(_size, over))
        elif not several and _leaves(node, inside):
            written += _size(node)
    return CallWork("cluster", 1, sum(sources.values()), written)


def _size(node: fx.Node) -> int:
    return sum(map(in_memory, fx_values.tensors(node.meta.get("val"))))


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    outside = [user for user in node.users if user not in inside]
    return any(not fx_nodes.is_view(user) or _leaves(user, inside) for user in outside)
