"""run_layers: which layers of the model a run belongs to, by the leaves that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.plan.pipeline_cut import layer_of

T = TypeVar("T")
Leaves = tuple[tuple[str, ...], ...]  # each leaf by its path within its entry of the state, and by the whole one


def read_leaves(program: Program) -> Iterator[tuple[Op, Leaves]]:
    """Each op, and the leaves that it reads."""
    known: dict[tuple[str, int | None, int | None], Leaves] = {}  # microbatches read the same

    def of(ref: Ref) -> Leaves:
        if program.buffers[ref.name].bucket is None:
            return ()
        place = ref.name, ref.start, ref.stop
        if place not in known:
            known[place] = _leaves(program, ref)
        return known[place]

    for op in program.ops:
        yield op, tuple(chain.from_iterable(map(of, op.reads)))


def of_runs(program: Program, own: Callable[[Leaves], T], *, first: T) -> list[T]:
    """By op, what is said of the leaves that a run reads, and of all behind it until the next run that reads any."""
    known: dict[Leaves, T] = {}
    found, last = [], first
    for op, leaves in read_leaves(program):
        if leaves and op.computes:
            if leaves not in known:
                known[leaves] = own(leaves)
            last = known[leaves]
        found.append(last)
    return found


def layers(program: Program) -> list[frozenset[str]]:
    """By op, the layers of the leaves that a run reads, numbered ones if there are any; those of the run before where
    it reads no leaf."""

    def own(leaves: Leaves) -> frozenset[str]:
        found = {layer_of(names[0]) for names in leaves}
        counted = any(numbered for _, numbered in found)
        return frozenset(layer for layer, numbered in found if numbered or not counted)

    return of_runs(program, own, first=frozenset())


def _leaves(program: Program, ref: Ref) -> Leaves:
    bucket = program.buckets.get(program.buffers[ref.name].bucket or "")
    if bucket is None:
        return ()
    entry = program.buffers[ref.name].entry
    slots = range(len(bucket.slots)) if ref.start is None else bucket.inside(ref.start, ref.stop or 0)
    inside = (bucket.slots[n].path for n in slots)
    return tuple((path, f"{entry}/{path}") if entry else (path,) for path in inside)
