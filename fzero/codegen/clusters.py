"""clusters: which nodes of a segment a compiler makes faster together than aten does one by one.

1. A node is *fusible* where it is a loop over elements: pointwise ops, reductions, norms, softmax, losses, lookups,
   copies. Matrix products, attention, convolutions, draws, scatters and fzero's own kernels stay as they are. Outside a
   stretch they are as fast, write into given memory without a copy, and keep their bits.
2. Consecutive fusible nodes make a *run*. Views are no border. A copy of what was made elsewhere is none and stays out:
   it may lie in its destination already (`inplace`).
3. On a device loops first move next to what they share (`neighbours`), and a run falls into its *stretches*: the parts
   that share no value. So what stands beside a value by chance decides nothing, and a kernel of fzero's own can have a
   stretch to itself (`own_kernels`).
4. A stretch is worth it where two or more nodes compute something. On a device one is enough: one whose result aten
   would copy, that packs several values into one, or that sums rows.

Casts and copies count and connect nothing: ZeRO stages differ in them, and every stage must decide alike.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import inductor_rounds
from fzero.codegen import out_forms
from fzero.codegen.neighbours import gather, readers
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op_info import of

aten = torch.ops.aten
PACKS = frozenset({aten.stack.default, aten.cat.default})

_LOW = (torch.bfloat16, torch.float16)
_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def is_fusible(node: fx.Node) -> bool:
    """Whether a node is a loop over elements that a compiler may fuse with others."""
    if node.target is operator.getitem:
        return is_fusible(fx_nodes.operand(node))
    schema = fx_nodes.schema(node)
    how = of(node.target).fusion or (_packs(node) and "move")
    if schema is None or not how:
        return False
    values = [t for n in (node, *node.all_input_nodes) for t in fx_values.tensors(n.meta.get("val"))]
    devices = {t.device.type for t in values}
    if len(devices) != 1 or any(t.dtype not in _DTYPES or t.numel() == 0 for t in values):
        return False
    if any(t.dtype in _LOW for t in values) and not inductor_rounds(*devices):
        return False
    tags = node.target.tags  # type: ignore[union-attr]
    if torch.Tag.nondeterministic_seeded in tags or (devices == {"cpu"} and how == "not on cpu" and not _is_tanh(node)):
        return False
    return not schema.is_mutable or all(fx_nodes.base(d).op == "placeholder" for d in fx_nodes.mutated(node))


def _is_tanh(node: fx.Node) -> bool:
    return node.kwargs.get("approximate") == "tanh"


def stretches(graph: fx.Graph) -> list[list[fx.Node]]:
    """The stretches of a graph, each in the graph's order. On a device loops are moved in it first."""
    gather(graph, lambda node: is_fusible(node) and on_device(node))
    found = [part for run in _runs(graph) for part in (_parts(run) if any(map(on_device, run)) else [run])]
    return [part for part in found if sum(map(_computes, part)) > 1 or any(map(_is_worth_it, part))]


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Maximal runs of fusible nodes."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if not fx_nodes.is_compute(node) or is_aten_view(node):
            continue
        elsewhere = _lies_elsewhere(node, runs[-1])
        if is_fusible(node) and not elsewhere:
            runs[-1].append(node)
        elif runs[-1] and not (elsewhere and _may_pass(node, runs[-1])):
            runs.append([])
    return runs


