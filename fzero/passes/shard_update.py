"""shard_update: the outer graph's elementwise work runs on flat slices instead of full tensors.

After a reduction, a pointwise op gives the same bits on any slice, if its full-shaped operands are leaves of one place
(or computed from such) and its other operands are 0-d. Equal chains of neighbouring leaves of a bucket become one op on
their common range; a chain that differs (another weight decay) gets a range of its own. Work on blocks of 64 elements
(`OpInfo.blockwise`: quantised moments) runs on slices too, which never cut a block; its ranges end where padding would
join a block. Work on whole leaves (`OpInfo.flat_form`: a matrix's orthogonalisation) is done by the rank in whose slice
the leaf lies, and by no other. A leaf on several ranks is gathered, and all ranks do the work. A sum over a whole leaf
becomes a sum over the own slice, and one all-reduce adds all such scalars. Of a full value beside flat ones that all
ranks have (noise, a mean over ranks) each reads its slice. Other full work that needs a computed flat value
gathers it first. Everything else stays as it was. Columns that are kept whole (parameters under stages 1 and 2) are
gathered after their update. With the state sharded, each rank updates P/N elements instead of P.

    run grads.full[w] params.full[w] ... -> params.new[w]      (every leaf, every rank)
    becomes
    run red[0:L:mine] params.full[0:L:mine] ... -> params.new[0:L:mine]   flat=1   (one op a bucket)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fzero.ir import forms, fx_nodes, fx_values, kinds, rewrite, segments
from fzero.ir.leafwise import LeafCall, leafwise
from fzero.ir.op import Op, StepPhase, make_op
from fzero.ir.op_info import of
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref, SlotKey, buffer_name
from fzero.passes.common.outer_order import by_bucket, into_levels, only_gathered, updates_slices
from fzero.passes.common.outer_run import OuterRun
from fzero.passes.common.own_slices import own_slices
from fzero.passes.common.varying_buffers import varying_buffers
from fzero.plan.whole_leaves import is_whole
from fzero.shard.layouts import Layout
from fzero.shard.moves import transitions
from fzero.shard.placements import Flat


def shard_update(program: Program) -> Program:
    """The program with elementwise work of the step on slices of buckets instead of full tensors."""
    pool: dict[str, fx.GraphModule] = {}
    buffers = dict(program.buffers)
    kept_in = {op.reads[0].name: op.writes[0].name for op in program.ops if op.is_update}
    ops, varying = [], varying_buffers(program)
    for index, op in enumerate(program.ops):
        if op.is_run and op.phase is StepPhase.OUTER:
            ops += _Outer(OuterRun(program, op, buffers, varying), index, pool, kept_in).rewritten()
        else:
            ops.append(op)
    ops = _without_unread(ops)
    return rewrite.finish(program, "shard_update", ops=ops, buffers=buffers, new_segments=pool)


def _without_unread(ops: list[Op]) -> list[Op]:
    """Without gathers of a column that another one gathers again before anyone reads it whole."""
    dropped: set[int] = set()
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        if op.gathers:
            name = op.writes[0].name
            if name in last:
                dropped |= {last[name], next(j for j in range(last[name], i) if ops[j].is_wait and
                                             ops[j].reads[0].name == name)}  # fmt: skip
            last[name] = i
        elif not op.is_wait:
            for ref in op.reads:
                if not ref.mine:
                    last.pop(ref.name, None)
    return [op for i, op in enumerate(ops) if i not in dropped]


@dataclass
class _Outer:
    """One outer run on full tensors, being rewritten. `pool` and the run's buffers receive the new segments and
    buffers. kept_in: by column of new leaves, the column of the state that an update keeps them in."""

    run: OuterRun
    index: int
    pool: dict[str, fx.GraphModule]
    kept_in: Mapping[str, str]
    ops: list[Op] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)  # made here
    whole: set[str] = field(default_factory=set)  # gathered here, and not written since
    flat: dict[Any, fx.GraphModule] = field(default_factory=dict)  # segments that were made

    def rewritten(self) -> list[Op]:
        """The ops that replace the outer run, level by level; the run itself where nothing in it is flat, and all of
        it works on one bucket."""
        self.run.sort_out()
        into_levels(self.run)
        parts = self.run.partial or any(n in self.run.slot_key for n in self.run.nodes)
        if not parts and len(by_bucket(self.run, self.run.nodes)) == 1:
            return [self.run.op]
        for level in range(max(self.run.level.values(), default=0) + 1):
            here = [n for n in self.run.nodes if self.run.level[n] == level]
            self._full([n for n in here if n not in self.run.slot_key and n not in self.run.partial], level)
            sums = [n for n in here if n in self.run.partial]
            self._flat([n for n in here if n in self.run.slot_key and n not in self.run.owned], level, bool(sums))
            self._owned([n for n in here if n in self.run.owned], level)
            self._sums(sums, level)
        for name in dict.fromkeys(self.gathers):
            self._gather(name)
        self.run.buffers.update(own_slices(self.run.program, self.run.buffers, self.columns, self.ops))
        return self.ops

    def _run_of(self, gm: fx.GraphModule, reads: list[Ref], writes: list[Ref], **attrs: int | str) -> Op:
        """A run of a new segment in the place of the outer run."""
        done = rewrite.run_op(self.run.op, gm, reads, writes, **attrs)
        self.pool.setdefault(done.segment, gm)
        return done

    def _emit(self, op: Op) -> None:
        self.ops.append(op)
        names = {ref.name for ref in op.writes}
        (self.whole.update if op.gathers else self.whole.difference_update)(names)

    # --- full work

    def _full(self, nodes: list[fx.Node], level: int) -> None:
        """Emits the full nodes, those of a bucket as one run; gathers the flat values that a run needs before it."""
        for group in by_bucket(self.run, [n for n in nodes if n.users or n in self.run.outputs]):
            self._emit_full(group)

    def _emit_full(self, nodes: list[fx.Node]) -> None:
        run, inside = self.run, set(nodes)
        inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        dests = [n for n in nodes if n in run.dest or n in run.cut]
        needed = [n for n in nodes if n in run.outputs or any(u in run.level and u not in inside for u in n.users)]
        outputs = [n for n in needed if n not in run.cut]
        gm = segments.extract(nodes, inputs, [*dests, *outputs], dests)
        for node in outputs:
            run.where[node] = run.outputs.get(node) or self._new(f"u{self.index}.{node.name}", node.meta["val"])
        places = [run.dest[n] if n in run.dest else self._column_of(n, run.cut[n]) for n in dests]
        writes = [*(run.where[n] for n in outputs), *places]
        self._emit(self._run_of(gm, [self._whole(n) for n in inputs], writes))

    def _whole(self, node: fx.Node) -> Ref:
        """Where all of a value is; a stored flat value is gathered into place for it."""
        if node not in self.run.where:
            name = self.run.stored[node]
            bucket, index = self.run.slot_key[node]
            self.run.where[node] = Ref(name, *self.run.program.buckets[bucket].place(index, self.run.block_size[node]))
            if updates_slices(self.run.program, bucket):
                self._gather(name)
        return self.run.where[node]

    def _gather(self, name: str) -> None:
        if name in self.whole:
            return
        length, why = self.run.program.extent(self.run.buffers[name]), f"whole {name}"
        axes = self.run.program.buckets[self.run.buffers[name].bucket or ""].axis
        for step in transitions(Layout.over(self.run.program.mesh, axes, Flat()), Layout()):
            own = Ref(name, 0, length, None, True)
            self._emit(make_op(step.kind, [own], [Ref(name)], axis=step.axis, why=why))
            self._emit(make_op("wait", [Ref(name)], why=why))

    def _new(self, name: str, like: torch.Tensor) -> Ref:
        name = buffer_name(name)
        self.run.buffers[name] = Buffer(name, like.dtype, tuple(like.shape), "activation")
        return Ref(name)

    def _column_of(self, node: fx.Node, slot_key: SlotKey) -> Ref:
        """The place of a full value in a column of the bucket whose slices flat work reads. Equal leaves of a bucket
        share one, so that their work is one op."""
        value, (bucket, slot) = node.meta["val"], slot_key
        number = sum(1 for c, key in self.run.cut.items() if key == slot_key and c in self.run.stored)
        name = buffer_name(f"w{self.index}.{number}.{str(value.dtype).rsplit('.')[-1]}:{bucket}")
        shape = (self.run.program.buckets[bucket].length,)
        self.run.buffers.setdefault(name, Buffer(name, value.dtype, shape, "scratch", bucket))
        self.run.stored[node] = name
        return Ref(name, *self.run.program.buckets[bucket].place(slot))

    # --- flat work

    def _flat(self, nodes: list[fx.Node], level: int, waits: bool) -> None:
        """Emits flat nodes. waits: what follows waits for a sum; then those come last that are only gathered."""
        last = only_gathered(self.run, nodes) if waits else set()
        self._by_leaf([n for n in nodes if n not in last], level)
        self._by_leaf([n for n in nodes if n in last], level, "g")

    def _by_leaf(self, nodes: list[fx.Node], level: int, letter: str = "f") -> None:
        """Emits flat nodes: one run for each range of neighbouring leaves whose chains are equal. letter: of the names
        of their columns."""
        by_slot: dict[str, dict[int, list[fx.Node]]] = {}
        for node in nodes:
            bucket, slot = self.run.slot_key[node]
            by_slot.setdefault(bucket, {}).setdefault(slot, []).append(node)
        for bucket, chains in by_slot.items():
            slots = sorted(chains)
            for slot in slots:
                self._store(bucket, chains[slot], level, letter)
            runs: list[list[int]] = []
            signs = {slot: _signature(self.run, chains[slot]) for slot in slots}
            for slot in slots:
                alike = runs and runs[-1][-1] == slot - 1 and signs[runs[-1][-1]] == signs[slot]
                slots_of = self.run.program.buckets[bucket].slots
                apart = slot and slots_of[slot - 1].stop < slots_of[slot].start  # padding, which no block may take in
                if alike and not (apart and any(of(n.target).blockwise for n in chains[slot])):
                    runs[-1].append(slot)
                else:
                    runs.append([slot])
            for run in runs:
                self._emit_flat(bucket, run, chains[run[0]])

    def _store(self, bucket: str, chain: list[fx.Node], level: int, letter: str) -> None:
        """Gives a column to every value of a leaf's chain that someone outside the chain needs."""
        inside = set(chain)
        for position, node in enumerate(chain):
            if node in self.run.dest:
                self.run.stored[node] = self.run.dest[node].name
                column = self.kept_in.get(self.run.dest[node].name)
                whole = column is not None and not self.run.buffers[column].sharded
                if whole and updates_slices(self.run.program, bucket):
                    self.gathers.append(self.run.dest[node].name)
            elif any(u in self.run.level and u not in inside for u in node.users):
                dtype = fx_values.tensors(node.meta["val"])[0].dtype
                kind = str(dtype).rsplit(".")[-1]
                name = buffer_name(f"{letter}{self.index}.{level}.{position}.{kind}:{bucket}")
                shape = (self.run.program.buckets[bucket].length // self.run.block_size[node],)
                self.run.buffers.setdefault(
                    name, Buffer(name, dtype, shape, "scratch", bucket, per=self.run.block_size[node])
                )
                self.run.stored[node] = name
                self.columns.add(name)

    # --- whole leaves

    def _owned(self, nodes: list[fx.Node], level: int) -> None:
        """Per bucket, one run that works on the leaves in the own slice; what is cut is gathered, for all to do."""
        by_bucket: dict[str, list[fx.Node]] = {}
        for node in nodes:
            by_bucket.setdefault(self.run.slot_key[node][0], []).append(node)
        for name, group in by_bucket.items():
            bucket = self.run.program.buckets[name]
            reads, writes, calls = [], [], []
            for node in sorted(group, key=lambda n: self.run.slot_key[n][1]):
                source, index = fx_nodes.operand(node), self.run.slot_key[node][1]
                start, stop, shape = bucket.place(index)
                own_slice = updates_slices(self.run.program, name) and is_whole(
                    bucket, index, self.run.program.mesh.size(bucket.axis)
                )
                self._store(name, [node], level, "o")
                if updates_slices(self.run.program, name) and not own_slice and source not in self.run.where:
                    self._gather(self.run.stored[source])
                reads.append(Ref(self.run.stored[source], start, stop, None, own_slice))
                writes.append(Ref(self.run.stored[node], start, stop, None, own_slice))
                args = (list(shape), *node.args[1:])
                target, value = of(node.target).flat_form, node.meta["val"]
                calls.append(LeafCall(target, source.meta["val"], value, stop - start, args, gives=stop - start))
            done = self._run_of(leafwise(calls), reads, writes)
            names = [bucket.slots[self.run.slot_key[n][1]].path for n in group]
            self._emit(replace(done, why=f"whole {names[0]}" + (f" .. {names[-1]}" if len(names) > 1 else "")))

    def _emit_flat(self, bucket_name: str, slots: list[int], chain: list[fx.Node]) -> None:
        """Emits one chain of flat nodes on the common range of these slots."""
        bucket = self.run.program.buckets[bucket_name]
        start, stop = bucket.slots[slots[0]].start, bucket.end(slots[-1])
        if any(of(n.target).blockwise for n in chain):
            stop = bucket.slots[slots[-1]].stop
        own_slice = updates_slices(self.run.program, bucket_name)
        inside = set(chain)
        inputs = list(dict.fromkeys(a for n in chain for a in n.all_input_nodes if a not in inside))
        results = [n for n in chain if n in self.run.stored]
        length = min(stop - start, self.run.program.slice_length(bucket)) if own_slice else stop - start
        gm = _flat_segment(self.run, self.flat, chain, inputs, results, length)

        def part(node: fx.Node) -> Ref:
            size = self.run.block_size.get(node, 1)
            return Ref(self.run.stored[node], start, -(-stop // size) * size, None, own_slice)

        reads = [part(n) if n in self.run.slot_key or n in self.run.cut else self.run.where[n] for n in inputs]
        writes = [part(n) for n in results]
        names = [bucket.slots[i].path for i in slots]
        why = f"update {names[0]}" + (f" .. {names[-1]}" if len(names) > 1 else "")
        done = self._run_of(gm, reads, writes, flat=1)
        self._emit(replace(done, why=why))

    # --- sums

    def _sums(self, nodes: list[fx.Node], level: int) -> None:
        """All sums of a level and dtype: one run of local sums into a vector, one all-reduce of it."""
        by_dtype: dict[torch.dtype, list[fx.Node]] = {}
        for node in nodes:
            by_dtype.setdefault(node.meta["val"].dtype, []).append(node)
        for dtype, group in by_dtype.items():
            name = f"s{self.index}.{level}.{str(dtype).rsplit('.')[-1]}"
            self.run.buffers[name] = Buffer(name, dtype, (len(group),), "activation")
            reads, calls = [], []
            first = self.run.slot_key[fx_nodes.operand(group[0])][0]
            distributed = self.run.program.is_shared(first)
            for node in group:
                source = fx_nodes.operand(node)
                bucket, index = self.run.slot_key[source]
                slot = self.run.program.buckets[bucket].slots[index]
                reads.append(Ref(self.run.stored[source], slot.start, slot.stop, None, distributed))
                kwargs = tuple(node.kwargs.items())
                calls.append(
                    LeafCall(node.target, source.meta["val"], node.meta["val"], slot.stop - slot.start, kwargs=kwargs)
                )
            writes = [Ref(name, i, i + 1, ()) for i in range(len(group))]
            self._emit(self._run_of(leafwise(calls), reads, writes))
            axis = self.run.program.mesh.in_order(self.run.program.buckets[first].axis)
            total = self._reduced(name, axis, f"sum of {len(group)} leaves") if distributed else name
            for i, node in enumerate(group):
                self.run.where[node] = Ref(total, i, i + 1, ())
                if node in self.run.outputs:  # someone outside knows it by a name of its own
                    gm = segments.extract([], [node], [node])
                    self._emit(self._run_of(gm, [self.run.where[node]], [self.run.outputs[node]]))

    def _reduced(self, name: str, axis: str, why: str) -> str:
        source = self.run.buffers[name]
        total, scratch = f"{name}.all", f"{name}.scratch"
        n, refs = self.run.program.mesh.size(axis), [Ref(total)]
        self.run.buffers[total] = Buffer(total, source.dtype, source.shape, "activation")
        if room := kinds.of("all_reduce_small").scratch(self.run.program.transport, source.numel, n):
            self.run.buffers[scratch] = Buffer(scratch, source.dtype, room, "scratch")
            refs.append(Ref(scratch))
        self._emit(make_op("all_reduce_small", [Ref(name)], refs, axis=axis, why=why, op="sum", divisor=1))
        self._emit(make_op("wait", [Ref(total)], why=why))
        return total


def _flat_segment(
    run: OuterRun, made: dict[Any, fx.GraphModule], chain: list[fx.Node], inputs: list[fx.Node],
    results: list[fx.Node], length: int,
) -> fx.GraphModule:  # fmt: skip
    """The segment of a chain on so many elements: one for all that are alike, as those of equal layers. made: those
    there are; receives it."""
    wanted: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []
    for node in [*inputs, *results]:
        value = node.meta["val"]
        flat = node in run.slot_key or node in run.cut
        shape = (-(-length // run.block_size.get(node, 1)),) if flat else tuple(value.shape)
        wanted.append((shape, value.dtype, value.device))
    number = {node: f"%{i}" for i, node in enumerate([*inputs, *chain])}
    calls = tuple((n.target, repr(fx.node.map_arg((n.args, n.kwargs), number.__getitem__))) for n in chain)
    key = calls, tuple(wanted), tuple(number[node] for node in results)
    if key not in made:
        gm = made[key] = segments.extract(chain, inputs, results, results)
        with fx_values.mode_of(chain[0].meta["val"]):
            fakes = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in wanted]
        forms.propagate(gm, fakes)
    return made[key]


def _signature(run: OuterRun, chain: list[fx.Node]) -> tuple[object, ...]:
    """The work of a leaf's chain, in a form that is equal for an equal chain of another leaf."""
    number = {node: i for i, node in enumerate(chain)}

    def name(node: fx.Node) -> str:
        if node in number:
            return f"%{number[node]}"
        return f"column {run.stored[node]}" if node in run.slot_key or node in run.cut else f"scalar {node.name}"

    return tuple(
        (str(node.target), repr(fx.node.map_arg((node.args, node.kwargs), name)), run.stored.get(node))
        for node in chain
    )
