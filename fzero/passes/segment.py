"""segment: a region's one big run is cut where the parameters in use change.

A *unit* is a layer's buckets (`common/units`). Nodes are taken in the order of the joint graph. A new segment begins
where a node uses a unit that the segment does not use. In the backward it also begins where a node feeds only the
gradients of such a unit, and, behind the last use of the segment's own units, where one reads what only the forward of
the next unit makes and reads: a gate at the end of a layer belongs to its backward. In a pipeline it also begins where
the chunk changes (`pipeline/chunks`), and each run says its chunk. Each says its phase: equal layers share a segment,
so what is forward cannot be read off it. A transfer within the region (`fzero.shard.ops`) is an op of the program,
between two segments.
A value that crosses a border becomes a buffer. Equal layers give segments of equal text, hence one hash: 12 layers, 5
segments.

    run x w0 w1 wte -> loss g0 g1 gte
    becomes   run x wte -> a0;  run a0 w0 -> a1;  run a1 w1 -> a2;  run a2 wte -> loss a3 a4;  run a3 w1 -> a5 g1; ...
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import torch
from torch import fx

from fzero.ir import fx_nodes, fx_values, kinds, rewrite, segments
from fzero.ir.op import Op, StepPhase, make_op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref
from fzero.passes.common.units import units_of, uses_of
from fzero.passes.pipeline.chunks import node_chunks, root
from fzero.passes.rematerialise_views import MadeAnew, again
from fzero.shard.ops import TRANSFERS

aten = torch.ops.aten
COPY = aten.copy_.default
MANY = 16  # parts of a value, each of which a turn of a loop copies
ANYWHERE = (aten._to_copy.default, aten.clone.default)  # work that may stand in either phase


def segment(program: Program, chunk_of: Mapping[str, int] | None = None) -> Program:
    """The program with each region's one run cut into segments, where the parameters in use change.

    chunk_of: in a pipeline, the chunk of each bucket of a numbered layer.
    """
    pool: dict[str, fx.GraphModule] = {}
    buffers = dict(program.buffers)
    cuts: dict[tuple[object, ...], list[_Piece]] = {}
    made: dict[str, fx.GraphModule] = {}
    ops: list[Op] = []
    for op in program.ops:
        if not op.in_region:
            ops.append(op)
            continue
        key = (op.segment, tuple(program.buffers[r.name].bucket for r in (*op.reads, *op.writes)))
        if key not in cuts:
            cuts[key] = _cut(program, op, chunk_of or {}, made)
        ops += _instantiated(op, cuts[key], buffers, pool, program.transport)
    return rewrite.finish(program, "segment", ops=ops, buffers=buffers, new_segments=pool)


@dataclass
class _Piece:
    """A segment of a region: its graph, and the nodes of the region that its inputs and results stand for. Without a
    graph it is a transfer of its input."""

    gm: fx.GraphModule | None
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    dests: list[fx.Node]  # placeholders of the region that are written
    phase: StepPhase
    why: str
    chunk: int | None


def _instantiated(
    op: Op, pieces: list[_Piece], buffers: dict[str, Buffer], pool: dict[str, fx.GraphModule], transport: str
) -> list[Op]:
    """One run for each piece of a region's run; adds buffers for values that cross a border."""
    region, m = op.region, op.microbatch
    where: dict[fx.Node, Ref] = {}
    num_outputs = op.num_outputs
    graph = next(node.graph for piece in pieces for node in (*piece.inputs, *piece.dests, *piece.outputs))
    inputs = fx_nodes.placeholders(graph)
    where.update(zip(inputs, [*op.reads, *op.writes[num_outputs:]], strict=True))
    finals = dict(zip(fx_nodes.outputs(graph), op.writes[:num_outputs], strict=True))
    ops = []
    for number, piece in enumerate(pieces):
        for i, node in enumerate(piece.outputs):
            if node in finals:
                where[node] = finals[node]
            else:
                name = f"{region}.h{number}.{i}.{m}"
                value = fx_values.tensors(node.meta["val"])[0]
                buffers[name] = Buffer(name, value.dtype, tuple(value.shape), "activation")
                where[node] = Ref(name)
        reads = [where[n] for n in piece.inputs]
        writes = [*(where[n] for n in piece.outputs), *(where[n] for n in piece.dests)]
        if piece.gm is None:
            ops += _transfer(op, piece, reads[0], writes[0], buffers, transport)
            continue
        done = rewrite.run_op(op, piece.gm, reads, writes)
        pool.setdefault(done.segment, piece.gm)
        done = replace(done, axis=None, why=piece.why).with_attrs(phase=piece.phase)
        ops.append(done if piece.chunk is None else done.with_attrs(chunk=piece.chunk))
    return ops


