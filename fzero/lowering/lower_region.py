"""lower_region: one `value_and_grad` as ops: its joint graph once per microbatch, sums over these, reductions by rank.

Gradients of flat leaves are written into flat buffers, one per bucket and microbatch, and reduced by bucket. The loss,
aux and gradients of anything else are small or odd-shaped: they are added over microbatches and exchanged whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fzero.capture.graph import Graph, Region
from fzero.capture.step_ops import FED_MEAN, REDUCE
from fzero.ir import fx_nodes, kinds, segments
from fzero.ir.code_ops import CodeOps, encode_leaves
from fzero.ir.mesh import parts_of
from fzero.ir.op import StepPhase
from fzero.ir.records import DTYPE_NAMES, Buffer, Ref, SlotKey
from fzero.lowering.emit import Emitter, line_of
from fzero.lowering.lower_fed import Fed, owed
from fzero.plan.wires import AnyWire, CastTo, Elementwise, Wire
from fzero.shard.moves import Transition, transitions


@dataclass
class RegionBuilder:
    """Emits one region: its runs, the sums over microbatches, and the reductions of its gradients. places: of flat
    leaves, and of values that are like one."""

    to: Emitter
    graph: Graph
    places: Mapping[fx.Node, SlotKey]
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
        self.fed = {i: u for i in self.place for u in self._users(i) if u.target is FED_MEAN}
        self.wire = {bucket: self._wire(i, bucket) for i, (bucket, _) in self.place.items()}
        lies = {bucket: b.plan.bucket_layouts[bucket] for bucket in self.dtype}
        self.steps = {bucket: transitions(row.grad, row.rest) for bucket, row in lies.items()}
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
            reads = [_slice(b.where[x], x.meta["val"], m, self.k) if cut else b.where[x]
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
        """By output, the slot of the flat leaf whose gradient it is, or that is like what it is the gradient for. Of
        several for one place, the first; of several dtypes in a bucket, those of the first. Codes that feed back what
        they lose are for leaves alone."""
        fed = {i for i in self.getitems if any(user.target is FED_MEAN for user in self._users(i))}
        given = {1 + n: inputs[of] for n, of in enumerate(self.region.grad_of) if inputs[of] in self.places}
        outputs = {i: node for i, node in given.items() if node.op == "placeholder" or i not in fed}
        first = {self.places[node]: i for i, node in reversed(outputs.items())}
        found = {i: self.places[node] for i, node in outputs.items() if first[self.places[node]] == i}
        dtype = {key.bucket: self.region.values[i].dtype for i, key in reversed(found.items())}
        return {i: key for i, key in found.items() if self.region.values[i].dtype is dtype[key.bucket]}

    def _grad_ref(self, i: int, m: int) -> Ref:
        b = self.to
        bucket_name, index = self.place[i]
        bucket = b.plan.buckets[bucket_name]
        name = f"{self.name}.grad:{bucket_name}.{m}"
        if name not in b.buffers:
            b.buffers[name] = Buffer(name, self.dtype[bucket_name], (bucket.length,), "grad", bucket_name)
        slot = bucket.slots[index]
        return Ref(name, slot.start, slot.stop, slot.shape)

    def _wire(self, i: int, bucket: str) -> AnyWire | None:
        """How the gradients of a bucket travel, of which output i is one: as its layout asks, else in the dtype of the
        loss's precision; None: as they are."""
        held = self.region.values[i].dtype
        asked, wire = self.region.wire.get(i, held), self.to.plan.bucket_layouts[bucket].wire
        if wire is not None and (i in self.fed or not wire.feedback):
            return wire
        return None if asked is held else Wire(DTYPE_NAMES[asked], asked, CastTo(asked), CastTo(held))

    def _users(self, i: int) -> list[fx.Node]:
        """What reads an output in the outer graph."""
        return list(self.getitems[i].users) if i in self.getitems else []

    def _buckets(self, m: int) -> None:
        """Emits the sums and reductions of every gradient bucket after microbatch m. "each" reduces and then adds;
        "end" adds, and reduces after the last microbatch. Then each rank has of it what it updates; the rest of the
        step is written on all of it."""
        b = self.to
        for name in self.dtype:
            grad = f"{self.name}.grad:{name}.{m}"
            why = f"gradients of {name}"
            if each := self.reduce == "each":
                reduced = self._reduced(grad, m, why)
                first = self.first.setdefault(name, reduced)
                if m:
                    self._add(first, reduced, why)
            elif m:
                self._add(f"{self.name}.grad:{name}.0", grad, why)
            if m == self.k - 1:
                local = f"{self.name}.grad:{name}.0"
                if any(i in self.fed for i in self.slots[name]):
                    leaves = [Fed(self.fed[i], self.region.values[i], self._grad_ref(i, 0)) for i in self.slots[name]]
                    local = owed(b, leaves, 1 if self.summed else self.k, f"{self.name}.lost", why)
                final = first if each else self._reduced(local, 0, why)
                for step in self.steps[name][1:]:
                    final = self._summed(final, f"{final}.{step.axis}", step, 0, f"{why} over {step.axis}")
                if b.buffers[final].sharded:
                    final = b.whole(final, "grad", f"whole {why}")
                for i, index in self.slots[name].items():
                    slot = b.plan.buckets[name].slots[index]
                    reads = self._users(i) if i not in self.fed else [u for u in self.fed[i].users if not u.args[1]]
                    b.where.update(dict.fromkeys(reads, Ref(final, slot.start, slot.stop, slot.shape)))

    def _reduced(self, grad: str, m: int, why: str) -> str:
        """Emits the first of the transfers that sum a microbatch's gradient bucket over ranks. Returns the buffer of
        the result."""
        bucket = self.to.buffers[grad].bucket or ""
        if not self.steps[bucket]:
            dtype = self.to.buffers[grad].dtype
            return self._flat(torch.div, grad, grad, why, dtype, self.k) if self.k > 1 and not self.summed else grad
        return self._summed(grad, f"{self.name}.red:{bucket}.{m}", self.steps[bucket][0], m, why)

    def _summed(self, grad: str, name: str, step: Transition, m: int, why: str) -> str:
        """Emits a transfer that sums a gradient bucket over an axis, on its wire; the last one divides for the mean.
        Returns `name`, the buffer of the result."""
        wire, held = self.wire[self.to.buffers[grad].bucket or ""], self.to.buffers[grad].dtype
        if wire is None:
            return self._sent(grad, name, name, step, m, why)
        if isinstance(wire, CodeOps):
            return self._exchanged(wire, grad, name, step, m, why)
        why = f"{wire.name} {why}"
        coded = self._flat(wire.encode, grad, f"{grad}.low", why, wire.dtype)
        return self._flat(wire.decode, self._sent(coded, f"{name}.low", name, step, m, why), name, why, held)

    def _sent(self, grad: str, target: str, name: str, step: Transition, m: int, why: str) -> str:
        """Emits the transfer itself. name: of the result, once it is decoded. Returns `target`."""
        b = self.to
        source, n = b.buffers[grad], b.plan.mesh.size(step.axis)
        divisor = self._divisor(source.bucket or "", step)
        b.buffers[target] = made = replace(source, name=target)
        if step.kind == "reduce_scatter":
            b.buffers[target] = replace(made, sharded=_finer(source, step), shape=(source.numel // n,))
        scratch = []
        if room := kinds.of(step.kind).scratch(b.transport, source.numel, n):
            scratch = [Ref(f"{name}.scratch")]
            b.buffers[scratch[0].name] = Buffer(scratch[0].name, source.dtype, room, "scratch")
        attrs: dict[str, int | str] = {"op": "sum", "divisor": divisor, "microbatch": m}
        b.transfer(step, Ref(grad), target, why=why, scratch=scratch, **attrs)
        return target

    def _divisor(self, bucket: str, step: Transition) -> int:
        """What a sum over an axis is divided by: the last one for the mean."""
        ranks = self.to.plan.bucket_layouts[bucket].grad.parts
        return ranks * self.k if step is self.steps[bucket][-1] and not self.summed else 1

    def _exchanged(self, ops: CodeOps, grad: str, name: str, step: Transition, m: int, why: str) -> str:
        """Emits a sum over an axis by messages of blocks: each rank codes its gradients, gets its own slice of each
        rank's message, and adds up what they say. Along an axis in which ranks own no slices it gets and adds up all
        of each. Returns `name`, the buffer of what it has of the sum."""
        b = self.to
        source, n = b.buffers[grad], b.plan.mesh.size(step.axis)
        why, divisor = f"{ops.codec.name} {why}", self._divisor(source.bucket or "", step)
        slots, bucket = sorted(self.slots[source.bucket or ""].values()), b.plan.buckets[source.bucket or ""]
        own, cuts = source.sharded == bucket.axis, step.axis in parts_of(bucket.axis)
        kind, share = ("all_to_all", n) if cuts else ("all_gather_values", 1)
        sent, arrived, lies = f"{grad}.sent", f"{name}.arrived", _finer(source, step) if cuts else source.sharded
        size = int(source.numel / ops.per)
        b.buffers[sent] = replace(source, name=sent, dtype=torch.uint8, shape=(size,), per=ops.per)
        b.buffers[arrived] = replace(b.buffers[sent], name=arrived, shape=(size // share * n,), sharded=lies, parts=n)
        b.buffers[name] = replace(source, name=name, dtype=torch.float32, shape=(source.numel // share,), sharded=lies)
        leaves = [Ref(grad, bucket.slots[i].start, bucket.slots[i].stop, None, own) for i in slots]
        blocks = [Ref(sent, *bucket.place(i, ops.per)[:2], None, own) for i in slots]
        gm = encode_leaves(ops, source.dtype, [(ref.stop or 0) - (ref.start or 0) for ref in leaves])
        b.segment("run", gm, leaves, blocks, why=why, flat=1)
        b.transfer(replace(step, kind=kind), Ref(sent), arrived, why=why, microbatch=m)
        for ref in self._spans(b.buffers[name]):
            shape = n, int(((ref.stop or 0) - (ref.start or 0)) / ops.per)
            gm = b.elementwise(ops.decode_sum, divisor, like=replace(b.buffers[arrived], shape=shape), dest=True)
            b.segment("run", gm, [replace(ref, name=arrived)], [ref], why=why, flat=1)
        return name

    def _flat(
        self, fn: Elementwise, source: str, name: str, why: str, dtype: torch.dtype | None = None, *args: Hashable
    ) -> str:
        """`fn(gradients, *args)`, elementwise, of a gradient bucket, or the own slice of it, into another one, or in
        place."""
        b = self.to
        like = b.buffers[source]
        b.buffers[name] = replace(like, name=name, dtype=dtype or like.dtype)
        for ref in self._spans(like):
            gm = b.elementwise(fn, *args, like=replace(like, shape=((ref.stop or 0) - (ref.start or 0),)), dest=True)
            b.segment("run", gm, [ref], [replace(ref, name=name)], why=why, flat=1)
        return name

    def _add(self, total: str, part: str, why: str) -> None:
        b = self.to
        source = b.buffers[total]
        for ref in self._spans(source):
            like = replace(source, shape=((ref.stop or 0) - (ref.start or 0),))
            gm = b.elementwise(torch.add, arity=2, like=like, dest=True)
            b.segment("run", gm, [ref, replace(ref, name=part)], [ref], why=f"add {why}", flat=1)

    def _spans(self, gradients: Buffer) -> list[Ref]:
        """The ranges of a gradient bucket whose leaves have a gradient, with the padding after each: of a buffer that
        is the slice that the rank owns, its part. Leaves that are frozen or not used have none."""
        bucket = self.to.plan.buckets[gradients.bucket or ""]
        spans: list[tuple[int, int]] = []
        for index in sorted(self.slots[bucket.name].values()):
            start, stop = bucket.slots[index].start, bucket.end(index)
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        own = gradients.sharded == bucket.axis
        return [Ref(gradients.name, start, stop, None, own) for start, stop in spans]

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


def _slice(ref: Ref, like: torch.Tensor, m: int, k: int) -> Ref:
    """The rows of microbatch m of k."""
    chunk = like.numel() // k
    start = (ref.start or 0) + m * chunk
    return Ref(ref.name, start, start + chunk, (like.shape[0] // k, *like.shape[1:]))


def _finer(source: Buffer, step: Transition) -> str:
    """The axes along which what a sum over an axis leaves a rank is a slice."""
    return ".".join((*parts_of(source.sharded), step.axis))
