"""loss_arguments: values like leaves (`fzero.capture.leaf_like`) that a loss is given lie as the leaves do.

A loss of perturbed parameters reads them from columns: a rank computes and holds its own slice of each bucket, and they
are gathered where the loss reads them, as parameters are. A value that comes without those of the other leaves in its
bucket stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import fx

from fzero.capture.step_ops import REGION
from fzero.ir import fx_nodes, segments
from fzero.ir.records import Buffer, Ref, SlotKey, buffer_name
from fzero.lowering.emit import Emitter


def own_arguments(graph: fx.Graph, like: Mapping[fx.Node, SlotKey], plain: Iterable[fx.Node]) -> None:
    """Every such value that a region is given, and that is a new leaf too or the result of a transfer (`plain`),
    becomes a copy for it. In place."""
    wanted = {*plain, *fx_nodes.outputs(graph)}
    for region in [n for n in graph.nodes if n.target is REGION]:
        for node in dict.fromkeys(region.all_input_nodes):
            if node in like and node in wanted and node.op == "call_function":
                with graph.inserting_before(region):
                    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
                copy.meta = {**node.meta}
                region.replace_input_with(node, copy)


@dataclass
class LossArguments:
    """The columns of values like leaves. place_of: of each value that has one, its column and the slot there."""

    to: Emitter
    place_of: dict[fx.Node, tuple[str, SlotKey]]

    @classmethod
    def of(
        cls, to: Emitter, graph: fx.Graph, like: Mapping[fx.Node, SlotKey], levels: Mapping[fx.Node, int]
    ) -> LossArguments:
        """The columns for the regions of a step; none in a pipeline, where a role has a part of each.

        levels: at which level of the outer graph each value is computed.
        """
        if to.plan.mesh.roles > 1:
            return cls(to, {})
        columns: dict[tuple[str, str], dict[int, fx.Node]] = {}
        regions = [n for n in graph.nodes if n.target is REGION]
        given = dict.fromkeys(a for n in regions for a in n.all_input_nodes if a in like and a.op == "call_function")
        for node in given:
            (bucket, slot), dtype = like[node], str(node.meta["val"].dtype).rsplit(".")[-1]
            names = (f"a{levels[node]}.{number}.{dtype}" for number in count())
            name = next(name for name in names if slot not in columns.get((bucket, name), {}))
            columns.setdefault((bucket, name), {})[slot] = node
        found = cls(to, {})
        for (bucket, name), nodes in columns.items():
            if len(nodes) == len(to.plan.buckets[bucket].slots):
                found.place_of |= {n: (buffer_name(f"{name}:{bucket}"), SlotKey(bucket, s)) for s, n in nodes.items()}
        return found

    def written(self, node: fx.Node) -> Ref:
        """Where a value is written, all of it."""
        name, (bucket, slot) = self.place_of[node]
        column = f"{name}.new" if self._shared(bucket) else name
        length = self.to.plan.buckets[bucket].length
        self.to.buffers.setdefault(column, Buffer(column, node.meta["val"].dtype, (length,), "scratch", bucket))
        return Ref(column, *self.to.plan.buckets[bucket].place(slot))

    def keep(self, nodes: Sequence[fx.Node]) -> None:
        """Keeps the own slices of the columns of these values, which were written, and gathers them for their users."""
        whole: dict[str, str] = {}
        for node in nodes:
            name, (bucket, slot) = self.place_of[node]
            if name not in whole:
                whole[name] = self._gathered(name, bucket) if self._shared(bucket) else name
            self.to.where[node] = Ref(whole[name], *self.to.plan.buckets[bucket].place(slot))

    def _gathered(self, name: str, bucket: str) -> str:
        """Keeps the own slice of a column. Returns the buffer that has all of it."""
        new, held = self.to.buffers[f"{name}.new"], self.to.plan.buckets[bucket]
        length = held.length // self.to.plan.mesh.size(held.axis)
        self.to.buffers[name] = replace(new, name=name, shape=(length,), sharded=held.axis)
        gm = segments.copy_segment(torch.empty((held.length,), dtype=new.dtype, device="meta"))
        source, target = (Ref(column, 0, held.length, None, True) for column in (new.name, name))
        self.to.segment("run", gm, [source], [target], why=f"own slice of {name}", flat=1)
        return self.to.whole(name, "gathered", f"whole {name}")

    def _shared(self, bucket: str) -> bool:
        """Whether a rank holds its own slice of a bucket's columns."""
        held = self.to.plan.buckets[bucket]
        return held.updates_slices and self.to.plan.mesh.size(held.axis) > 1