def _transfer(op: Op, piece: _Piece, source: Ref, target: Ref, buffers: dict[str, Buffer], transport: str) -> list[Op]:
    """The start of a transfer within a region, and its wait."""
    (node,) = piece.outputs
    _, axis, n, *how = (str(x) for x in node.args)
    kind, size, dtype = TRANSFERS[node.target], buffers[source.name].numel, buffers[source.name].dtype
    attrs: dict[str, int | str] = {} if piece.chunk is None else {"chunk": piece.chunk}
    if "reduce" in kind:
        attrs |= {"op": how[0] if kind == "all_reduce" else "sum", "divisor": 1}
    if kind == "all_reduce" and size % int(n):
        kind = "all_reduce_small"
    writes = [target]
    if room := kinds.of(kind).scratch(transport, size, int(n)):
        scratch = f"{target.name}.scratch"
        buffers[scratch] = Buffer(scratch, dtype, room, "scratch")
        writes.append(Ref(scratch))
    start = make_op(
        kind, [source], writes, axis=axis, why=piece.why, region=str(op.region), microbatch=op.microbatch,
        phase=piece.phase, **attrs,
    )  # fmt: skip
    return [start, make_op("wait", [target], why=piece.why)]


@dataclass
class _Group:
    """Nodes that become one segment, the units that they use, and their chunk in a pipeline. transfers: it is one
    transfer alone."""

    nodes: list[fx.Node] = field(default_factory=list)
    units: set[str] = field(default_factory=set)
    chunk: int | None = None
    transfers: bool = False


def _cut(program: Program, op: Op, chunk_of: Mapping[str, int], made: dict[str, fx.GraphModule]) -> list[_Piece]:
    """The pieces of a region's segment, in order. In a pipeline it is cut twice: the first cut of the forward says
    which chunk has which node, and so which chunk each node of the backward belongs to. made: graphs of pieces, by
    what they are cut from."""
    gm = program.segments[op.segment]
    holders = fx_nodes.placeholders(gm.graph)
    refs = [*op.reads, *op.writes[op.num_outputs :]]
    bucket_of = {h: b for h, r in zip(holders, refs, strict=True) if (b := program.buffers[r.name].bucket) is not None}
    made_anew = again(set(bucket_of))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not COPY]
    nodes = nodes if chunk_of else _parts_first(nodes, made_anew)
    uses = uses_of(gm, nodes, bucket_of, made_anew)
    unit = units_of(program, nodes, uses)
    units = {node: {unit[b] for b in used} for node, used in uses.items()}
    groups = _grouped(nodes, units, {}, made_anew)
    if chunk_of:
        chunk = node_chunks([group.nodes for group in groups], bucket_of, chunk_of, made_anew)
        at_home = {n: [b for b in used if chunk_of.get(b, chunk[n]) == chunk[n]] for n, used in uses.items()}
        units = {node: {unit[b] for b in used} for node, used in at_home.items()}
        groups = _grouped(nodes, units, chunk, made_anew)
    return _pieces(gm, groups, made_anew, made)


def _parts_first(nodes: list[fx.Node], made_anew: MadeAnew) -> list[fx.Node]:
    """The nodes, with the copies of many parts of a value (of a loop over its rows) right behind it. Else a turn
    of the loop would be a segment of its own, for it has the number of its part."""
    parts: dict[fx.Node, dict[str, list[fx.Node]]] = {}
    for node in nodes:
        if node.target is aten.clone.default and not node.meta.get("phase") and not made_anew(node):
            views = [node]
            while made_anew(fx_nodes.operand(views[0])):
                views.insert(0, fx_nodes.operand(views[0]))
            taken = " ".join(f"{view.target} {view.args[1:]}" for view in views[:-1])
            parts.setdefault(fx_nodes.operand(views[0]), {})[taken] = views
    loops = {value: [*chain.from_iterable(x.values())] for value, x in parts.items() if len(x) >= MANY}
    moved = {node for copies in loops.values() for node in copies}
    first = [node for value, copies in loops.items() if value.op == "placeholder" for node in copies]
    rest = (x for node in nodes if node not in moved for x in (node, *loops.get(node, ())))
    return [*first, *rest]


