"""recompute: values that a layer's forward would keep for its backward are computed again there.

A rule may match a parameter that a forward segment reads. The segment then no longer writes the values that only the
backward reads. Just before the first backward segment that reads one, a segment of the same nodes on the same inputs
makes them again, with the same bits. Values that the next layer's forward reads stay: those are the checkpoints. A
layer then keeps its input instead of its intermediate values; its forward runs twice, without the work that only the
next layer needs. Its parameters are gathered once for the second forward and the backward.

    run x0 w0 -> x1 a1;  run x1 w1 -> x2 a2;  run g2 a2 w1 -> g1 ...
    becomes   run x0 w0 -> x1;  run x1 w1 -> x2;  run x1 w1 -> a2.again;  run g2 a2.again w1 -> g1 ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fzero import tree
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.program import Program
from fzero.ir.records import Op, Ref

Rules = Mapping[str, str]
aten = torch.ops.aten
ANYWHERE = (aten._to_copy.default, aten.clone.default, aten.copy_.default)


def recompute(program: Program, rules: Rules, keep: frozenset[str] = frozenset()) -> Program:
    """The program with forward values made again before the backward, for the leaves that `rules` match. `rules` map
    path rules to "full", "offload" or "none"; the first match wins, and a leaf without a match keeps everything. The
    buffers of `keep` are not made again."""
    pool: dict[str, fx.GraphModule] = {}
    buffers = dict(program.buffers)
    readers = rewrite.reads_of(program.ops)
    work = [phases(program, op) if op.phase == "region" else set() for op in program.ops]
    backward = [op_phases == {"backward"} for op_phases in work]
    before: dict[int, list[Op]] = {}
    changed: dict[int, Op] = {}
    renames: dict[str, str] = {}
    for index, op in enumerate(program.ops):
        if work[index] != {"forward"} or not says(program, op, rules, "full"):
            continue
        unread = [ref for ref in op.writes if _only_backward(readers.get(ref.name, ()), backward)]
        again = [ref for ref in unread if ref.name not in keep]
        if not again or len(again) == len(op.writes):
            continue
        halves = _halves(program, op, again)
        changed[index] = rewrite.run_op(op, halves.kept, op.reads, halves.kept_refs)
        pool.setdefault(changed[index].segment, halves.kept)
        for ref in again:
            renames[ref.name] = f"{ref.name}.again"
            buffers[renames[ref.name]] = replace(buffers[ref.name], name=renames[ref.name])
        writes = [replace(ref, name=renames[ref.name]) for ref in again]
        repeated = rewrite.run_op(op, halves.again, op.reads, writes)
        pool.setdefault(repeated.segment, halves.again)
        first = min(i for ref in again for i, _ in readers[ref.name])
        before.setdefault(first, []).append(replace(repeated, why=f"again {op.why}"))
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops += before.get(index, [])
        ops.append(changed.get(index) or rewrite.moved(op, renames))
    return rewrite.finish(program, "recompute", ops=ops, buffers=buffers, new_segments=pool)


@dataclass
class _Halves:
    """A forward segment without the values that are made again, and one that makes only them."""

    kept: fx.GraphModule
    kept_refs: list[Ref]
    again: fx.GraphModule


def _halves(program: Program, op: Op, again: Sequence[Ref]) -> _Halves:
    gm = program.segments[op.segment]
    inputs = fx_nodes.placeholders(gm.graph)
    body = [n for n in gm.graph.nodes if n.op == "call_function"]
    outs = dict(zip(op.writes, fx_nodes.outputs(gm.graph), strict=True))
    kept = [ref for ref in op.writes if ref not in again]
    return _Halves(
        segments.extract(body, inputs, [outs[ref] for ref in kept]),
        kept,
        segments.extract(body, inputs, [outs[ref] for ref in again]),
    )


def phases(program: Program, op: Op) -> set[str]:
    """The phases of a segment's work. Views and casts do not count: they are made anew wherever they are used."""
    nodes = [n for n in program.segments[op.segment].graph.nodes if n.op == "call_function"]
    work = [n for n in nodes if not fx_nodes.is_view(n) and n.target not in ANYWHERE]
    return {n.meta.get("phase") or "forward" for n in work}


def _only_backward(readers: Sequence[tuple[int, Ref]], backward: Sequence[bool]) -> bool:
    return bool(readers) and all(backward[i] for i, _ in readers)


def says(program: Program, op: Op, rules: Rules, word: str) -> bool:
    """Whether, for any parameter of this segment, the first rule that matches it says `word`."""
    said = [_says(rules, names) for ref in op.reads for names in _leaves(program, ref)]
    return word in said


def _says(rules: Rules, names: Sequence[str]) -> str:
    return next((what for rule, what in rules.items() if any(tree.matches(rule, name) for name in names)), "none")


def _leaves(program: Program, ref: Ref) -> list[tuple[str, ...]]:
    """The leaves of a reference, each by its path within its entry of the state, and by the whole one."""
    bucket = program.buckets.get(program.buffers[ref.name].bucket or "")
    if bucket is None:
        return []
    prefix = ref.name.partition(":")[0] if ":" in ref.name else ""  # of the column: the entry of the state
    slots = range(len(bucket.slots)) if ref.start is None else bucket.inside(ref.start, ref.stop or 0)
    inside = [bucket.slots[n].path for n in slots]
    return [(path, f"{prefix}/{path}") if prefix else (path,) for path in inside]
