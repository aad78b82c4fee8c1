"""lower: Graph and Plan → the naive Program, which the passes then improve.

The naive program is the semantics sentence written out, with placements: gather every sharded column; run each region
whole, once per microbatch, its gradients written into flat buffers; all-reduce those; run the outer graph on full
tensors; keep the own slice of every new leaf. It is correct and wasteful, and every pass keeps its meaning.

Gradients: sum over ranks in rank order, one division by ranks x microbatches. `reduce="each"` reduces every
microbatch's bucket and adds the results; `"end"` adds first and reduces once. Losses and aux are added, then reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fzero import segments
from fzero._torch_compat import FakeTensorMode, make_fx
from fzero.capture import Graph, Region
from fzero.meaning import grad_places, graph_meaning
from fzero.plan.layout import TABLE, Plan, buffer_name
from fzero.program import Buffer, Op, Program, Ref, op

aten = torch.ops.aten
REDUCE = torch.ops.fzero.reduce.default
REGION = torch.ops.fzero.region.default


def build(graph: Graph, plan: Plan, *, reduce: str | None = None, via: str = "p2p") -> Program:
    """The naive program. `reduce` is "each", "end" or None (by stage); `via` names how bytes move: "p2p" or "nccl"."""
    builder = _Builder(graph, plan, reduce, via)
    builder.run()
    return Program(
        mesh=((plan.axis, plan.world_size),),
        buckets=plan.buckets,
        buffers=builder.buffers,
        ops=tuple(builder.ops),
        metrics=builder.metrics,
        meaning=graph_meaning(graph, plan, builder.reduce_of, builder.input_names),
        microbatches=max((region.microbatches for region in graph.regions), default=1),
        trainable=tuple(sorted(builder.trainable)),
        passes=("lower",),
        segments=builder.segments,
    )


@dataclass
class _Builder:
    graph: Graph
    plan: Plan
    reduce: str | None
    via: str
    buffers: dict[str, Buffer] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    where: dict[fx.Node, Ref] = field(default_factory=dict)
    trainable: set[str] = field(default_factory=set)
    input_names: list[str] = field(default_factory=list)

    def reduce_of(self, stage: int) -> str:
        return self.reduce or TABLE[stage].reduce

    def run(self) -> None:
        gm = fx.GraphModule(torch.nn.Module(), segments.copied(self.graph.gm.graph))
        self._own_outputs(gm)
        self.nodes = segments.placeholders(gm.graph)
        self._inputs()
        levels = _levels(gm.graph)
        results = segments.outputs(gm.graph)
        num = len(self.plan.leaves)
        self.new_leaf = {n: i for i, n in enumerate(results[:num]) if n is not self.nodes[i]}
        self.metric_nodes = set(results[num:])
        for level in range(max(levels.values(), default=0) + 1):
            here = [n for n, at in levels.items() if at == level and n.op == "call_function" and not _is_comm(n)]
            self._outer(here, level)
            for node in gm.graph.nodes:
                if _is_comm(node) and levels[node] == level + 1:
                    self._comm(node)
        self._updates()
        for name, node in zip(self.graph.metric_names, results[num:], strict=True):
            ref = self.where[node]
            self.metrics[name] = ref.name
            self.buffers[ref.name] = _with_kind(self.buffers[ref.name], "metric")

    # --- pieces

    def _own_outputs(self, gm: fx.GraphModule) -> None:
        """Every new leaf and metric gets a node of its own that computes it: a copy where it is an input, the result
        of a collective, or another leaf's value."""
        out = segments.output(gm.graph)
        inputs = segments.placeholders(gm.graph)
        num = len(self.plan.leaves)
        seen: set[fx.Node] = set()
        results = list(out.args[0])  # type: ignore[arg-type]
        for index, node in enumerate(results):
            unchanged = index < num and node is inputs[index]
            metric_of_reduce = index >= num and node.target is REDUCE and node not in seen
            borrowed = node in seen or node.op == "placeholder" or _is_comm(node) or segments.is_view(node)
            if borrowed and not unchanged and not metric_of_reduce:
                with gm.graph.inserting_before(out):
                    copy = gm.graph.call_function(aten.clone.default, (node,))
                copy.meta = {**node.meta}
                results[index] = copy
            seen.add(results[index])
        out.args = (results,)

    def _inputs(self) -> None:
        num = len(self.plan.leaves)
        self.buffers.update(self.plan.buffers)
        for node, leaf in zip(self.nodes, self.plan.leaves, strict=False):
            ref = self.plan.ref(leaf)
            if self.plan.buffers[leaf.buffer].shard:
                ref = Ref(self._gathered(leaf.buffer), ref.start, ref.stop, ref.shape)
            self.where[node] = ref
        names = [*(f"batch:{p}" for p in self.graph.batch_paths), *(f"const:{n}" for n in self.graph.constants)]
        for node, name in zip(self.nodes[num:], names, strict=True):
            kind = "batch" if name.startswith("batch:") else "constant"
            self.where[node] = self._new(name, node.meta["val"], kind)
            self.input_names.append(self.where[node].name)

    def _gathered(self, column: str) -> str:
        name = f"{column}.full"
        if name not in self.buffers:
            source = self.buffers[column]
            bucket = self.plan.buckets[source.bucket or ""]
            self.buffers[name] = Buffer(name, source.dtype, (bucket.length,), "gather", bucket.name)
            why = f"whole {bucket.name}"
            self._emit("gather", [Ref(column)], [Ref(name)], axis=self.plan.axis, via=self.via, why=why)
            self._emit("wait", [Ref(name)], why=why)
        return name

    def _outer(self, nodes: list[fx.Node], level: int) -> None:
        """All ordinary work of one level as one run on full tensors, new leaves written into flat `.new` buffers."""
        inside = set(nodes)
        inputs = _unique(a for n in nodes for a in n.all_input_nodes if a not in inside)
        dests, fresh = [], []
        for node in nodes:
            outside = [u for u in node.users if u not in inside and u.op != "output"]
            if node in self.new_leaf:
                dests.append(node)
            if outside or node in self.metric_nodes:
                fresh.append(node)
        if not dests and not fresh:
            return
        refs = []
        for node in dests:
            leaf = self.plan.leaves[self.new_leaf[node]]
            ref = self.plan.ref(leaf)
            new = f"{leaf.buffer}.new"
            if new not in self.buffers:
                old = self.buffers[leaf.buffer]
                shape = (self.plan.buckets[old.bucket].length,) if old.bucket else old.shape
                self.buffers[new] = Buffer(new, old.dtype, shape, "scratch", old.bucket)
            refs.append(Ref(new, ref.start, ref.stop, ref.shape))
        gm = segments.extract(nodes, inputs, [*dests, *fresh], dests)
        outs = [self._new(f"u{level}.{node.name}", node.meta["val"], "activation") for node in fresh]
        self.where.update(zip(fresh, outs, strict=True))
        reads = [self.where[n] for n in inputs]
        lines = _unique(n.meta["source"] for n in nodes if n.meta.get("source"))
        self._run("run", gm, reads, [*outs, *refs], why=f"outer {' '.join(lines[:3])}".strip(), phase="outer")

    def _comm(self, node: fx.Node) -> None:
        if node.target is REGION:
            _RegionBuilder(self, node).run()
        elif node.target is REDUCE and node not in self.where:
            source, how, axis = segments.operand(node), str(node.args[1]), node.args[2]
            if self.plan.world_size == 1:
                self.where[node] = self.where[source]
                return
            self.where[node] = self._reduce(
                self.where[source], node.meta["val"], f"{node.name}", how, 1, f"{how} over {axis} {_line(node)}"
            )

    def _reduce(self, source: Ref, like: torch.Tensor, name: str, how: str, parts: int, why: str) -> Ref:
        """An exchange of a small or odd-shaped value: everyone gets everyone's and adds in rank order."""
        n = self.plan.world_size
        result = self._new(name, like, "activation")
        scratch = self._new(f"{name}.scratch", like.new_empty((n - 1, max(like.numel(), 1))), "scratch")
        divisor = n * parts if how == "mean" else 1
        operation = "sum" if how == "mean" else how
        self._emit(
            "reduce", [source], [result, scratch], axis=self.plan.axis, why=why,
            mode="exchange", op=operation, divisor=divisor, via=self.via,
        )  # fmt: skip
        self._emit("wait", [result], why=why)
        return result

    def _updates(self) -> None:
        """Keeps the own part of every new leaf: one copy per run of changed leaves in a column."""
        changed: dict[str, set[int | None]] = {}
        for index in self.new_leaf.values():
            leaf = self.plan.leaves[index]
            changed.setdefault(leaf.buffer, set()).add(leaf.slot)
        for name, slots in changed.items():
            buffer = self.buffers[name]
            if None in slots:
                gm = _copy(torch.empty(buffer.shape, dtype=buffer.dtype, device="meta"))
                self._run("update", gm, [Ref(f"{name}.new")], [Ref(name)], why=f"keep {name}")
                continue
            bucket = self.plan.buckets[buffer.bucket or ""]
            for first, last in _ranges(sorted(s for s in slots if s is not None)):
                start, stop = bucket.slots[first].start, bucket.end(last)
                gm = _copy(torch.empty(stop - start, dtype=buffer.dtype, device="meta"))
                old, new = (Ref(b, start, stop, None, buffer.shard) for b in (name, f"{name}.new"))
                self._run("update", gm, [new], [old], why=f"keep {name}", flat=1)

    # --- records

    def _new(self, name: str, like: torch.Tensor, kind: str) -> Ref:
        name = buffer_name(name)
        while name in self.buffers:
            name += "_"
        self.buffers[name] = Buffer(name, like.dtype, tuple(like.shape), kind)
        return Ref(name)

    def _emit(
        self, kind: str, reads: Sequence[Ref], writes: Sequence[Ref] = (), *, axis: str | None = None, why: str = "",
        **attrs: int | str,
    ) -> None:  # fmt: skip
        self.ops.append(op(kind, reads, writes, axis=axis, why=why, **attrs))

    def _run(
        self,
        kind: str,
        gm: fx.GraphModule,
        reads: Sequence[Ref],
        writes: Sequence[Ref],
        *,
        why: str,
        **attrs: int | str,
    ) -> None:
        key = segments.digest(gm)
        self.segments.setdefault(key, gm)
        fresh = len(writes) - (len(segments.placeholders(gm.graph)) - len(reads))
        done = op(kind, reads, writes, why=why).with_attrs(segment=key, **attrs)
        self.ops.append(done.with_attrs(fresh=fresh) if fresh else done)


