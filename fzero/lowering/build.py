"""lower: Graph and Plan → the naive Program, which the passes then improve.

The naive program is the semantics sentence written out, with placements. It gathers every sharded column. It runs each
region whole, once per microbatch, and its gradients are written into flat buffers. It sums those over ranks to what
each rank updates, and gathers that. It runs the outer graph on full tensors, and keeps the own slice of every new leaf.
It is correct and wasteful, and every pass keeps its meaning.

Gradients: sum over ranks in rank order, one division by ranks x microbatches. `reduce="each"` reduces every
microbatch's bucket and adds the results; `"end"` adds first and reduces once. Losses and aux are added, then reduced.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

import torch
from torch import fx

from fzero._torch_compat import graph_module
from fzero.capture.graph import Graph
from fzero.capture.leaf_like import leaf_like
from fzero.capture.step_ops import AXIS_INDEX, CODED_MEAN, FED_MEAN, REDUCE, REGION
from fzero.errors import SpecError
from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.op import StepPhase
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref, SlotKey
from fzero.lowering.emit import Emitter, line_of
from fzero.lowering.loss_arguments import LossArguments, own_arguments
from fzero.lowering.lower_coded import coded_mean
from fzero.lowering.lower_region import RegionBuilder
from fzero.plan.state_plan import Plan
from fzero.shard.layouts import Layout
from fzero.shard.moves import transitions
from fzero.shard.placements import Flat

aten = torch.ops.aten
LATER = (REGION, REDUCE, CODED_MEAN, FED_MEAN)  # what they make is of the next level
SHORT = (
    20  # elementwise ops on a gradient or a leaf that are done again, on slices, rather than kept whole between levels
)


def build(graph: Graph, plan: Plan, *, reduce: str = "end", transport: str = "p2p") -> Program:
    """The naive program, which does not say yet what it is to mean. `reduce` is "each" or "end"; `transport` is "p2p",
    "nccl" or "shared"."""
    to = Emitter(plan, transport)
    builder = _Builder(to, graph, reduce)
    builder.run()
    return Program(
        mesh=plan.mesh,
        buckets=plan.buckets,
        buffers=to.buffers,
        ops=tuple(to.ops),
        metrics=builder.metrics,
        microbatches=max((region.microbatches for region in graph.regions), default=1),
        trainable=tuple(sorted(builder.trainable, key=str)),
        passes=("lower",),
        transport=transport,
        segments=to.segments,
    )


@dataclass
class _Builder:
    """The naive program of one captured step, being written: its records go `to` the emitter."""

    to: Emitter
    graph: Graph
    reduce: str
    metrics: dict[str, str] = field(default_factory=dict)
    trainable: set[SlotKey] = field(default_factory=set)

    def run(self) -> None:
        """Writes the whole program: levels of the outer graph in turn, then the updates of the state."""
        gm = graph_module(segments.copied(self.graph.gm.graph))
        self._own_outputs(gm)
        self.nodes = fx_nodes.placeholders(gm.graph)
        self._inputs()
        for node in gm.graph.nodes:
            if node.target is AXIS_INDEX:
                self.to.where[node] = self.to.rank(str(node.args[0]))
        own_arguments(gm.graph, self._like(gm), [n for n in gm.graph.nodes if _is_comm(n)])
        levels = _repeated(gm.graph, _levels(gm.graph))
        self.like = self._like(gm)
        self.arguments = LossArguments.of(self.to, gm.graph, self.like, levels)
        results = fx_nodes.outputs(gm.graph)
        num = len(self.to.plan.leaves)
        self.new_leaf = {n: i for i, n in enumerate(results[:num]) if n is not self.nodes[i]}
        self.metric_nodes = set(results[num:])
        for level in range(max(levels.values(), default=0) + 1):
            here = [
                n
                for n, node_level in levels.items()
                if node_level == level and n.op == "call_function" and not _is_comm(n)
            ]
            self._outer(here, level)
            for node in gm.graph.nodes:
                if _is_comm(node) and levels[node] == level + 1:
                    self._comm(node)
        self._updates()
        changed = [self.to.plan.leaves[i] for i in self.new_leaf.values()]
        kept = {SlotKey(self.to.buffers[x.buffer].bucket or "", x.slot) for x in changed if x.slot is not None}
        self.trainable &= kept  # a step may leave some alone
        for name, node in zip(self.graph.metric_names, results[num:], strict=True):
            ref = self.to.where[node]
            self.metrics[name] = ref.name
            self.to.buffers[ref.name] = _with_kind(self.to.buffers[ref.name], "metric")

    # --- pieces

    def _own_outputs(self, gm: fx.GraphModule) -> None:
        """Every new leaf and metric gets a node of its own that computes it: a copy where it is an input, the result
        of a collective, or another leaf's value."""
        out = fx_nodes.output(gm.graph)
        inputs = fx_nodes.placeholders(gm.graph)
        num = len(self.to.plan.leaves)
        seen: set[fx.Node] = set()
        results = list(out.args[0])  # type: ignore[arg-type]
        for index, node in enumerate(results):
            unchanged = index < num and node is inputs[index]
            picked = node.target is REDUCE and fx_nodes.operand(node).target is operator.getitem
            metric_of_reduce = index >= num and picked and node.meta["val"].ndim == 0 and node not in seen
            borrowed = node in seen or node.op == "placeholder" or _is_comm(node) or fx_nodes.is_view(node)
            if borrowed and not unchanged and not metric_of_reduce:
                with gm.graph.inserting_before(out):
                    copy = gm.graph.call_function(aten.clone.default, (node,))
                copy.meta = {**node.meta, "val": fx_values.dense_like(node.meta["val"])}  # of an expanded value too
                results[index] = copy
            seen.add(results[index])
        out.args = (results,)

    def _inputs(self) -> None:
        """Adds the buffers of state, batch and constants, and gathers the columns that are sharded."""
        num = len(self.to.plan.leaves)
        self.to.buffers.update(self.to.plan.buffers)
        for node, leaf in zip(self.nodes, self.to.plan.leaves, strict=False):
            ref = self.to.plan.ref(leaf)
            if self.to.plan.buffers[leaf.buffer].sharded:
                why = f"whole {self.to.plan.buffers[leaf.buffer].bucket}"
                ref = Ref(self.to.whole(leaf.buffer, "gathered", why), ref.start, ref.stop, ref.shape)
            self.to.where[node] = ref
        names = [*(f"batch:{p}" for p in self.graph.batch_paths), *(f"const:{n}" for n in self.graph.constants)]
        for node, name in zip(self.nodes[num:], names, strict=True):
            kind = "batch" if name.startswith("batch:") else "constant"
            self.to.where[node] = self.to.new(name, node.meta["val"], kind)

    def _like(self, gm: fx.GraphModule) -> dict[fx.Node, SlotKey]:
        """The slots of flat leaves, and of the values of a graph that are like one."""
        leaves, buffers = self.to.plan.leaves, self.to.plan.buffers
        slots = [None if x.slot is None else SlotKey(buffers[x.buffer].bucket or "", x.slot) for x in leaves]
        return leaf_like(self.graph, gm, [leaf.path for leaf in leaves if leaf.per_rank], slots)

    def _outer(self, nodes: list[fx.Node], level: int) -> None:
        """All ordinary work of one level as one run on full tensors, new leaves written into flat `.new` buffers."""
        inside = set(nodes)
        inputs = _unique(a for n in nodes for a in n.all_input_nodes if a not in inside)
        dests, outputs, given = [], [], []
        for node in nodes:
            outside = [u for u in node.users if u not in inside and u.op != "output"]
            if node in self.new_leaf:
                dests.append(node)
            if node in self.arguments.place_of:
                given.append(node)
            elif outside or node in self.metric_nodes:
                outputs.append(node)
        if not dests and not outputs and not given:
            return
        refs = []
        for node in dests:
            leaf = self.to.plan.leaves[self.new_leaf[node]]
            ref = self.to.plan.ref(leaf)
            new = f"{leaf.buffer}.new"
            if new not in self.to.buffers:
                old = self.to.buffers[leaf.buffer]
                shape = (self.to.plan.buckets[old.bucket].length // old.per,) if old.bucket else old.shape
                self.to.buffers[new] = Buffer(
                    new, old.dtype, shape, "scratch", old.bucket, per=old.per, entry=old.entry
                )
            refs.append(Ref(new, ref.start, ref.stop, ref.shape))
        dests += given
        refs += map(self.arguments.written, given)
        gm = segments.extract(nodes, inputs, [*dests, *outputs], dests)
        outs = [self.to.new(f"u{level}.{node.name}", node.meta["val"], "activation") for node in outputs]
        self.to.where.update(zip(outputs, outs, strict=True))
        reads = [self.to.where[n] for n in inputs]
        lines = _unique(n.meta["source"] for n in nodes if n.meta.get("source"))
        why = f"outer {' '.join(lines[:3])}".strip()
        self.to.segment("run", gm, reads, [*outs, *refs], why=why, phase=StepPhase.OUTER)
        self.arguments.keep(given)

    def _comm(self, node: fx.Node) -> None:
        """Emits a region, or a reduction of the outer graph, plain or coded."""
        if node.target is REGION:
            self.trainable |= RegionBuilder(self.to, self.graph, self.like, self.reduce).run(node)
        elif node.target is CODED_MEAN:
            coded_mean(self.to, node)
        elif node.target is FED_MEAN and any(user not in self.to.where for user in node.users):
            raise SpecError(
                f"value_and_grad(error=...) {line_of(node)}: a gradient is of no leaf of the state, or of one that was "
                "given twice. Give the state's own parameters, each once"
            )
        elif node.target is REDUCE and node not in self.to.where:
            source, how, axis = fx_nodes.operand(node), str(node.args[1]), str(node.args[2])
            if self.to.plan.mesh.size(axis) == 1:
                self.to.where[node] = self.to.where[source]
                return
            why = f"{how} over {axis} {line_of(node)}"
            self.to.where[node] = self.to.exchange(
                self.to.where[source], node.meta["val"], f"{node.name}", how, 1, why, axis
            )

    def _updates(self) -> None:
        """Keeps the own part of every new leaf: one copy per run of changed leaves in a column."""

        @cache
        def copy(shape: tuple[int, ...], dtype: torch.dtype) -> fx.GraphModule:
            return segments.copy_segment(torch.empty(shape, dtype=dtype, device="meta"))

        changed: dict[str, set[int | None]] = {}
        for index in self.new_leaf.values():
            leaf = self.to.plan.leaves[index]
            changed.setdefault(leaf.buffer, set()).add(leaf.slot)
        for name, slots in changed.items():
            buffer = self.to.buffers[name]
            if None in slots:
                gm = copy(tuple(buffer.shape), buffer.dtype)
                self.to.segment("update", gm, [Ref(f"{name}.new")], [Ref(name)], why=f"keep {name}")
                continue
            bucket = self.to.plan.buckets[buffer.bucket or ""]
            for first, last in _ranges(sorted(s for s in slots if s is not None)):
                start, stop = bucket.slots[first].start, bucket.end(last)
                gm = copy(((stop - start) // buffer.per,), buffer.dtype)
                old, new = (Ref(b, start, stop, None, buffer.sharded is not None) for b in (name, f"{name}.new"))
                self.to.segment("update", gm, [new], [old], why=f"keep {name}", flat=1)
            updated, held = (Layout.over(self.to.plan.mesh, axes, Flat()) for axes in (bucket.axis, buffer.sharded))
            for step in transitions(updated, held) if buffer.sharded else ():
                own = Ref(name, 0, bucket.length, None, True)
                self.to.transfer(step, own, name, why=f"all of the slice of {name}")


def _is_comm(node: fx.Node) -> bool:
    """Whether a node is a region, a reduction, a rank's place or a picked output of one. Each becomes ops of its
    own."""
    if node.op != "call_function":
        return False
    picks = node.target is operator.getitem and fx_nodes.operand(node).target in (REGION, CODED_MEAN, FED_MEAN)
    return node.target in (*LATER, AXIS_INDEX) or picks


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """The level of every node: that of its latest operand, plus one for a region or a reduction.

    Elementwise work waits for its first user. So `0.9 * ema` runs beside the `+ 0.1 * params` that uses it, where both
    are slices. Before the loss it would be a whole tensor to keep. What only the new state reads (the update of a leaf
    without a gradient) waits for the last level: before the loss it would be kept beside the old state. The results of
    one op wait together.
    """
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        ready = max((levels[a] for a in node.all_input_nodes), default=0)
        levels[node] = ready + (node.op == "call_function" and node.target in LATER)
    last = max(levels.values(), default=0)
    for node in reversed(graph.nodes):
        if fx_nodes.is_pointwise(node) and any(t.ndim for t in fx_values.tensors(node.meta["val"])):
            picks = [user for user in node.users if user.target is operator.getitem]
            users = (u for result in picks or [node] for u in result.users if u.op != "output")
            levels[node] = max(levels[node], min((levels[u] - (u.target in LATER) for u in users), default=last))
            levels.update(dict.fromkeys(picks, levels[node]))
    return levels


def _repeated(graph: fx.Graph, levels: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """The levels, with short elementwise chains on values that are kept anyway (a gradient over a count) computed again
    at each later level that uses them. Such a value is then no whole tensor between levels, and may be a slice. If it
    is a new leaf, it is that of the last level: until then the old one is read, and both would be kept. In place."""
    depth: dict[fx.Node, int] = {}
    for node in levels:
        if node.op != "call_function" or _is_comm(node):
            depth[node] = 0
        elif fx_nodes.is_pointwise(node):
            wide = (a for a in node.all_input_nodes if any(t.ndim for t in fx_values.tensors(a.meta["val"])))
            depth[node] = 1 + max((depth.get(a, SHORT) for a in wide), default=SHORT)
    for node in reversed(list(levels)):
        if not 0 < depth.get(node, 0) <= SHORT:
            continue
        users = [(u, levels[u] - (u.target in LATER)) for u in node.users if u in levels]
        for level in sorted({at for _, at in users if at > levels[node]}):
            with graph.inserting_after(node):
                copy = fx_nodes.copy_node(graph, node, lambda n: n)
            levels[copy] = level
            for user in (u for u, at in users if at == level):
                user.replace_input_with(node, copy)
            if level == max(at for _, at in users):
                fx_nodes.output(graph).replace_input_with(node, copy)
    return {node: levels[node] for node in graph.nodes if node in levels}


def _ranges(slots: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot - 1:
            runs[-1] = (runs[-1][0], slot)
        else:
            runs.append((slot, slot))
    return runs


T = TypeVar("T", bound=Hashable)


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def _with_kind(buffer: Buffer, kind: str) -> Buffer:
    return replace(buffer, kind=kind) if buffer.kind in ("activation", "scratch", "metric") else buffer