def _grouped(
    nodes: list[fx.Node], units: Mapping[fx.Node, set[str]], chunk: Mapping[fx.Node, int], made_anew: MadeAnew
) -> list[_Group]:
    """The nodes in groups, by the units that each uses and by its chunk, if it has one."""
    groups = [_Group()]
    waiting: list[fx.Node] = []
    group_of: dict[fx.Node, _Group] = {}
    for node in nodes:
        if made_anew(node):
            waiting.append(node)  # it goes where its user goes, the next node that is no view
            continue
        if node.target is operator.getitem:
            group_of[node] = group_of[fx_nodes.operand(node)]  # a tuple never crosses a border
            group_of[node].nodes.append(node)
            continue
        if groups[-1].transfers and chunk.get(node) != groups[-1].chunk:
            groups.append(_Group(chunk=groups[-1].chunk))  # for gradients that the transfer brings
        used, last = units.get(node, set()), groups[-1]
        if node.target in TRANSFERS:
            groups.append(_Group([node], set(last.units), chunk.get(node), transfers=True))
            group_of[node] = groups[-1]
            continue
        if not group_of:
            last.chunk = chunk.get(node)
        elif (last.units and used - last.units) or chunk.get(node) != last.chunk:
            groups.append(_Group(chunk=chunk.get(node)))
        elif last.transfers:
            groups.append(_Group(units=set(last.units), chunk=last.chunk))
        groups[-1].units |= used
        groups[-1].nodes += [*waiting, node]
        group_of[node] = groups[-1]
        waiting = []
    if groups[-1].transfers:
        groups.append(_Group(chunk=groups[-1].chunk))
    groups[-1].nodes += waiting
    earlier: set[fx.Node] = set()  # of the groups before
    for i in range(len(groups) - 1):
        if groups[i].chunk == groups[i + 1].chunk and not (groups[i].transfers or groups[i + 1].transfers):
            _move_prelude(groups[i], groups[i + 1], earlier, units, made_anew)
        earlier.update(groups[i].nodes)
    inner = _inner(groups, made_anew)
    for this, following in pairwise(groups):
        if this.chunk == following.chunk and not (this.transfers or following.transfers):
            _move_inner(this, following, inner, units, made_anew)
    return groups


def _readers(node: fx.Node, made_anew: MadeAnew) -> set[fx.Node]:
    """The nodes of the forward that read a value, or a view of it."""
    reached: set[fx.Node] = set()
    for user in node.users:
        reached |= _readers(user, made_anew) if made_anew(user) else {user}
    return {u for u in reached if not u.meta.get("phase")}


def _inner(groups: list[_Group], made_anew: MadeAnew) -> dict[fx.Node, set[str]]:
    """By value that the forward of one group alone makes and reads, the units of that group."""
    inner: dict[fx.Node, set[str]] = {}
    for group in groups:
        own = set(group.nodes)
        for node in group.nodes:
            if not node.meta.get("phase") and not made_anew(node) and _readers(node, made_anew) <= own:
                inner[node] = group.units
    return inner


def _move_inner(
    this: _Group, following: _Group, inner: Mapping[fx.Node, set[str]], used: Mapping[fx.Node, set[str]],
    made_anew: MadeAnew,
) -> None:  # fmt: skip
    """Moves the nodes of the backward, from the first on that reads an inner value of the next segment's layer, to it.
    Else that layer's forward would be made again for the segment before, too. In place."""
    group, units = this.nodes, following.units - this.units
    start = max((n for n, node in enumerate(group) if node in used), default=-1) + 1
    for cut in range(start, len(group)):
        read = (root(a, made_anew) for a in group[cut].all_input_nodes)
        if group[cut].meta.get("phase") and any(units & inner.get(a, set()) for a in read):
            while cut > start and made_anew(group[cut - 1]):
                cut -= 1
            this.nodes, following.nodes = group[:cut], [*group[cut:], *following.nodes]
            return