@dataclass
class _RegionBuilder:
    """Emits one region: its runs, the accumulation over microbatches, and the reductions of its gradients."""

    parent: _Builder
    node: fx.Node

    def run(self) -> None:
        b = self.parent
        index = int(self.node.args[1])  # type: ignore[arg-type]
        region: Region = b.graph.regions[index]
        self.region, self.name, self.k = region, f"r{index}", region.microbatches
        inputs: list[fx.Node] = list(self.node.args[0])  # type: ignore[arg-type]
        gm_outs = segments.outputs(region.gm.graph)
        self.getitems = {int(u.args[1]): u for u in self.node.users}  # type: ignore[arg-type]
        self.place = grad_places(region, inputs, b.nodes[: len(b.plan.leaves)], b.plan)
        self.dtype = {bucket: region.values[i].dtype for i, (bucket, _) in self.place.items()}
        b.trainable |= {f"{bucket}:{slot}" for bucket, slot in self.place.values()}
        dest_of = [i for i in range(len(gm_outs)) if i in self.place]
        fresh_of = [i for i in range(len(gm_outs)) if i not in self.place]
        holders = segments.placeholders(region.gm.graph)
        body = [n for n in region.gm.graph.nodes if n.op == "call_function"]
        dests = [gm_outs[i] for i in dest_of]
        gm = segments.extract(body, holders, [*dests, *(gm_outs[i] for i in fresh_of)], dests)
        parts: dict[int, list[Ref]] = {i: [] for i in range(len(gm_outs))}
        for m in range(self.k):
            reads = [self._slice(b.where[x], x.meta["val"], m) if cut else b.where[x]
                     for x, cut in zip(inputs, region.sliced, strict=True)]  # fmt: skip
            outs = [b._new(f"{self.name}.out{i}.{m}", region.values[i], "activation") for i in fresh_of]
            into = [self._grad_ref(i, m) for i in dest_of]
            why = f"loss and gradients {region.source}"
            b._run("run", gm, reads, [*outs, *into], why=why, phase="region", region=self.name, microbatch=m)
            for i, ref in zip([*fresh_of, *dest_of], [*outs, *into], strict=True):
                parts[i].append(ref)
            self._buckets(m)
        for i, refs in parts.items():
            if i not in self.place:
                self._plain(i, refs)

    def _grad_ref(self, i: int, m: int) -> Ref:
        b = self.parent
        bucket_name, index = self.place[i]
        bucket = b.plan.buckets[bucket_name]
        name = f"{self.name}.grad:{bucket_name}.{m}"
        if name not in b.buffers:
            b.buffers[name] = Buffer(name, self.dtype[bucket_name], (bucket.length,), "grad", bucket_name)
        slot = bucket.slots[index]
        return Ref(name, slot.start, slot.stop, slot.shape)

    def _buckets(self, m: int) -> None:
        """After microbatch m: reduce and add, or add and (after the last) reduce, every gradient bucket."""
        b = self.parent
        for name in self.dtype:
            grad = f"{self.name}.grad:{name}.{m}"
            why = f"gradients of {name}"
            each = b.reduce_of(b.plan.buckets[name].stage) == "each"
            if each:
                reduced = self._reduced(grad, m, why)
                first = reduced if m == 0 else f"{self.name}.red:{name}.0"
                if m:
                    self._add(first, reduced, why)
            elif m:
                self._add(f"{self.name}.grad:{name}.0", grad, why)
            if m == self.k - 1:
                final = first if each else self._reduced(f"{self.name}.grad:{name}.0", 0, why)
                for i, (bucket_name, index) in self.place.items():
                    if bucket_name == name and i in self.getitems:
                        slot = b.plan.buckets[name].slots[index]
                        for user in self.getitems[i].users:
                            b.where[user] = Ref(final, slot.start, slot.stop, slot.shape)

    def _reduced(self, grad: str, m: int, why: str) -> str:
        b = self.parent
        source = b.buffers[grad]
        n = b.plan.world_size
        bucket = b.plan.buckets[source.bucket or ""]
        name = f"{self.name}.red:{bucket.name}.{m}"
        if n == 1:
            return self._scaled(grad, name, why) if self.k > 1 else grad
        b.buffers[name] = Buffer(name, source.dtype, source.shape, "grad", source.bucket)
        writes = [Ref(name)]
        if b.via == "p2p":
            scratch = f"{name}.scratch"
            b.buffers[scratch] = Buffer(scratch, source.dtype, (n - 1, bucket.length // n), "scratch")
            writes.append(Ref(scratch))
        b._emit(
            "reduce", [Ref(grad)], writes, axis=b.plan.axis, why=why,
            mode="all", op="sum", divisor=n * self.k, via=b.via, microbatch=m,
        )  # fmt: skip
        b._emit("wait", [Ref(name)], why=why)
        return name

    def _scaled(self, grad: str, name: str, why: str) -> str:
        """A world of one: the mean over microbatches is all that is left."""
        b = self.parent
        source = b.buffers[grad]
        b.buffers[name] = Buffer(name, source.dtype, source.shape, "grad", source.bucket)
        gm = _elementwise(lambda x: torch.div(x, self.k), 1, source, dest=True)
        whole = (0, source.numel)
        b._run("run", gm, [Ref(grad, *whole)], [Ref(name, *whole)], why=why, flat=1)
        return name

    def _add(self, total: str, part: str, why: str) -> None:
        b = self.parent
        source = b.buffers[total]
        gm = _elementwise(torch.add, 2, source, dest=True)
        whole = (0, source.numel)
        b._run("run", gm, [Ref(total, *whole), Ref(part, *whole)], [Ref(total, *whole)], why=f"add {why}", flat=1)

    def _plain(self, i: int, refs: list[Ref]) -> None:
        """The loss, aux, or a gradient of what is no flat leaf: added over microbatches, then reduced whole."""
        b = self.parent
        node = self.getitems.get(i)
        if node is None:
            return
        total = refs[0]
        for m, ref in enumerate(refs[1:], 1):
            gm = _elementwise(torch.add, 2, b.buffers[total.name])
            added = b._new(f"{self.name}.sum{i}.{m}", self.region.values[i], "activation")
            b._run("run", gm, [total, ref], [added], why="add over microbatches")
            total = added
        means = [u for u in node.users if u.target is REDUCE and u.args[1] == "mean"] if b.plan.world_size > 1 else []
        what = "loss" if i == 0 else f"output {i}"
        for user in means:
            why = f"mean of the {what} {_line(user)}"
            name = f"{self.name}.{what.replace(' ', '')}"
            b.where[user] = b._reduce(total, user.meta["val"], name, "mean", self.k, why)
        if self.k > 1 and len(means) < len(node.users):
            gm = _elementwise(lambda x: torch.div(x, self.k), 1, b.buffers[total.name])
            mean = b._new(f"{self.name}.mean{i}", self.region.values[i], "activation")
            b._run("run", gm, [total], [mean], why=f"mean of the {what} over microbatches")
            total = mean
        b.where[node] = total

    def _slice(self, ref: Ref, like: torch.Tensor, m: int) -> Ref:
        chunk = like.numel() // self.k
        start = (ref.start or 0) + m * chunk
        return Ref(ref.name, start, start + chunk, (like.shape[0] // self.k, *like.shape[1:]))


# --- small helpers --------------------------------------------------------------------------------------------------


def _is_comm(node: fx.Node) -> bool:
    """Regions, reductions, and the picking of a region's outputs: what is emitted as other ops than one run."""
    if node.op != "call_function":
        return False
    picks = node.target.__name__ == "getitem" and node.args[0].target is REGION if callable(node.target) else False  # type: ignore[union-attr]
    return node.target in (REGION, REDUCE) or picks


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """When a node can run: one later than what it depends on through each region or reduction."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        ready = max((levels[a] for a in node.all_input_nodes), default=0)
        levels[node] = ready + (node.op == "call_function" and node.target in (REGION, REDUCE))
    return levels


def _elementwise(fn: Callable[..., torch.Tensor], arity: int, like: Buffer, dest: bool = False) -> fx.GraphModule:
    """The segment of one pointwise torch function over `arity` tensors like this buffer."""
    with FakeTensorMode():
        xs = [torch.empty(like.shape, dtype=like.dtype) for _ in range(arity)]
        gm = make_fx(fn)(*xs)
    inputs = segments.placeholders(gm.graph)
    body = [n for n in gm.graph.nodes if n.op == "call_function"]
    result = segments.output(gm.graph).args[0]
    assert isinstance(result, fx.Node)
    return segments.extract(body, inputs, [result], [result] if dest else [])


def _copy(like: torch.Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x0")
    dest = graph.placeholder("into0")
    done = graph.call_function(aten.copy_.default, (dest, value))
    with FakeTensorMode():
        fake = torch.empty(like.shape, dtype=like.dtype)
    for node in (value, dest, done):
        node.meta["val"] = fake
    graph.output([])
    return segments.module(graph)


def _ranges(slots: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot - 1:
            runs[-1] = (runs[-1][0], slot)
        else:
            runs.append((slot, slot))
    return runs


def _unique(items):  # type: ignore[no-untyped-def]
    return list(dict.fromkeys(items))


def _line(node: fx.Node) -> str:
    return str(node.meta.get("source") or "")


def _with_kind(buffer: Buffer, kind: str) -> Buffer:
    return replace(buffer, kind=kind) if buffer.kind in ("activation", "scratch", "metric") else buffer
