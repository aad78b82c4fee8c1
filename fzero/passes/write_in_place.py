"""write_in_place: results are written where they belong.

1. New leaves are written straight into the state; `.new` buffers and the copies that keep them are dropped. No later op
   may read the old value. The write comes after the last segment of any loss, so that a failing loss leaves the state
   as it was. A leaf that was computed whole stays in its `.new`: a shard has no room for it. One that a later loss
   makes wait stays there as the own slice.
2. In a segment, a copy into a destination is dropped where the op that makes the value has a kernel that writes into a
   given tensor (`mm.out`, `add.out`). `fzero::adamw` on its own destinations becomes the in-place kernel.

    run p[mine] g[mine] ... -> p.new[mine];  update p.new -> p      becomes      update p[mine] g[mine] ... -> p[mine]
    mm = mm(a, b);  copy_(into, mm)                                 becomes      mm.out(a, b, out=into)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.op_info import column, of
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.passes.common.own_slices import own_slices

aten = torch.ops.aten
COPY = aten.copy_.default


def write_in_place(program: Program) -> Program:
    """The program with results written where they belong, without copies that nothing needs."""
    ops = _into_state(program)
    pool: dict[str, fx.GraphModule] = {}
    done: dict[tuple[object, ...], fx.GraphModule] = {}
    result: list[Op] = []
    for op in ops:
        if op.computes:
            aliases = _aliases(op, program.segments[op.segment])
            key = (op.segment, tuple(sorted(aliases.items())))
            if key not in done:
                done[key] = _kernels(program.segments[op.segment], len(op.reads), aliases)
            new = rewrite.run_op(op, done[key], op.reads, op.writes)
            pool.setdefault(new.segment, done[key])
            op = replace(new.with_attrs(flat=1) if op.is_flat else new, kind=op.kind)
        result.append(op)
    columns = [name for name, b in program.buffers.items() if b.kind == "scratch" and b.bucket and not b.sharded]
    buffers = {**program.buffers, **own_slices(program, program.buffers, columns, result)}
    return rewrite.finish(program, "write_in_place", ops=result, buffers=buffers, new_segments=pool)


# --- 1. into the state


def _into_state(program: Program) -> list[Op]:
    """The ops with new leaves written straight into the state, where that is safe."""
    ops = list(program.ops)
    last_loss = max((i for i, op in enumerate(ops) if op.in_region), default=-1)
    keeps: dict[str, list[Op]] = {}
    for op in ops:
        if op.is_update:
            keeps.setdefault(op.reads[0].name, []).append(op)
    into: dict[str, str] = {}
    reads, writes = rewrite.reads_of(ops), rewrite.writes_of(ops)
    for new, copies in keeps.items():
        old = copies[0].writes[0].name
        writers = [(i, ref) for i, ref in writes.get(new, ()) if ops[i].is_run]
        own_only = all(ref.mine for _, ref in writers)
        late = bool(writers) and writers[0][0] >= last_loss
        read = any(not (ops[i].gathers or ops[i].is_update) for i, _ in reads[new])  # as the new value, by its name
        olds = [(i, ref) for i, ref in reads.get(old, ()) if not ops[i].moves]  # a move back takes the new value
        if (own_only or not program.buffers[old].sharded) and late and not read and _dead(old, writers, olds):
            into[new] = old
    dropped = {id(op) for new in into for op in keeps[new]}
    result = []
    for op in ops:
        if id(op) in dropped:
            continue
        writes_state = op.is_run and any(ref.name in into for ref in op.writes)
        op = rewrite.moved(op, into)
        result.append(replace(op, kind="update") if writes_state else op)
    return result


def _dead(old: str, writers: list[tuple[int, Ref]], reads: list[tuple[int, Ref]]) -> bool:
    """Whether none of `reads` is of elements of `old` that an earlier one of `writers` would write."""
    spans = rewrite.Spans(replace(ref, name=old) for _, ref in writers)
    return not any(writers[w][0] < i for i, ref in reads for w in spans.over(ref))


# --- 2. kernels that write into a given tensor


def _aliases(op: Op, gm: fx.GraphModule) -> dict[int, int]:
    """For each destination placeholder (by position) the input that is the same memory, or -1 if it only overlaps."""
    aliases: dict[int, int] = {}
    dests = op.writes[op.num_outputs :]
    spans, same = rewrite.Spans(op.reads), {ref: [i] for i, ref in enumerate(op.reads)}
    for d, dest in enumerate(dests):
        for i in spans.over(dest) or same.get(dest, []):  # no element of an empty one is shared
            aliases[len(op.reads) + d] = i if op.reads[i] == dest else -1
    return aliases


def _kernels(gm: fx.GraphModule, num_reads: int, aliases: dict[int, int]) -> fx.GraphModule:
    """The segment with copies into destinations replaced by ops that write there."""
    graph = segments.copied(gm.graph)
    holders = fx_nodes.placeholders(graph)
    same = {holders[d]: (holders[i] if i >= 0 else None) for d, i in aliases.items()}
    _fuse_in_place(graph, same)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in [n for n in graph.nodes if n.target is COPY]:
        dest, value = copy.args
        kernel = _out_kernel(value)
        if kernel is None or value in fx_nodes.outputs(graph) or not _safe(dest, value, same, order):
            continue  # a fresh result owns its memory
        with graph.inserting_before(value):
            written = graph.call_function(kernel, value.args, {**value.kwargs, "out": dest})
        written.meta = dict(value.meta)
        order[written] = order[value]
        graph.erase_node(copy)
        value.replace_all_uses_with(written)
        graph.erase_node(value)
    return segments.module(graph)


def _safe(dest: fx.Node, value: fx.Node, same: dict[fx.Node, fx.Node | None], order: dict[fx.Node, int]) -> bool:
    """Whether writing `value` into `dest` when it is made, not at the end, changes nothing that others read."""
    a, b = dest.meta["val"], value.meta["val"]
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if dest not in same:
        return True
    held = same[dest]
    if held is None or not fx_nodes.is_pointwise(value):
        return False
    return all(order[user] <= order[value] for user in held.users)


def _out_kernel(value: Any) -> Any:
    """The overload that writes into `out=`, if torch has one that is a kernel and no copy in disguise."""
    if of(value.target).out_form != "program":
        return None
    form = fx_nodes.out_overload(value.target)
    return form if form is not None and form._schema.arguments[-1].name == "out" else None


def _fuse_in_place(graph: fx.Graph, same: dict[fx.Node, fx.Node | None]) -> None:
    """A pure op whose every result is copied over the operand it replaces becomes its in-place form."""
    pure = {form: (target, places) for target, (form, places) in column("in_place").items()}
    for node in [n for n in graph.nodes if n.target in pure]:
        target, places = pure[node.target]
        picks = {u.args[1]: u for u in node.users}
        dests = []
        for index, place in enumerate(places):
            pick = picks.get(index)
            copies = [user for user in pick.users if user.target is COPY] if pick is not None else []
            others = [user for user in pick.users if user not in copies] if pick is not None else []
            alone = len(copies) == 1 and len(fx_nodes.operand(node, place).users) == 1
            alone = alone and all(fx_nodes.is_compute(user) and not fx_nodes.is_view(user) for user in others)
            fits = alone and same.get(fx_nodes.operand(copies[0])) is node.args[place]
            dests.append(fx_nodes.operand(copies[0]) if fits else None)
        if any(d is None for d in dests):
            continue
        args = list(node.args)
        for dest, place in zip(dests, places, strict=True):
            args[place] = dest
        with graph.inserting_before(node):
            graph.call_function(target, tuple(args), dict(node.kwargs)).meta["val"] = None
        for index, dest in enumerate(dests):
            for user in list(picks[index].users):
                if user.target is COPY:
                    graph.erase_node(user)
            picks[index].replace_all_uses_with(dest)  # what reads the new value, as a cast of it, comes behind
            graph.erase_node(picks[index])
        graph.erase_node(node)
