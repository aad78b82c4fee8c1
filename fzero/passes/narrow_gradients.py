"""narrow_gradients: a gradient that nothing but its update reads is cast there, not where it is made.

In mixed precision a product makes a gradient in 16 bits, and the loss's graph casts it to the parameter's dtype. Where
it is not sent to other ranks, nor added to that of another microbatch, the cast moves behind the memory: the column of
gradients has 16 bits. The kernel of the update reads them as they are (`OpInfo.widens`), on the processor tile by tile.
So 8 bytes an element less are moved, and 2 less are held. The bits are the same.

    run x[w] -> g[w] { ...; c = f32(b); g = c };   run p g m v -> ... { adamw(p, g, m, v) }
    becomes   run x[w] -> g[w] { ...; g = b };     run p g m v -> ... { c = f32(g); adamw(p, c, m, v) }
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, Ref

aten = torch.ops.aten


def narrow_gradients(program: Program) -> Program:
    """The program with narrower columns of gradients, where only an update that casts them itself reads them."""
    if program.microbatches > 1:
        return rewrite.Edits().apply(program, "narrow_gradients")
    uses = _uses(program)
    dtypes = {name: dtype for name, use in uses.items() if (dtype := _narrow(program, use)) is not None}
    edits = rewrite.Edits()
    for index, op in enumerate(program.ops):
        mine = {name for name in (*_names(op.reads), *_names(op.writes)) if name in dtypes}
        if mine:
            edits.instead[index] = [_rewritten(program, op, dtypes, edits)]
    edits.buffers.update({name: replace(program.buffers[name], dtype=dtype) for name, dtype in dtypes.items()})
    return edits.apply(program, "narrow_gradients")


@dataclass
class _GradientUse:
    """Of a column of gradients, the ops that write and that read it, by number. Only `_uses` fills it."""

    name: str
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


def _uses(program: Program) -> dict[str, _GradientUse]:
    """The columns of gradients on the device, with the ops that touch them."""
    buffers = program.buffers.values()
    found = {b.name: _GradientUse(b.name) for b in buffers if b.kind == "grad" and b.bucket and b.space == DEVICE}
    for index, op in enumerate(program.ops):
        for name in _names(op.writes) & found.keys():
            found[name].writers.append(index)
        for name in _names(op.reads) & found.keys():
            found[name].readers.append(index)
    return found


def _names(refs: Iterable[Ref]) -> set[str]:
    return {ref.name for ref in refs}


def _narrow(program: Program, use: _GradientUse) -> torch.dtype | None:
    """The dtype in which all of a column's gradients are made, if all that reads them casts them itself."""
    ops = [program.ops[index] for index in (*use.writers, *use.readers)]
    if len(use.writers) != 1 or not use.readers or not ops[0].in_region or not all(op.is_run for op in ops):
        return None
    if any(program.buffers[ref.name].space != DEVICE for op in ops[1:] for ref in (*op.reads, *op.writes)):
        return None  # the update may run on the host
    holders = [(op, ref.name, node) for op in ops[1:] for ref, node in _read(program, op)]
    reads = [_widens(node) for _, name, node in holders if name == use.name]
    made = {_cast_from(node) for ref, node in _written(program, ops[0]) if ref.name == use.name}
    dtype = next(iter(made)) if len(made) == 1 else None
    is_narrower = dtype is not None and dtype.itemsize < program.buffers[use.name].dtype.itemsize
    return dtype if is_narrower and all(reads) else None


def _read(program: Program, op: Op) -> list[tuple[Ref, fx.Node]]:
    return list(zip(op.reads, fx_nodes.placeholders(program.segments[op.segment].graph), strict=False))


def _written(program: Program, op: Op) -> list[tuple[Ref, fx.Node]]:
    """(what is written, its destination) of an op, without what it returns."""
    into = fx_nodes.placeholders(program.segments[op.segment].graph)[len(op.reads) :]
    return list(zip(op.writes[op.num_outputs :], into, strict=True))


def _widens(holder: fx.Node) -> bool:
    """Whether every reader of an operand casts it itself."""
    places = [(user, i) for user in holder.users for i, arg in enumerate(user.args) if arg is holder]
    return bool(places) and all(i in of(user.target).widens for user, i in places)


def _cast_from(into: fx.Node) -> torch.dtype | None:
    """The dtype of what is cast into a destination; None where nothing is."""
    copies = list(into.users)
    if len(copies) != 1 or copies[0].target is not aten.copy_.default:
        return None
    cast = fx_nodes.operand(copies[0], 1)
    plain = cast.target is aten._to_copy.default and set(cast.kwargs) == {"dtype"} and len(cast.users) == 1
    source = fx_nodes.operand(cast).meta["val"] if plain else None
    return source.dtype if source is not None and source.is_floating_point() else None


def _rewritten(program: Program, op: Op, dtypes: dict[str, torch.dtype], edits: rewrite.Edits) -> Op:
    """An op that writes or reads narrower columns."""
    graph = segments.copied(program.segments[op.segment].graph)
    holders = fx_nodes.placeholders(graph)
    for ref, holder in zip((*op.reads, *op.writes[op.num_outputs :]), holders, strict=True):
        if ref.name not in dtypes:
            continue
        wide, narrow = holder.meta["val"], holder.meta["val"].to(dtypes[ref.name])
        if holder in holders[: len(op.reads)]:
            with graph.inserting_after(holders[-1]):
                cast = graph.call_function(aten._to_copy.default, (holder,), {"dtype": wide.dtype})
            holder.replace_all_uses_with(cast)
            cast.replace_input_with(cast, holder)
            cast.meta["val"] = wide
        else:
            copy = next(iter(holder.users))
            cast = fx_nodes.operand(copy, 1)
            copy.replace_input_with(cast, fx_nodes.operand(cast))
            copy.meta["val"] = narrow
            graph.erase_node(cast)
        holder.meta["val"] = narrow
    gm = segments.module(graph)
    edits.segments.setdefault(segments.digest(gm), gm)
    return rewrite.run_op(op, gm, op.reads, op.writes)