def _parts(run: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes of a run by what they share: values that one computes and another reads, and memory that one writes.

    A cast of what the segment is given, as of a leaf, connects nothing where the run does not write that. Parts that
    read it have one each.
    """
    group = _Groups(run)
    writers = {fx_nodes.base(into): node for node in run for into in fx_nodes.mutated(node)}
    outer = [n for n in run if _moves(n) and not fx_nodes.mutated(n) and _is_given(n, writers)]
    for node in run:
        for operand in node.all_input_nodes:
            made = fx_nodes.base(operand)
            other = made if made in group else writers.get(made)
            if other is not None and other not in outer:
                group.join(node, other)
    for move in reversed(outer):
        group.give(move)
    return group.parts()


class _Groups(dict[fx.Node, fx.Node]):
    """Disjoint sets of nodes: each node's value leads to its set's first one."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        super().__init__((node, node) for node in nodes)

    def leader(self, node: fx.Node) -> fx.Node:
        """The node that stands for a set."""
        while self[node] is not node:
            node = self[node]
        return node

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """Makes one set of two."""
        self[self.leader(node)] = self.leader(other)

    def give(self, move: fx.Node) -> None:
        """Puts a cast into the set that reads it; each further set gets a cast of its own, or is joined where it reads
        a view of it."""
        users = [user for user in move.users if user in self]
        views = [view for view in move.users if fx_nodes.is_view(view)]
        by_views = {self.leader(node) for view in views for node in readers(view) if node in self}
        sets = list(dict.fromkeys(self.leader(node) for node in readers(move) if node in self))
        for number, leader in enumerate(sets):
            own = [user for user in users if self.leader(user) is leader]
            if number == 0 or leader in by_views:
                self.join(move, leader)
                continue
            with move.graph.inserting_after(move):
                copy = move.graph.node_copy(move)
            for user in own:
                user.replace_input_with(move, copy)
            self[copy] = leader

    def parts(self) -> list[list[fx.Node]]:
        """The sets, each in the order of its graph."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in next(iter(self)).graph.nodes if self else ():
            if node in self:
                found.setdefault(self.leader(node), []).append(node)
        return list(found.values())


def _moves(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not _computes(node)


def _is_given(node: fx.Node, written: Collection[fx.Node]) -> bool:
    """Whether a node reads only what the segment is given, and is not written."""
    owners = {fx_nodes.base(operand) for operand in node.all_input_nodes}
    return all(owner.op == "placeholder" and owner not in written for owner in owners)


def _lies_elsewhere(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Whether a node copies what is made outside of a run: it may lie in its destination already (`inplace`)."""
    if node.target is not aten.copy_.default:
        return False
    into, source = (fx_nodes.operand(node, i) for i in (0, 1))
    return fx_nodes.base(source) not in run and into.meta["val"].dtype == source.meta["val"].dtype


def _may_pass(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Whether a copy may be made before a run that begins in front of it: the run neither reads nor writes where it
    writes, and does not write what it reads."""
    into, source = (fx_nodes.base(fx_nodes.operand(node, i)) for i in (0, 1))
    used = {fx_nodes.base(n) for member in run for n in member.all_input_nodes}
    return into not in used and all(fx_nodes.base(n) is not source for member in run for n in fx_nodes.mutated(member))


def is_aten_view(node: fx.Node) -> bool:
    """Whether a node is a view that a compiler knows; `fzero.strided` is not, and ends a stretch."""
    return fx_nodes.is_view(node) and node.target is not torch.ops.fzero.strided.default


def _computes(node: fx.Node) -> bool:
    """Whether a node counts as work.

    Casts and copies are not counted: ZeRO stages differ in them, and every stage must make the same fusion decision.
    Packing several values into one is the step's own.
    """
    if node.target is operator.getitem:
        return False
    return of(node.target).fusion != "move" and (bool(of(node.target).fusion) or _packs(node))


def _packs(node: fx.Node) -> bool:
    """Whether a node packs several values into one on a device: a compiler writes what is made of it in one pass."""
    return node.target in PACKS and on_device(node)


def on_device(node: fx.Node) -> bool:
    """Whether a node's kernels are launched on a device, where each copy is a pass over memory of its own."""
    values = fx_values.tensors(node.meta.get("val"))
    return bool(values) and backend.of(values[0].device).on_streams


def _is_worth_it(node: fx.Node) -> bool:
    """Whether one node alone is worth a kernel of its own, on a device: aten would copy its results, it packs, or it
    sums rows, for which aten's kernel takes three times the time of its bytes."""
    return _is_copied(node) or _packs(node) or _sums_rows(node)


def _sums_rows(node: fx.Node) -> bool:
    """Whether a node sums over the rows of a value on a device, and not along them."""
    if node.target is not aten.sum.dim_IntList or not on_device(node):
        return False
    last = fx_nodes.operand(node).meta["val"].ndim - 1
    return bool(node.args[1]) and not {last, -1} & set(node.args[1])  # type: ignore[arg-type]


def _is_copied(node: fx.Node) -> bool:
    """Whether aten would copy the results of an op, on a device where a copy is a kernel and a pass over memory."""
    if node.target is operator.getitem or not _computes(node) or not fx_values.results(node):
        return False
    return on_device(node) and not (out_forms.special_form(node) or out_forms.form_of(node))
