"""neighbours: loops over elements move next to the loops that they read, or that read them.

In the order in which a step was captured, matrix products lie between loops that belong together. On a device such a
loop is a pass over memory of its own. So before the stretches of a segment are taken,

    down   a loop moves to its first reader, where that is a loop:        silu(g); u = mm(..); mul(silu, u)
    up     a loop moves to the last loop that it reads, and takes along   d = mul(..); mm(d, w); mul(d, sigmoid(g))
           what else it reads and nothing else does

where no more memory is held for it: downwards what it reads longer is not larger than what it makes; upwards what it
makes is not larger than what ends there, or is small.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import fx

from fzero.codegen.workspace_parts import result_bytes
from fzero.ir import fx_nodes

SMALL = 8  # a result of so many times fewer bytes than what is read counts nothing
Test = Callable[[fx.Node], bool]


def gather(graph: fx.Graph, is_loop: Test) -> None:
    """Moves loops in place. Every node keeps what it reads; what writes to memory does not move."""
    for node in list(reversed(graph.nodes)):
        if _may_move(node, is_loop):
            _down(node, is_loop)
    for node in list(graph.nodes):
        if _may_move(node, is_loop):
            _up(node, is_loop)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, through views."""
    for user in node.users:
        if fx_nodes.is_view(user):
            yield from readers(user)
        else:
            yield user


def _may_move(node: fx.Node, is_loop: Test) -> bool:
    """Whether a node computes one value in memory of its own."""
    own = node.target is not operator.getitem and not fx_nodes.mutated(node)
    return is_loop(node) and own and isinstance(node.meta.get("val"), torch.Tensor)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes behind the one and before the other."""
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def _is_barred(nodes: Sequence[fx.Node], is_loop: Test) -> bool:
    """Whether a node is among them that no stretch goes over."""
    return any(fx_nodes.is_compute(n) and not fx_nodes.is_view(n) and not is_loop(n) for n in nodes)


def _writes_to(nodes: Sequence[fx.Node], read: Collection[fx.Node]) -> bool:
    """Whether one of the nodes writes to memory that is read."""
    return any(fx_nodes.base(into) in read for node in nodes for into in fx_nodes.mutated(node))


def _down(node: fx.Node, is_loop: Test) -> None:
    first = min(readers(node), default=None)
    if first is None or not is_loop(first):
        return
    between = _between(node, first)
    owners = {fx_nodes.base(operand) for operand in node.all_input_nodes}
    longer = sum(result_bytes(owner) for owner in owners if owner.op != "placeholder" and max(readers(owner)) < first)
    if not _is_barred(between, is_loop) or longer > result_bytes(node) or _writes_to(between, owners):
        return
    moved = {node}
    first.prepend(node)
    for view in between:  # those of the value, which are read behind the reader too
        if fx_nodes.is_view(view) and fx_nodes.operand(view) in moved:
            moved.add(view)
            first.prepend(view)


def _up(node: fx.Node, is_loop: Test) -> None:
    loops = {fx_nodes.base(operand) for operand in node.all_input_nodes}
    for place in sorted(made for made in loops if made.op != "placeholder" and is_loop(made)):
        between = _between(place, node)
        if not _is_barred(between, is_loop):
            continue  # beside it
        moved: dict[fx.Node, None] = {}
        if not _take(node, place, is_loop, moved):
            continue
        others = [one for one in moved if one is not node and not fx_nodes.is_view(one)]
        alone = all(reader in moved for one in others for reader in readers(one))
        ends = all(reader in moved for reader in readers(place)) and result_bytes(node) <= result_bytes(place)
        owners = {fx_nodes.base(operand) for one in moved for operand in one.all_input_nodes}
        small = result_bytes(node) * SMALL <= result_bytes(place)
        if alone and (ends or small) and not _writes_to(between, owners):
            for one in reversed(moved):
                place.append(one)
            return


def _take(node: fx.Node, place: fx.Node, is_loop: Test, moved: dict[fx.Node, None]) -> bool:
    """Puts a node into `moved`, behind what it needs that `place` does not have before it; False where that is more
    than loops and views."""
    if node in moved or node <= place:
        return True
    free = fx_nodes.is_view(node) or _may_move(node, is_loop)
    if not free or not all(_take(operand, place, is_loop, moved) for operand in node.all_input_nodes):
        return False
    moved[node] = None
    return True
