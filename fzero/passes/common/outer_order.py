"""outer_order: in which order the nodes of an outer run come: levels, groups that work on one bucket, what may wait.

Nodes of one kind and level are independent of one another. In a level full work comes first, then flat, owned, sums. A
node that needs a result which comes later waits for the next level. Flat work is as late as its first user allows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.ir.program import Program
from fzero.passes.common.outer_run import OuterRun, is_scalar
from fzero.plan.whole_leaves import is_whole


def into_levels(run: OuterRun) -> None:
    """Fills `level`; in `nodes`, in order, short chains may appear again."""
    _place(run)
    _repeat(run)


def _place(run: OuterRun) -> None:
    """Fills `level`."""
    for node in run.nodes:
        ready = 0
        for a in node.all_input_nodes:
            if a not in run.level:
                continue
            ready = max(ready, run.level[a] + _is_late(run, a, node))
        run.level[node] = ready
    for node in reversed(run.nodes):  # as late as its first user allows: then it need not be stored
        if node in run.slot_key:
            needed = [run.level[u] - _is_late(run, node, u) for u in node.users if u in run.level]
            run.level[node] = max(run.level[node], min(needed, default=0))
    for node in run.nodes:
        if node.target is operator.getitem and fx_nodes.operand(node) in run.level:
            run.level[node] = run.level[fx_nodes.operand(node)]  # a tuple has no column


def _repeat(run: OuterRun) -> None:
    """A short elementwise chain on what is stored anyway (a gradient over a count) is computed again at a later
    level, instead of kept from an earlier one. So it is for what needs all of it, at a level with sums: what is
    gathered may wait until these are known."""
    short: dict[fx.Node, int] = {}
    for node in run.nodes:
        flat = [a for a in node.all_input_nodes if a in run.slot_key]
        depth = 1 + max((short.get(a, 4) if a in run.level else 0 for a in flat), default=4)
        elementwise = node in run.slot_key and node not in run.owned
        if elementwise and isinstance(node.meta["val"], torch.Tensor) and depth <= 4:
            short[node] = depth
    copies: dict[fx.Node, list[fx.Node]] = {}
    summed = {run.level[node] for node in run.partial}

    def again(node: fx.Node, users: list[fx.Node], level: int) -> None:
        with run.gm.graph.inserting_after(node):
            copy = fx_nodes.copy_node(run.gm.graph, node, lambda n: n)
        run.level[copy], run.slot_key[copy] = level, run.slot_key[node]
        run.block_size[copy] = run.block_size[node]
        for user in users:
            user.replace_input_with(node, copy)
        copies.setdefault(node, []).insert(0, copy)

    for node in reversed(run.nodes):
        later = {run.level[u] for u in node.users if u in run.slot_key and run.level[u] > run.level[node]}
        for level in sorted(later) if node in short else ():
            again(node, [u for u in node.users if u in run.slot_key and run.level.get(u) == level], level)
        whole = [u for u in node.users if u in run.level and _is_late(run, node, u) and u not in run.partial]
        here = any(run.level.get(u) == run.level[node] for u in node.users if u not in whole)
        if node in short and whole and here and run.level[node] in summed:
            again(node, whole, run.level[node])
    run.nodes = [repeated for node in run.nodes for repeated in (node, *copies.get(node, ()))]


def _is_late(run: OuterRun, node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` cannot be of the level of `node`: in a level full work is first, then flat, leaves, sums."""
    if node in run.partial or user in run.partial:
        return node in run.partial
    return node in run.owned or (node in run.slot_key and user not in run.slot_key)


def by_bucket(run: OuterRun, nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Full nodes in groups that need nothing of one another: those that work on leaves of one bucket. A node that
    works on leaves of several is of that with the largest. Scalars that need none of the others (a step's number)
    come first, and join no groups."""
    given, first = set(nodes), dict[fx.Node, None]()
    for node in nodes:
        kept = node in run.dest and run.slot_key_of(run.dest[node])
        of_leaf = kept or any(a in run.slot_key for a in node.all_input_nodes)
        if is_scalar(node) and not of_leaf and all(a in first or a not in given for a in node.all_input_nodes):
            first[node] = None
    parent = {node: node for node in nodes if node not in first}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    largest: dict[fx.Node, tuple[int, str]] = {}
    for node in parent:
        for a in node.all_input_nodes:
            if a in parent:
                parent[root(a)] = root(node)
    for node in parent:
        keys = [run.slot_key[a] for a in node.all_input_nodes if a in run.slot_key]
        keys += [key for key in [run.slot_key_of(run.dest[node])] if key] if node in run.dest else []
        keys += [run.cut[node]] if node in run.cut else []
        sizes = [(math.prod(run.program.buckets[key.bucket].place(key.slot)[2]), key.bucket) for key in keys]
        largest[root(node)] = max([largest.get(root(node), (0, "")), *sizes])
    groups: dict[str, list[fx.Node]] = {"": [*first]}
    for node in parent:
        groups.setdefault(largest[root(node)][1], []).append(node)
    return [group for group in groups.values() if group]


def updates_slices(program: Program, bucket: str) -> bool:
    """Whether each rank updates its own slice of a bucket."""
    return program.is_shared(bucket) and program.buckets[bucket].updates_slices


def only_gathered(run: OuterRun, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Of the flat nodes of a level, those that are needed for values alone of which all is gathered."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        users = [u for u in node.users if u in run.level]
        if users and node not in run.dest and all(u in found or _is_gathered_for(run, node, u) for u in users):
            found.add(node)
    of_others = {n for n in found if n.target is operator.getitem and fx_nodes.operand(n) in {*nodes} - found}
    return found - of_others  # a tuple has no column


def _is_gathered_for(run: OuterRun, node: fx.Node, user: fx.Node) -> bool:
    """Whether a user of a flat value needs more of it than the own slice."""
    name, index = run.slot_key[node]
    if user in run.partial or (user in run.slot_key and user not in run.owned) or not updates_slices(run.program, name):
        return False
    bucket = run.program.buckets[name]
    return user not in run.owned or not is_whole(bucket, index, run.program.mesh.size(bucket.axis))
