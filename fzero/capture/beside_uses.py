"""beside_uses: what is computed of parameters alone stands beside the other uses of these parameters.

A loss with a penalty on its weights reads each of them once more behind the forward, and begins its backward with a
gradient for each. In this order every parameter would be gathered twice more, and the gradients of all layers, whole,
would wait for their layers. Every op is pure, so it may run elsewhere with the same bits: a sum where its parameter
is first used, what is as large as a parameter right before its first use.

    y = f(x, w); z = g(y, v); r = sum(w^2); s = sum(v^2); loss = z + r + s
    becomes   r = sum(w^2); y = f(x, w); s = sum(v^2); z = g(y, v); loss = z + r + s

What the forward makes of parameters by few ops, and the backward reads, is made again there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from fzero.capture.cast_first import is_cast
from fzero.ir import fx_nodes

LARGE = 1 << 14  # bytes of a value that is made again rather than held from the forward to the backward,
FEW = 4  # by at most so many ops


def beside_uses(gm: fx.GraphModule, inputs: Collection[fx.Node]) -> None:
    """Moves what is made of these placeholders alone. In place. inputs: the parameters, and constants."""
    held, spread, made = _of_inputs(gm.graph.nodes, inputs)
    made = {node for node in made if node.users and fx_nodes.output(gm.graph) not in node.users}
    if not made:
        return
    made |= _again(gm.graph, made)
    nodes = list(gm.graph.nodes)
    for node in reversed(nodes):  # what nothing else reads moves with them
        if (node in spread or node in held) and fx_nodes.is_compute(node) and all(user in made for user in node.users):
            made.add(node)
    place = {node: i for i, node in enumerate(nodes)}
    goal = _goals(place, inputs, held, made)
    for node in nodes:
        if node in goal:
            anchor = nodes[goal[node]]
            anchor.prepend(node)
            if phase := _phase(anchor):
                node.meta["phase"] = phase
    gm.recompile()


def _of_inputs(
    nodes: Iterable[fx.Node], inputs: Collection[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """(the inputs, their views and casts; numbers at many places; what is computed of the inputs alone, and of numbers,
    element by element or into one number)."""
    held, spread, made = set(inputs), set[fx.Node](), set[fx.Node]()
    for node in nodes:
        value, sources = node.meta.get("val"), node.all_input_nodes
        if getattr(node.target, "namespace", "") != "aten" or not isinstance(value, torch.Tensor):
            continue  # of fzero's own ops some are placed by passes
        own = [source for source in sources if source in held or source in made]
        if own and fx_nodes.mutated(node):
            continue
        if own and (fx_nodes.is_view(node) or is_cast(node)):
            (held if own[0] in held else made).add(node)
        elif not value.dim():
            made |= {node} if own and own == sources else set()
        elif sources and all(source in spread or _is_number(source) for source in sources if source not in own):
            if own and fx_nodes.is_pointwise(node) and value.numel() <= max(_numel(x) for x in own):
                made.add(node)
            elif not own and (fx_nodes.is_view(node) or fx_nodes.is_pointwise(node)):
                spread.add(node)
    return held, spread, made


def _again(graph: fx.Graph, made: Collection[fx.Node]) -> set[fx.Node]:
    """Copies for the backward of what few ops of the forward make of inputs, and both read."""
    made_again = set[fx.Node]()
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in place if node in made and not _phase(node)]:
        later = [user for user in node.users if _phase(user)]
        if not later or len(later) == len(node.users) or node.meta["val"].nbytes < LARGE:
            continue
        chain = sorted(_chain(node, made), key=place.__getitem__)
        if len(chain) <= FEW:
            copies = _copied(graph, chain, later[0])
            made_again |= {*copies.values()}
            for user in later:
                user.replace_input_with(node, copies[node])
    return made_again


def _chain(node: fx.Node, made: Collection[fx.Node]) -> set[fx.Node]:
    """A value and those of more than one number of which it is made, but for inputs: no more than shows that it is by
    more than few ops."""
    found, todo = set[fx.Node](), [node]
    while todo and len(found) <= FEW:
        node = todo.pop()
        if node in made and node.meta["val"].dim():
            found.add(node)
            todo += [source for source in node.all_input_nodes if source not in found]
    return found


def _copied(graph: fx.Graph, chain: list[fx.Node], reader: fx.Node) -> dict[fx.Node, fx.Node]:
    """The copy of each of these nodes, right before a reader of the last."""
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(reader):
        for node in chain:
            copies[node] = fx_nodes.copy_node(graph, node, lambda source: copies.get(source, source))
            copies[node].meta["phase"] = _phase(reader)
    return copies


def _goals(
    place: dict[fx.Node, int], inputs: Collection[fx.Node], held: Collection[fx.Node], made: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """The place of the node, among those that stay, before which each goes."""
    first: dict[tuple[fx.Node, str | None], int] = {}  # use of an input in a phase, by what stays
    for node in reversed(place):
        if fx_nodes.is_compute(node) and node not in made and node not in held:
            for source in node.all_input_nodes:
                if source in held:
                    first[_root(source), _phase(node)] = place[node]
    roots: dict[fx.Node, set[fx.Node]] = {}  # the inputs of what moves
    after: dict[fx.Node, int] = {}  # the last node that stays and that it needs
    for node in (node for node in place if node in made):
        roots[node], after[node] = set(), -1
        for source in node.all_input_nodes:
            roots[node] |= roots.get(source) or ({_root(source)} if source in held else set())
            after[node] = max(after[node], -1 if source in inputs else after.get(source, place[source]))
    goal: dict[fx.Node, int] = {}
    for node in (node for node in reversed(place) if node in made):
        goal[node] = min(goal.get(user, place[user]) for user in node.users)
        if not node.meta["val"].dim() and any(source.meta["val"].dim() for source in node.all_input_nodes):
            uses = [first.get((root, _phase(node)), -1) for root in roots[node]]
            goal[node] = min([goal[node], *(use for use in uses if use > after[node])])
    for node in (node for node in place if node in goal and not node.meta["val"].dim()):
        sources = node.all_input_nodes  # of one phase, so that the next one makes the number where it reads it
        early = all(s in goal and not s.meta["val"].dim() and _phase(s) == _phase(node) for s in sources)
        goal[node] = max(goal[s] for s in sources) if early else goal[node]
    return goal


def _root(node: fx.Node) -> fx.Node:
    """The input of which a node is a view or a cast."""
    while fx_nodes.is_compute(node):
        node = fx_nodes.operand(node)
    return node


def _phase(node: fx.Node) -> str | None:
    """None in the forward."""
    return node.meta.get("phase")


def _numel(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _is_number(node: fx.Node) -> bool:
    """Whether all elements are one number, which has no dims."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() and fx_nodes.is_view(node):
        value = fx_nodes.base(node).meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()
