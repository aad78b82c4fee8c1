"""run_layers: which layers of the model a run belongs to, by the leaves that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.plan.pipeline_cut import layer_of

T = TypeVar("T")


def leaves(program: Program, ref: Ref) -> list[tuple[str, ...]]:
    """The leaves of a reference, each by its path within its entry of the state, and by the whole one."""
    bucket = program.buckets.get(program.buffers[ref.name].bucket or "")
    if bucket is None:
        return []
    entry = program.buffers[ref.name].entry
    slots = range(len(bucket.slots)) if ref.start is None else bucket.inside(ref.start, ref.stop or 0)
    inside = [bucket.slots[n].path for n in slots]
    return [(path, f"{entry}/{path}") if entry else (path,) for path in inside]


def of_runs(program: Program, own: Callable[[Op], T], *, first: T) -> list[T]:
    """By op, what is said of a run that reads leaves, and of all behind it until the next such run."""
    found, last = [], first
    for op in program.ops:
        if op.computes and any(leaves(program, ref) for ref in op.reads):
            last = own(op)
        found.append(last)
    return found


def layers(program: Program) -> list[frozenset[str]]:
    """By op, the layers of the leaves that a run reads, numbered ones if there are any; those of the run before where
    it reads no leaf."""

    def own(op: Op) -> frozenset[str]:
        found = {layer_of(names[0]) for ref in op.reads for names in leaves(program, ref)}
        counted = any(numbered for _, numbered in found)
        return frozenset(layer for layer, numbered in found if numbered or not counted)

    return of_runs(program, own, first=frozenset())
