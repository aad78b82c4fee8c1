"""kept: edits that only programs have which keep copies of parameters between steps (`fzero.passes.keep_copies`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from torch import fx

from fzero.ir import fx_nodes, rewrite
from fzero.ir.program import Program
from lab.mutate.coded import changed
from lab.mutate.edits import find, pick, places_of, put, replaced


def _in_one(rng: random.Random, p: Program, change: Callable[[fx.Graph, fx.Node], bool]) -> Program | None:
    """The program with the graph of one op changed that writes a copy. `change` gets the node which writes it."""
    index = pick(rng, find(p, lambda op: op.is_update and any(ref.name in p.copies for ref in op.writes)))
    if index is None:
        return None
    op = p.ops[index]
    positions = [i for i, ref in enumerate(op.writes) if ref.name in p.copies]
    place = len(op.reads) + rng.choice(positions) - op.num_outputs

    def edit(graph: fx.Graph) -> bool:
        writers = list(fx_nodes.placeholders(graph)[place].users)
        return len(writers) == 1 and fx_nodes.op_name(writers[0]) == "copy_" and change(graph, writers[0])

    return changed(p, index, edit)


def never_written(rng: random.Random, p: Program) -> Program | None:
    """An update leaves the copy as it was."""

    def change(graph: fx.Graph, writer: fx.Node) -> bool:
        graph.erase_node(writer)
        return True

    return _in_one(rng, p, change)


def of_another_value(rng: random.Random, p: Program) -> Program | None:
    """The copy is the cast of another operand of its form: of a moment."""

    def change(graph: fx.Graph, writer: fx.Node) -> bool:
        cast = fx_nodes.operand(writer, 1)
        if cast.op == "placeholder":
            return False
        source = fx_nodes.operand(cast)
        form = (source.meta["val"].shape, source.meta["val"].dtype)
        others = [n for n in fx_nodes.placeholders(graph) if n is not source and n.users]
        other = pick(rng, [n for n in others if (n.meta["val"].shape, n.meta["val"].dtype) == form])
        if other is None:
            return False
        cast.replace_input_with(source, other)
        return True

    return _in_one(rng, p, change)


def before_the_step(rng: random.Random, p: Program) -> Program | None:
    """The copy is cast before the kernel writes the new value."""

    def change(graph: fx.Graph, writer: fx.Node) -> bool:
        cast = fx_nodes.operand(writer, 1)
        if cast.op == "placeholder" or fx_nodes.operand(cast).op != "placeholder":
            return False
        fx_nodes.placeholders(graph)[-1].append(cast)
        return True

    return _in_one(rng, p, change)


def exchanged(rng: random.Random, p: Program) -> Program | None:
    """Two updates write each other's copies."""
    forms: dict[object, list[str]] = {}
    for name in p.copies:
        buffer = p.buffers[name]
        forms.setdefault((buffer.dtype, buffer.shape, buffer.sharded), []).append(name)
    names = pick(rng, [names for names in forms.values() if len(names) > 1])
    if names is None:
        return None
    one, other = rng.sample(names, 2)
    swap = {one: other, other: one}
    ops = [rewrite.moved(op, swap) if op.is_update else op for op in p.ops]
    return replace(p, ops=tuple(ops))


def of_another_column(rng: random.Random, p: Program) -> Program | None:
    """A use reads the copy of another column."""
    place = pick(rng, places_of(p, "reads", lambda op, ref: ref.name in p.copies))
    if place is None:
        return None
    index, position = place
    own = p.ops[index].reads[position]
    other = pick(rng, [n for n in p.copies if n != own.name and p.buffers[n].shape == p.buffers[own.name].shape])
    if other is None:
        return None
    return put(p, index, replaced(p.ops[index], "reads", position, replace(own, name=other)))
