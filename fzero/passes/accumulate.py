"""accumulate: a segment adds its gradients to the sum over microbatches itself, each as soon as it is there.

So one leaf's gradient lives beside the sum, not those of a whole bucket. A sum stays as it is where its terms do not
come from segments alone (from other ranks, say), or where another op reads or writes it on the way. For each leaf the
microbatches are added in the order of before, so the bits are the same.

    run ... -> g.1[w] g.1[b];  run g.0[flat] g.1[flat] -> g.0[flat]
    becomes   run ... g.0[w] g.0[b] -> g.0[w] g.0[b]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Ref

aten = torch.ops.aten
COPY = aten.copy_.default
Refs = Mapping[str, Sequence[tuple[int, Ref]]]  # (op number, reference), by the name of the buffer


def accumulate(program: Program) -> Program:
    """The program with gradients added to sums over microbatches by the segments that make them."""
    ops = list(program.ops)
    sums: dict[str, list[int]] = {}  # by the buffer of the sum: the ops that add to it
    for i, op in enumerate(ops):
        if _adds(program, op):
            sums.setdefault(op.writes[0].name, []).append(i)
    reads, writes = rewrite.reads_of(ops), rewrite.writes_of(ops)
    into: dict[str, str] = {}
    dropped: set[int] = set()
    for total, adds in sums.items():
        if _from_segments(ops, total, adds, reads, writes):
            into.update({ops[i].reads[1].name: total for i in adds})
            dropped.update(adds)
    pool: dict[str, fx.GraphModule] = {}
    done: dict[tuple[str, tuple[int, ...]], fx.GraphModule] = {}
    result: list[Op] = []
    for i, op in enumerate(ops):
        if i in dropped:
            continue
        which = tuple(n for n, ref in enumerate(op.writes[op.num_outputs :]) if ref.name in into)
        if which:
            key = op.segment, which
            if key not in done:
                done[key] = _adding(program.segments[op.segment], len(op.reads), which)
            moved = rewrite.moved(op, into)
            held = [moved.writes[op.num_outputs + n] for n in which]
            op = rewrite.run_op(op, done[key], [*op.reads, *held], moved.writes)
            pool.setdefault(op.segment, done[key])
        result.append(op)
    return rewrite.finish(program, "accumulate", ops=result, new_segments=pool)


def _adds(program: Program, op: Op) -> bool:
    """Whether an op adds gradients to others of the same place, in place."""
    if not op.is_run or not op.is_flat or len(op.reads) != 2 or op.writes != op.reads[:1]:
        return False
    total, part = op.reads
    work = [n for n in program.segments[op.segment].graph.nodes if fx_nodes.is_compute(n)]
    return (
        {program.buffers[ref.name].kind for ref in op.reads} == {"grad"}
        and (total.start, total.stop) == (part.start, part.stop)
        and not (total.mine or part.mine or total.start is None)
        and [node.target for node in work] == [aten.add.Tensor, COPY]
        and work[0].args == tuple(fx_nodes.placeholders(work[0].graph)[:2])
        and not work[0].kwargs
    )


def _from_segments(ops: Sequence[Op], total: str, adds: Sequence[int], reads: Refs, writes: Refs) -> bool:
    """Whether segments can add to `total` what the ops `adds` do: they write each term and its first value leaf by
    leaf, each leaf in the order of `adds`, and until the last of `adds` nothing else touches any of them."""
    terms = list(dict.fromkeys(ops[i].reads[1].name for i in adds))
    for name in (total, *terms):
        touching = {i for i, _ in (*reads.get(name, ()), *writes[name])} - set(adds)
        if not all(_writes_leaves(ops[i], name) for i in touching if name != total or i < adds[-1]):
            return False
    last = {(ref.start, ref.stop, ref.shape): i for i, ref in writes[total] if i not in adds and i < adds[-1]}
    for name in terms:
        spans = rewrite.Spans(ops[i].reads[1] for i in adds if ops[i].reads[1].name == name)
        for i, ref in writes[name]:
            place = (ref.start, ref.stop, ref.shape)
            if len(spans.over(ref)) != 1 or last.get(place, i) >= i:
                return False
            last[place] = i
    return True


def _writes_leaves(op: Op, name: str) -> bool:
    """Whether an op is a segment that writes leaves of a buffer, and does not read it."""
    fresh, into = op.writes[: op.num_outputs], op.writes[op.num_outputs :]
    return (
        op.in_region
        and all(ref.name != name for ref in (*op.reads, *fresh))
        and all(ref.shape is not None and not ref.mine for ref in into if ref.name == name)
    )


def _adding(gm: fx.GraphModule, num_reads: int, which: Sequence[int]) -> fx.GraphModule:
    """The segment with the values for the destinations `which` added to what those hold: its last inputs."""
    graph = segments.copied(gm.graph)
    holders = fx_nodes.placeholders(graph)
    copy_into = {node.args[0]: node for node in graph.nodes if node.target is COPY}
    for n in which:
        into = holders[num_reads + n]
        copy = copy_into[into]
        value = fx_nodes.operand(copy, 1)
        with graph.inserting_before(holders[num_reads]):
            held = graph.placeholder(f"sum{n}")
        with graph.inserting_after(value if fx_nodes.is_compute(value) else holders[-1]):
            added = graph.call_function(aten.add.Tensor, (held, value))
        held.meta["val"] = added.meta["val"] = into.meta["val"]
        copy.update_arg(1, added)
    return segments.module(graph)
