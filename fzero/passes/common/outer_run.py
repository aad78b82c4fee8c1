"""outer_run: which nodes of an outer run may run on slices of buckets.

A node is *flat* if it works on the same elements, or blocks, of one leaf alone. It is *owned* if it needs all of one
leaf and gives all of it. It is *partial* if it sums a flat value up. Any other node is *full*. A full value that all
ranks have and that flat work reads too is *cut*: a copy of it lies in a column.
"""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref, SlotKey

COPY = torch.ops.aten.copy_.default


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds a whole tensor up, to a scalar."""
    return of(node.target).meaning == "sum"


def is_scalar(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.ndim == 0


@dataclass
class OuterRun:
    """The nodes of one outer run on full tensors, sorted out. `sort_out` and its helpers write all fields but
    `level`, which `outer_order` fills; `buffers`, `where` and `stored` `shard_update` writes too."""

    program: Program
    op: Op
    buffers: dict[str, Buffer]
    varying: AbstractSet[str] = frozenset()  # buffers that may differ between ranks
    where: dict[fx.Node, Ref] = field(default_factory=dict)  # full values, and the slots of stored flat ones
    stored: dict[fx.Node, str] = field(default_factory=dict)  # flat value -> the column (buffer) that holds it
    dest: dict[fx.Node, Ref] = field(default_factory=dict)  # new leaf -> its place
    outputs: dict[fx.Node, Ref] = field(default_factory=dict)  # results that other ops know by a name of their own
    slot_key: dict[fx.Node, SlotKey] = field(default_factory=dict)  # flat value -> the leaf that it is of
    block_size: dict[fx.Node, Any] = field(
        default_factory=dict
    )  # elements of the leaf for one of the value: of each result
    partial: set[fx.Node] = field(default_factory=set)
    owned: set[fx.Node] = field(default_factory=set)
    cut: dict[fx.Node, SlotKey] = field(default_factory=dict)  # full values of which flat work reads the own slice
    whole: set[fx.Node] = field(default_factory=set)  # what might be flat, and is full work
    bound: set[fx.Node] = field(default_factory=set)  # what may differ between ranks, or is made of leaves
    level: dict[fx.Node, int] = field(default_factory=dict)

    def sort_out(self) -> None:
        """Reads the run and fills the fields, but `level`."""
        self.gm = segments.module(segments.copied(self.program.segments[str(self.op.segment)].graph))
        self._apart()
        holders = fx_nodes.placeholders(self.gm.graph)
        num_reads = len(self.op.reads)
        num_outputs = int(self.op.num_outputs)
        for node, ref in zip(holders, self.op.reads, strict=False):
            self.where[node] = ref
            slot_key = self.slot_key_of(ref)
            if slot_key is not None:
                self.slot_key[node], self.stored[node], self.block_size[node] = (
                    slot_key,
                    ref.name,
                    self.buffers[ref.name].per,
                )
        dests = dict(zip(holders[num_reads:], self.op.writes[num_outputs:], strict=True))
        for node in self.gm.graph.nodes:
            if node.target is COPY:
                self.dest[node.args[1]] = dests[node.args[0]]
        self.outputs = dict(zip(fx_nodes.outputs(self.gm.graph), self.op.writes[:num_outputs], strict=True))
        self.nodes = [n for n in self.gm.graph.nodes if n.op == "call_function" and n.target is not COPY]
        self.bound = {n for n in holders[:num_reads] if n in self.slot_key or self.where[n].name in self.varying}
        for node in self.nodes:
            if not self.bound.isdisjoint(node.all_input_nodes):
                self.bound.add(node)
        given = dict(self.slot_key), dict(self.block_size)
        self._classify()
        while summed := self._summed():
            self.whole |= summed
            self.slot_key, self.block_size = dict(given[0]), dict(given[1])
            self.owned, self.partial = set(), set()
            self._classify()
        self._joined()

    def _apart(self) -> None:
        """A whole result that is flat work's too (new parameters that a later loss reads) becomes a copy of it, so that
        the work itself may run on slices."""
        end = fx_nodes.output(self.gm.graph)
        with self.gm.graph.inserting_before(end):
            for node in dict.fromkeys(end.all_input_nodes):
                if node.op == "call_function" and node.target is operator.getitem:
                    copy = self.gm.graph.call_function(torch.ops.aten.clone.default, (node,))
                    copy.meta = dict(node.meta)
                    end.replace_input_with(node, copy)

    def slot_key_of(self, ref: Ref) -> SlotKey | None:
        bucket = self.program.buckets.get(self.buffers[ref.name].bucket or "")
        if bucket is None or ref.start is None or ref.shape is None:
            return None
        slot = bucket.find((ref.start, ref.stop, ref.shape), self.buffers[ref.name].per)
        return None if slot is None else SlotKey(bucket.name, slot)

    def _classify(self) -> None:
        """Fills `slot_key`, `block_size`, `owned` and `partial`. A result of flat work that is another leaf's too gets
        a copy there, for a tuple has no column."""
        for node in [*self.nodes]:
            slot_key, block_size = (None if node in self.whole else self._flat_slot_key(node)) or (None, 1)
            elsewhere = (
                node in self.dest and self.slot_key_of(self.dest[node]) != slot_key
            )  # a leaf that is another's value
            if elsewhere and slot_key is not None and node.target is operator.getitem:
                with self.gm.graph.inserting_after(node):
                    copy = self.gm.graph.call_function(torch.ops.aten.clone.default, (node,))
                copy.meta = dict(node.meta)
                for user in [u for u in node.users if u.target is COPY]:
                    user.replace_input_with(node, copy)
                self.nodes.append(copy)
                self.dest[copy], elsewhere = self.dest.pop(node), False
            if slot_key is not None and node not in self.outputs and not elsewhere:
                self.slot_key[node], self.block_size[node] = slot_key, block_size
                if of(node.target).flat_form is not None:
                    self.owned.add(node)
            elif is_sum(node) and self.block_size.get(fx_nodes.operand(node)) == 1 and len(node.all_input_nodes) == 1:
                self.partial.add(node)

    def _joined(self) -> None:
        """Flat work on what full work needs anyway, and of which only full work makes use, is full work: its operands
        travel, and its results need not."""
        for node in reversed(self.nodes):
            chain: set[fx.Node] = set()
            if node in self.slot_key and self._is_read_whole(node, chain) and self._is_of_whole(node, chain):
                for inner in chain:
                    del self.slot_key[inner], self.block_size[inner]
        for copy in [c for c in self.cut if not any(u in self.slot_key for u in c.users)]:
            copy.replace_all_uses_with(fx_nodes.operand(copy))
            self.nodes.remove(copy)
            del self.cut[copy]

    def _is_read_whole(self, node: fx.Node, but: AbstractSet[fx.Node]) -> bool:
        """Whether full work needs a flat value; but: apart from these."""
        return any(
            u not in self.slot_key and u not in self.partial and u.target is not COPY
            for u in node.users
            if u not in but
        )

    def _is_of_whole(self, node: fx.Node, chain: set[fx.Node]) -> bool:
        """Whether a flat value, of which only full work and `chain` make use, is of values that full work needs
        beside it. Adds it to the chain, with those between."""
        if node.op == "placeholder" or node in self.owned or node in self.dest or node in self.outputs:
            return False
        if any(u in self.partial or (u in self.slot_key and u not in chain) for u in node.users) or len(chain) > 4:
            return False
        chain.add(node)
        flat = [a for a in node.all_input_nodes if a in self.slot_key]
        return all(self._is_read_whole(a, chain) or self._is_of_whole(a, chain) for a in flat)

    def _flat_slot_key(self, node: fx.Node) -> tuple[SlotKey, Any] | None:
        """The leaf whose elements, or blocks, a node works on alone, and how many elements its results stand for."""
        if node.target.__name__ == "getitem":  # type: ignore[union-attr]
            source, index = node.args
            if source not in self.slot_key:
                return None
            block_size = self.block_size[source]  # type: ignore[index]
            return self.slot_key[source], block_size[index] if isinstance(block_size, tuple) else block_size  # type: ignore[index]
        wanted, result_sizes = of(node.target).blockwise or ((), None)
        on_leaf = of(node.target).flat_form is not None and len(node.all_input_nodes) == 1
        if not (fx_nodes.is_pointwise(node) or wanted or on_leaf):
            return None
        wide = [a for a in node.all_input_nodes if not is_scalar(a)]
        beside = [a for a in wide if self._may_be_cut(a)] if fx_nodes.is_pointwise(node) and not wanted else []
        wide = [a for a in wide if a not in beside]
        slot_keys, block_sizes = {self.slot_key.get(a) for a in wide}, {self.block_size.get(a) for a in wide}
        if len(slot_keys) != 1 or None in slot_keys:
            return None
        operand_sizes = tuple(self.block_size.get(a) for a in node.args[: len(wanted)])  # type: ignore[arg-type]
        if operand_sizes != wanted if wanted else len(block_sizes) > 1:
            return None
        slot_key, block_size = slot_keys.pop(), result_sizes or block_sizes.pop()
        assert slot_key is not None
        bucket = self.program.buckets[slot_key.bucket]
        results = fx_values.tensors(node.meta["val"])
        ratios = block_size if isinstance(block_size, tuple) else (block_size,) * len(results)
        fits = all(
            tuple(r.shape) == bucket.place(slot_key.slot, n or 1)[2] for r, n in zip(results, ratios, strict=True)
        )
        whole = bucket.place(slot_key.slot)[2]
        cut = not beside or (block_size == 1 and self.program.is_shared(bucket.name))
        if not (results and fits and cut and all(tuple(a.meta["val"].shape) == whole for a in beside)):
            return None
        for a in beside:
            node.replace_input_with(a, self._cut(a, slot_key))
        return slot_key, block_size

    def _summed(self) -> set[fx.Node]:
        """Flat work on cut values of which a sum is taken: in full it is a sum of one leaf, with the same bits."""
        found: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in self.slot_key and any(u in self.partial or u in found for u in node.users):
                found.add(node)
        return {node for node in found if any(a in self.cut for a in node.all_input_nodes)}

    def _may_be_cut(self, node: fx.Node) -> bool:
        """Whether each rank may take its slice of a full value: all have the same, and no leaf is gathered for it."""
        return node not in self.slot_key and node not in self.bound and isinstance(node.meta["val"], torch.Tensor)

    def _cut(self, node: fx.Node, slot_key: SlotKey) -> fx.Node:
        """A copy of a full value where a leaf has its place, for flat work to read."""
        copies = (u for u in node.users if self.cut.get(u) == slot_key)
        if (copy := next(copies, None)) is None:
            graph = self.gm.graph
            with graph.inserting_after(node) if node.op == "call_function" else graph.inserting_before(self.nodes[0]):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            self.nodes.insert(self.nodes.index(node) + 1 if node in self.nodes else 0, copy)
            self.cut[copy] = slot_key
        return copy
