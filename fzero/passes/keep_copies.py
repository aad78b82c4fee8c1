"""keep_copies: where the optimizer's kernel writes the 16-bit copy of a parameter, the copy stays from step to step. So
does that of frozen parameters, which nothing writes.

`cast_before_gather` casts each column of parameters once a step. A kernel that makes the new parameter can write that
cast as well (`OpInfo.narrows`): two bytes an element, and not six. Then the copy is a column of the state: sharded as
the master, written by the update, and at the start of a step equal to the cast of the master (`Program.copies`). It is
in no checkpoint: who runs the program makes it anew where it is not there, or where another program wrote the master.

    run p[0:L] -> p.low[0:L] { cast };  run p.low[w] ...;  run p g m v -> p.new ... { adamw };  update p.new -> p
    becomes   run p.copy[w] ...;  run p g m v -> p.new ... p.copy.new { adamw; cast };  update p.new -> p;
              update p.copy.new -> p.copy

The cast stays as it is in a pipeline, of what lies off the device, and where a leaf of the column is updated in another
way: by another optimizer, or chosen between the new value and the old one (`Spec(nonfinite="skip")`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, PERSISTENT, Ref

aten = torch.ops.aten


def keep_copies(program: Program, stay: bool = True) -> Program:
    """The program with the casts of parameters that their updates can write kept between steps.

    stay: False where that was decided against.
    """
    edits, columns = rewrite.Edits(), _columns(program) if stay else {}
    for column in columns.values():
        edits.instead[column.cast] = []
        edits.buffers[column.copy] = replace(program.buffers[column.low], name=column.copy, kind="copy")
        if column.runs:
            dtype = program.buffers[column.low].dtype
            edits.buffers[column.new] = replace(program.buffers[f"{column.master}.new"], name=column.new, dtype=dtype)
    names = {column.low: column.copy for column in columns.values()}
    for index, op in enumerate(program.ops):
        if op.is_update and op.writes[0].name in columns:
            edits.after[index].append(_kept(program, op, columns[op.writes[0].name], edits))
        if any(ref.name in names for ref in op.reads):
            edits.rename[index] = names
    for index in {index for column in columns.values() for index in column.runs}:
        edits.instead[index] = [_narrowing(program, program.ops[index], columns, edits)]
    return edits.apply(program, "keep_copies")


@dataclass(frozen=True)
class _Column:
    """A master whose copy stays: the number of the op that casts it into `low`, and those that make its new value."""

    master: str
    low: str
    cast: int
    runs: list[int] = field(default_factory=list)

    @property
    def copy(self) -> str:
        """The name of the copy."""
        return f"{self.master}.copy"

    @property
    def new(self) -> str:
        """The name of its new value."""
        return f"{self.copy}.new"


def _columns(program: Program) -> dict[str, _Column]:
    """By master, those whose copy stays."""
    if program.mesh.roles > 1:
        return {}
    away = {b.bucket for b in program.buffers.values() if b.kind in PERSISTENT and b.space != DEVICE}
    casts = {op.reads[0].name: (index, op) for index, op in enumerate(program.ops) if _is_cast(program, op)}
    writes = rewrite.writes_of(program.ops)
    columns = {}
    for master, (index, op) in casts.items():
        if program.buffers[master].bucket in away:
            continue
        makers, written = writes.get(f"{master}.new", []), writes.get(master, [])
        kept = all(program.ops[i].is_update for i, _ in written) and bool(makers) == bool(written)
        if kept and all(_narrows(program, program.ops[i], ref) for i, ref in makers):
            columns[master] = _Column(master, op.writes[0].name, index, sorted({i for i, _ in makers}))
    return columns


def _is_cast(program: Program, op: Op) -> bool:
    """Whether an op casts all that a rank holds of a column of parameters, into memory of the step."""
    if not (op.is_run and op.is_flat and len(op.reads) == len(op.writes) == 1):
        return False
    master, low = (program.buffers[ref.name] for ref in (op.reads[0], op.writes[0]))
    nodes = [n for n in program.segments[op.segment].graph.nodes if fx_nodes.is_compute(n)]
    plain = [n.target for n in nodes] == [aten._to_copy.default, aten.copy_.default]
    whole = (op.reads[0].start, op.reads[0].stop) == (0, program.buckets[master.bucket or ""].length)
    of_master = (low.kind, low.sharded, low.entry) == ("scratch", master.sharded, master.entry)
    return plain and whole and master.kind == "param" and of_master


def _narrows(program: Program, op: Op, ref: Ref) -> bool:
    """Whether the kernel that makes this new value can write its copy."""
    value = _value(op, program.segments[op.segment].graph, ref) if op.is_run else None
    return value is not None and value.target is operator.getitem and _narrowed(value)


def _narrowed(pick: fx.Node) -> bool:
    return pick.args[1] in of(fx_nodes.operand(pick).target).narrows


def _value(op: Op, graph: fx.Graph, ref: Ref) -> fx.Node | None:
    """What a run copies into a destination; None of what it returns."""
    if ref not in op.writes[op.num_outputs :]:
        return None
    into = fx_nodes.placeholders(graph)[len(op.reads) + op.writes[op.num_outputs :].index(ref)]
    copies = list(into.users)
    return fx_nodes.operand(copies[0], 1) if len(copies) == 1 and copies[0].target is aten.copy_.default else None


def _narrowing(program: Program, op: Op, columns: dict[str, _Column], edits: rewrite.Edits) -> Op:
    """The run that writes the copies of the parameters that it makes, too."""
    graph = segments.copied(program.segments[op.segment].graph)
    end, writes = fx_nodes.output(graph), list(op.writes)
    for column, ref in _made(op, columns):
        value = _value(op, graph, ref)
        assert value is not None, f"{ref} is returned, and no new value of a column is"
        narrow = value.meta["val"].to(program.buffers[column.low].dtype)
        with graph.inserting_after(fx_nodes.placeholders(graph)[-1]):
            into = graph.placeholder(f"into{len(writes) - op.num_outputs}")
        with graph.inserting_before(end):
            cast = graph.call_function(aten._to_copy.default, (value,), {"dtype": narrow.dtype})
            copied = graph.call_function(aten.copy_.default, (into, cast))
        for node in (into, cast, copied):
            node.meta["val"] = narrow
        writes.append(replace(ref, name=column.new))
    return _again(op, segments.module(graph), op.reads, writes, edits)


def _made(op: Op, columns: dict[str, _Column]) -> Iterator[tuple[_Column, Ref]]:
    by_new = {f"{column.master}.new": column for column in columns.values()}
    return ((by_new[ref.name], ref) for ref in op.writes if ref.name in by_new)


def _kept(program: Program, op: Op, column: _Column, edits: rewrite.Edits) -> Op:
    """The update that keeps the new copy, beside that of its master."""
    shape = fx_nodes.placeholders(program.segments[op.segment].graph)[0].meta["val"].shape
    gm = segments.copy_segment(torch.empty(shape, dtype=program.buffers[column.low].dtype, device="meta"))
    source, target = replace(op.reads[0], name=column.new), replace(op.writes[0], name=column.copy)
    return replace(_again(op, gm, [source], [target], edits), why=f"keep {column.copy}")


def _again(
    op: Op, gm: fx.GraphModule, reads: list[Ref] | tuple[Ref, ...], writes: list[Ref], edits: rewrite.Edits
) -> Op:
    """An op in the place of `op`, of its kind."""
    run = rewrite.run_op(op, gm, reads, writes)
    edits.segments.setdefault(run.segment, gm)
    return replace(run.with_attrs(flat=1) if op.is_flat else run, kind=op.kind)
