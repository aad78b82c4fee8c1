"""cast_before_gather: a cast that a loss makes of a sharded parameter happens on the shard, before the gather.

Every use of a bucket's leaves in the losses must begin with the same cast to a smaller dtype. Then one flat op casts
the shard, and the cast column is gathered: half the bytes for bf16. The gradient still flows through the cast in the
graph.

    gather p -> p.full;  run p.full[w] { c = bf16(w); ... }
    becomes   run p[0:L:mine] -> p.bf16[0:L:mine];  gather p.bf16 -> p.bf16.full;  run p.bf16.full[w] { ... }
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import DTYPE_NAMES, PERSISTENT, Ref

CAST = torch.ops.aten._to_copy.default


def cast_before_gather(program: Program) -> Program:
    """The program with casts of whole sharded parameters moved onto the shards, where every use has the same cast."""
    source = {
        op.writes[0].name: op
        for op in program.ops
        if op.gathers and program.buffers[op.reads[0].name].sharded
        and program.buffers[op.reads[0].name].kind in (*PERSISTENT, "staging")
    }  # fmt: skip
    chosen = _common_casts(program, set(source))
    edits = rewrite.Edits()
    for index, op in enumerate(program.ops):
        name = op.target if op.gathers or op.is_wait else ""
        if name in chosen and op.gathers:
            cast = _cast(program, op, chosen[name], edits)
            edits.instead[index] = [cast, replace(op, reads=(Ref(f"{name}.cast"),), writes=(Ref(f"{name}.low"),))]
        elif name in chosen:
            edits.instead[index] = [replace(op, reads=(Ref(f"{name}.low"),))]
        elif op.is_run and any(ref.name in chosen for ref in op.reads):
            edits.instead[index] = [_without_casts(program, op, chosen, edits)]
    return edits.apply(program, "cast_before_gather")


def _common_casts(program: Program, whole: set[str]) -> dict[str, torch.dtype]:
    """Of these buffers, those whose leaves every use casts to one smaller dtype, and that dtype."""
    casts: dict[str, set[torch.dtype | None]] = {name: set() for name in whole}
    for op in program.ops:
        if op.is_mark or whole.isdisjoint(ref.name for ref in op.reads):
            continue
        region = op.in_region
        holders = fx_nodes.placeholders(program.segments[op.segment].graph) if region else []
        for ref, holder in zip_longest(op.reads, holders[: len(op.reads)]):
            if ref.name in casts:
                casts[ref.name] |= {None} if holder is None else {_cast_to(user) for user in holder.users}
    alike = {name: next(iter(dtypes)) for name, dtypes in casts.items() if len(dtypes) == 1}
    return {n: dtype for n, dtype in alike.items() if dtype and dtype.itemsize < program.buffers[n].dtype.itemsize}


def _cast_to(user: fx.Node) -> torch.dtype | None:
    plain = user.target is CAST and set(user.kwargs) == {"dtype"}
    return user.kwargs["dtype"] if plain else None  # type: ignore[return-value]


def _cast(program: Program, op: Op, dtype: torch.dtype, edits: rewrite.Edits) -> Op:
    """The op that casts a gather's source on the shard; adds its buffers and its segment."""
    shard, whole = program.buffers[op.reads[0].name], program.buffers[op.writes[0].name]
    cast, low = f"{whole.name}.cast", f"{whole.name}.low"
    edits.buffers[cast] = replace(shard, name=cast, dtype=dtype, kind="scratch")
    edits.buffers[low] = replace(whole, name=low, dtype=dtype)
    graph = fx.Graph()
    value, into = graph.placeholder("x0"), graph.placeholder("into0")
    result = graph.call_function(CAST, (value,), {"dtype": dtype})
    copied = graph.call_function(torch.ops.aten.copy_.default, (into, result))
    with FakeTensorMode():
        value.meta["val"] = torch.empty(shard.shape, dtype=shard.dtype)
        for node in (into, result, copied):
            node.meta["val"] = torch.empty(shard.shape, dtype=dtype)
    graph.output([])
    bucket = program.buckets[shard.bucket or ""]
    span = (0, bucket.length, None, shard.sharded == bucket.axis)
    why = f"{DTYPE_NAMES[dtype]} before the gather"
    gm = segments.module(graph)
    run = rewrite.run_op(make_op("run", why=why), gm, [Ref(shard.name, *span)], [Ref(cast, *span)], flat=1)
    edits.segments.setdefault(run.segment, gm)
    return run


def _without_casts(program: Program, op: Op, chosen: dict[str, torch.dtype], edits: rewrite.Edits) -> Op:
    """A run of a region that reads the cast columns, without the casts in its segment."""
    gm = program.segments[op.segment]
    graph = segments.copied(gm.graph)
    for holder, ref in zip(fx_nodes.placeholders(graph), op.reads, strict=False):
        if ref.name in chosen:
            for user in list(holder.users):
                holder.meta["val"] = user.meta["val"]
                user.replace_all_uses_with(holder)
                graph.erase_node(user)
    reads = [replace(r, name=f"{r.name}.low") if r.name in chosen else r for r in op.reads]
    without = segments.module(graph)
    done = rewrite.run_op(op, without, reads, op.writes)
    edits.segments.setdefault(done.segment, without)
    return done
