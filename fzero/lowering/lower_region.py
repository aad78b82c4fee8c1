"""lower_region: one `value_and_grad` as ops: its joint graph once per microbatch, sums over these, reductions by rank.

Gradients of flat leaves are written into flat buffers, one per bucket and microbatch, and reduced by bucket. The loss,
aux and gradients of anything else are small or odd-shaped: they are added over microbatches and exchanged whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fzero.capture.graph import Graph, Region
from fzero.capture.step_ops import REDUCE
from fzero.ir import fx_nodes, segments
from fzero.ir.op import StepPhase
from fzero.ir.records import DTYPE_NAMES, Buffer, Ref, SlotKey
from fzero.lowering.emit import Emitter, line_of


@dataclass
class RegionBuilder:
    """Emits one region: its runs, the sums over microbatches, and the reductions of its gradients."""

    to: Emitter
    graph: Graph
    leaf_nodes: Sequence[fx.Node]
    reduce: str

    def run(self, node: fx.Node) -> set[SlotKey]:
        """Emits the region; returns the slots that got a gradient."""
        b = self.to
        index = int(str(node.args[1]))
        region: Region = self.graph.regions[index]
        self.region, self.name, self.k = region, f"r{index}", region.microbatches
        inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        gm_outs = fx_nodes.outputs(region.gm.graph)
        self.getitems = {int(u.args[1]): u for u in node.users}  # type: ignore[arg-type]
        self.place = self._places(inputs)
        self.slots: dict[str, dict[int, int]] = {}  # by bucket, which output is the gradient of which slot
        for i, (bucket, slot) in self.place.items():
            self.slots.setdefault(bucket, {})[i] = slot
        self.dtype = {bucket: region.values[i].dtype for i, (bucket, _) in self.place.items()}
        self.wire = {bucket: region.wire.get(i, self.dtype[bucket]) for i, (bucket, _) in self.place.items()}
        self.summed = bool(self.place) and min(self.place) in region.summed
        dest_of = [i for i in range(len(gm_outs)) if i in self.place]
        fresh_of = [i for i in range(len(gm_outs)) if i not in self.place]
        holders = fx_nodes.placeholders(region.gm.graph)
        body = [n for n in region.gm.graph.nodes if n.op == "call_function"]
        dests = [gm_outs[i] for i in dest_of]
        gm = segments.extract(body, holders, [*dests, *(gm_outs[i] for i in fresh_of)], dests)
        self.first: dict[str, str] = {}  # by bucket, the reduced gradients of the first microbatch
        parts: dict[int, list[Ref]] = {i: [] for i in range(len(gm_outs))}
        for m in range(self.k):
            reads = [self._slice(b.where[x], x.meta["val"], m) if cut else b.where[x]
                     for x, cut in zip(inputs, region.sliced, strict=True)]  # fmt: skip
            outs = [b.new(f"{self.name}.out{i}.{m}", region.values[i], "activation") for i in fresh_of]
            into = [self._grad_ref(i, m) for i in dest_of]
            why = f"loss and gradients {region.source}"
            b.segment("run", gm, reads, [*outs, *into], why=why, phase=StepPhase.REGION, region=self.name, microbatch=m)
            for i, ref in zip([*fresh_of, *dest_of], [*outs, *into], strict=True):
                parts[i].append(ref)
            self._buckets(m)
        for i, refs in parts.items():
            if i not in self.place:
                self._plain(i, refs)
        return set(self.place.values())

    def _places(self, inputs: Sequence[fx.Node]) -> dict[int, SlotKey]:
        """By output, the slot of the flat leaf whose gradient it is. Of several for one place, the first."""
        plan = self.to.plan
        place_of = {
            node: SlotKey(plan.buffers[leaf.buffer].bucket or "", leaf.slot)
            for node, leaf in zip(self.leaf_nodes, plan.leaves, strict=True)
            if leaf.slot is not None
        }
        outputs = {1 + n: inputs[of] for n, of in enumerate(self.region.grad_of) if inputs[of] in place_of}
        first = {place_of[node]: i for i, node in reversed(outputs.items())}
        return {i: place_of[node] for i, node in outputs.items() if first[place_of[node]] == i}

    def _grad_ref(self, i: int, m: int) -> Ref:
        b = self.to
        bucket_name, index = self.place[i]
        bucket = b.plan.buckets[bucket_name]
        name = f"{self.name}.grad:{bucket_name}.{m}"
        if name not in b.buffers:
            b.buffers[name] = Buffer(name, self.dtype[bucket_name], (bucket.length,), "grad", bucket_name)
        slot = bucket.slots[index]
        return Ref(name, slot.start, slot.stop, slot.shape)

    def _buckets(self, m: int) -> None:
        """Emits the sums and reductions of every gradient bucket after microbatch m. "each" reduces and then adds;
        "end" adds, and reduces after the last microbatch."""
        b = self.to
        for name in self.dtype:
            grad = f"{self.name}.grad:{name}.{m}"
            why = f"gradients of {name}"
            each = self.reduce == "each"
            if each:
                reduced = self._reduced(grad, m, why)
                first = self.first.setdefault(name, reduced)
                if m:
                    self._add(first, reduced, why)
            elif m:
                self._add(f"{self.name}.grad:{name}.0", grad, why)
            if m == self.k - 1:
                final = first if each else self._reduced(f"{self.name}.grad:{name}.0", 0, why)
                for axis in b.plan.sum_axes[1:]:
                    final = self._summed(final, f"{final}.{axis}", axis, 0, f"{why} over {axis}")
                for i, index in self.slots[name].items():
                    if i in self.getitems:
                        slot = b.plan.buckets[name].slots[index]
                        for user in self.getitems[i].users:
                            b.where[user] = Ref(final, slot.start, slot.stop, slot.shape)

    def _reduced(self, grad: str, m: int, why: str) -> str:
        """Emits the reduction of a microbatch's gradient bucket over the innermost data axis, in the dtype that
        gradients travel in. Returns the buffer of the result."""
        name = f"{self.name}.red:{self.to.buffers[grad].bucket}.{m}"
        if not self.to.plan.sum_axes:
            return self._flat(torch.div, self.k, grad, grad, why) if self.k > 1 and not self.summed else grad
        return self._summed(grad, name, self.to.plan.sum_axes[0], m, why)

    def _summed(self, grad: str, name: str, axis: str, m: int, why: str) -> str:
        """Emits the sum of a gradient bucket over an axis; over the last one, divided for the mean."""
        b = self.to
        source, n = b.buffers[grad], b.plan.mesh.size(axis)
        bucket = b.plan.buckets[source.bucket or ""]
        last = axis == b.plan.sum_axes[-1]
        divisor = b.plan.data_ranks * self.k if last and not self.summed else 1
        wire = self.wire[bucket.name]
        narrow = wire is not source.dtype
        if narrow:
            why = f"{DTYPE_NAMES[wire]} {why}"
            grad = self._flat(torch.Tensor.to, wire, grad, f"{grad}.low", why, wire)
        moved = f"{name}.low" if narrow else name
        b.buffers[moved] = Buffer(moved, wire, source.shape, "grad", source.bucket)
        writes = [Ref(moved)]
        if b.transport == "p2p":
            scratch = f"{name}.scratch"
            b.buffers[scratch] = Buffer(scratch, wire, (n - 1, bucket.length // n), "scratch")
            writes.append(Ref(scratch))
        b.emit(
            "all_reduce", [Ref(grad)], writes, axis=axis, why=why, op="sum", divisor=divisor, microbatch=m,
        )  # fmt: skip
        b.emit("wait", [Ref(moved)], why=why)
        return self._flat(torch.Tensor.to, source.dtype, moved, name, why, source.dtype) if narrow else name

    def _flat(
        self,
        fn: Callable[..., torch.Tensor],
        argument: Hashable,
        source: str,
        name: str,
        why: str,
        dtype: torch.dtype | None = None,
    ) -> str:
        """`fn(gradients, argument)`, elementwise, of a gradient bucket into another one, or in place."""
        b = self.to
        like = b.buffers[source]
        b.buffers[name] = Buffer(name, dtype or like.dtype, like.shape, "grad", like.bucket)
        for start, stop in self._spans(like):
            gm = b.elementwise(fn, argument, like=replace(like, shape=(stop - start,)), dest=True)
            b.segment("run", gm, [Ref(source, start, stop)], [Ref(name, start, stop)], why=why, flat=1)
        return name

    def _add(self, total: str, part: str, why: str) -> None:
        b = self.to
        source = b.buffers[total]
        for start, stop in self._spans(source):
            gm = b.elementwise(torch.add, arity=2, like=replace(source, shape=(stop - start,)), dest=True)
            both = [Ref(total, start, stop), Ref(part, start, stop)]
            b.segment("run", gm, both, [Ref(total, start, stop)], why=f"add {why}", flat=1)

    def _spans(self, gradients: Buffer) -> list[tuple[int, int]]:
        """(start, stop) of the ranges of a gradient bucket whose leaves have a gradient, with the padding after each.
        Leaves that are frozen or not used have none."""
        bucket = self.to.plan.buckets[gradients.bucket or ""]
        spans: list[tuple[int, int]] = []
        for index in sorted(self.slots[bucket.name].values()):
            start, stop = bucket.slots[index].start, bucket.end(index)
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        return spans

    def _plain(self, i: int, refs: list[Ref]) -> None:
        """Emits the sum over microbatches of the loss, an aux value or the gradient of a leaf that is not flat. Then
        reduces it whole."""
        b = self.to
        node = self.getitems.get(i)
        if node is None:
            return
        summed = i in self.region.summed
        if not summed and not self.region.values[i].dtype.is_floating_point:
            b.where[node] = refs[-1]
            return
        total = refs[0]
        for m, ref in enumerate(refs[1:], 1):
            gm = b.elementwise(torch.add, arity=2, like=b.buffers[total.name])
            added = b.new(f"{self.name}.sum{i}.{m}", self.region.values[i], "activation")
            b.segment("run", gm, [total, ref], [added], why="add over microbatches")
            total = added
        how = "sum" if summed else "mean"
        users = [u for u in node.users if u.target is REDUCE and u.args[1] == how] if b.plan.data_ranks > 1 else []
        what = "loss" if i == 0 else f"output {i}"
        for user in users:
            why = f"{how} of the {what} {line_of(user)}"
            name = f"{self.name}.{what.replace(' ', '')}"
            b.where[user] = b.exchange(total, user.meta["val"], name, how, self.k, why)
        if self.k > 1 and not summed and len(users) < len(node.users):
            gm = b.elementwise(torch.div, self.k, like=b.buffers[total.name])
            mean = b.new(f"{self.name}.mean{i}", self.region.values[i], "activation")
            b.segment("run", gm, [total], [mean], why=f"mean of the {what} over microbatches")
            total = mean
        b.where[node] = total

    def _slice(self, ref: Ref, like: torch.Tensor, m: int) -> Ref:
        chunk = like.numel() // self.k
        start = (ref.start or 0) + m * chunk
        return Ref(ref.name, start, start + chunk, (like.shape[0] // self.k, *like.shape[1:]))