def _move_prelude(
    this: _Group, following: _Group, earlier: Set[fx.Node], used: Mapping[fx.Node, set[str]], made_anew: MadeAnew
) -> None:
    """Moves the nodes after the last use of a parameter to the next segment, where fewer bytes cross the border then.
    So a layer that begins with a norm begins before the norm, at the one value that the last layer left. In place."""
    group, after = this.nodes, following.nodes
    start = max((n for n, node in enumerate(group) if node in used), default=-1) + 1
    while start < len(group) and group[start].target is operator.getitem:
        start += 1
    tail = group[start:]
    nodes = [n for n in (*tail, *after) if not made_anew(n)]
    if not tail or any(n.meta.get("phase") for n in nodes[: len(tail) + 1]):
        return

    def crossing(cut: int) -> int:
        kept = set(group[: start + cut])
        candidates = dict.fromkeys(
            [*group[: start + cut], *(a for n in tail for a in n.all_input_nodes if n not in kept)]
        )
        values = [n for n in candidates if n.op == "call_function" and not made_anew(n) and n not in tail[cut:]]

        def inside(n: fx.Node) -> bool:
            return n in kept or n in earlier

        late = [n for n in values if inside(n) and not all(map(inside, _readers(n, made_anew)))]
        return sum(t.nbytes for n in late if isinstance(t := n.meta["val"], torch.Tensor))

    cuts = [
        c
        for c in range(len(tail) + 1)
        if not (c and made_anew(tail[c - 1])) and not (c < len(tail) and tail[c].target is operator.getitem)
    ]
    best = min(cuts, key=lambda c: (crossing(c), c))
    this.nodes, following.nodes = group[: start + best], [*tail[best:], *after]


def _pieces(
    gm: fx.GraphModule, groups: list[_Group], made_anew: MadeAnew, made: dict[str, fx.GraphModule]
) -> list[_Piece]:
    """The groups of nodes as segments, each with its inputs, outputs and destinations."""
    group_of = {node: i for i, group in enumerate(groups) for node in group.nodes}
    copies: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.target is COPY:
            source = root(fx_nodes.operand(node, 1), made_anew)
            home = group_of.get(source, len(groups) - 1)
            while groups[home].transfers:
                home += 1
            copies.setdefault(home, []).append(node)
            chain = node.args[1]
            while made_anew(chain):  # the views of a copied value go where the copy goes
                if chain in group_of and chain in groups[group_of[chain]].nodes:
                    groups[group_of[chain]].nodes.remove(chain)
                groups[home].nodes.append(chain)
                group_of[chain] = home
                chain = chain.args[0]
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    outs = [n for n in fx_nodes.outputs(gm.graph) if isinstance(n, fx.Node)]
    pieces = []
    for i, whole in enumerate(groups):
        group, units, chunk = whole.nodes, whole.units, whole.chunk
        if whole.transfers:
            pieces.append(_moved(group[0], chunk))
            continue
        if not group and i not in copies:
            continue
        group.sort(key=order.__getitem__)
        ends = copies.get(i, [])
        inside = set(group)
        wanted = [*(a for n in group for a in n.all_input_nodes), *(fx_nodes.operand(c, 1) for c in ends)]
        inputs = [a for a in dict.fromkeys(wanted) if a not in inside]
        outputs = [
            n for n in group if n in outs or any(group_of.get(u, i) != i for u in n.users if u.target is not COPY)
        ]
        results = [*(fx_nodes.operand(c, 1) for c in ends), *outputs]
        dests = [fx_nodes.operand(c) for c in ends]
        cut = segments.cut_text(group, inputs, results, dests)
        if cut not in made:
            made[cut] = segments.merge_equal(segments.extract(group, inputs, results, dests))
        phase = _phase([n for n in group if not made_anew(n)])
        line = next((n.meta["source"] for n in group if n.meta.get("source") and not n.meta.get("phase")), "")
        shown = "forward and backward" if phase is StepPhase.REGION else phase
        why = " ".join(filter(None, [shown, *sorted(units), f"({line})" if line else ""]))
        pieces.append(_Piece(made[cut], inputs, outputs, dests, phase, why, chunk))
    return pieces


def _phase(nodes: list[fx.Node]) -> StepPhase:
    """The phase of a segment's work. Casts and copies count only where there is nothing else. A segment that only
    brings gradients to their places is of the backward."""
    work = [n for n in nodes if n.target not in ANYWHERE] or nodes
    phases = {StepPhase(n.meta.get("phase") or "forward") for n in work} or {StepPhase.BACKWARD}
    return StepPhase.REGION if len(phases) > 1 else phases.pop()


def _moved(node: fx.Node, chunk: int | None) -> _Piece:
    """A transfer as a piece of its own."""
    phase = _phase([node])
    why = str(node.meta.get("moved") or phase)
    return _Piece(None, [fx_nodes.operand(node)], [node], [], phase, why, chunk)
