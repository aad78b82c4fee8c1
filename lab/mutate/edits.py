"""edits: helpers of the mutations. They find a place in a program, and return the program with one change there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Buffer, Ref

Programs = Mapping[int, Program]
Mutation = Callable[[random.Random, Programs], dict[int, Program] | None]
Edit = Callable[[random.Random, Program], Program | None]
T = TypeVar("T")


def on(edit: Edit, *, alone: bool = False) -> Mutation:
    """The mutation that makes an edit on a rank drawn at random or, unless `alone`, on all that run its program."""

    def mutation(rng: random.Random, programs: Programs) -> dict[int, Program] | None:
        if alone and len(programs) == 1:
            return None
        chosen = rng.choice(sorted(programs))
        program = programs[chosen]
        broken = edit(rng, program)
        if broken is None or broken == program:
            return None
        every = not alone and rng.random() < 0.5
        return {r: broken if r == chosen or (every and p is program) else p for r, p in programs.items()}

    return mutation


def pick(rng: random.Random, items: Iterable[T]) -> T | None:
    """Returns a random one of the choices; None if there is none."""
    items = list(items)
    return rng.choice(items) if items else None


# --- places in a program ----------------------------------------------------------------------------------------------


def find(program: Program, test: Callable[[Op], Any]) -> list[int]:
    """Returns the numbers of the ops that fit."""
    return [i for i, op in enumerate(program.ops) if test(op)]


def names(refs: Iterable[Ref]) -> set[str]:
    """Returns the buffer names of references."""
    return {ref.name for ref in refs}


def touching(program: Program, name: str) -> list[int]:
    """Returns the numbers of the ops that use a buffer or wait for it; frees do not count."""
    return find(program, lambda op: not op.is_free and name in names((*op.reads, *op.writes)))


def wait_of(program: Program, index: int) -> int | None:
    """Returns the number of the wait for the transfer that op `index` starts; None if there is none. Several moves into
    one buffer are waited for in their order."""
    name, flight = program.ops[index].target, list[int]()
    for i, op in enumerate(program.ops):
        if op.transfers and op.target == name:
            flight.append(i)
        elif op.is_wait and op.target == name and flight and flight.pop(0) == index:
            return i
    return None


def alive(program: Program, name: str, index: int) -> bool:
    """Whether a buffer holds a value that op `index` can read and a later op uses."""
    if program.buffers[name].kind in PERSISTENT:
        return True
    uses = touching(program, name)
    return bool(uses) and uses[0] < index < uses[-1]


def places_of(program: Program, side: str, test: Callable[[Op, Ref], Any]) -> list[tuple[int, int]]:
    """(op, position) of the references on one side, "reads" or "writes", of all ops but waits and frees."""
    return [
        (i, n)
        for i, op in enumerate(program.ops)
        if not op.is_mark
        for n, ref in enumerate(getattr(op, side))
        if test(op, ref)
    ]


def form(program: Program, ref: Ref) -> tuple[object, ...]:
    """Returns the facts that must agree for one reference to stand for another: dtype, and shape in the segment or flat
    range."""
    buffer = program.buffers[ref.name]
    shape = buffer.shape if ref.start is None and buffer.bucket is None else ref.shape
    span = (ref.start, ref.stop, ref.mine or buffer.sharded, buffer.per) if shape is None else ()
    return buffer.dtype, shape, span


def alike(program: Program, ref: Ref) -> list[Ref]:
    """The other references of a reference's form: leaves, flat ranges, buffers without a bucket."""
    refs = []
    for name, buffer in program.buffers.items():
        if buffer.bucket is None:
            refs.append(Ref(name))
        elif ref.shape is None:
            refs.append(replace(ref, name=name))
        else:
            bucket = program.buckets[buffer.bucket]
            refs += [Ref(name, *bucket.place(i, buffer.per)) for i in range(len(bucket.slots))]
    return [other for other in refs if other != ref and form(program, other) == form(program, ref)]


# --- a program with one thing changed ---------------------------------------------------------------------------------


def with_ops(program: Program, ops: Sequence[Op]) -> Program:
    """Returns the program with other ops."""
    return replace(program, ops=tuple(ops))


def with_buffers(program: Program, *buffers: Buffer) -> Program:
    """Returns the program with these buffers replaced."""
    return replace(program, buffers={**program.buffers, **{b.name: b for b in buffers}})


def put(program: Program, index: int, op: Op) -> Program:
    """Returns the program with op `index` replaced."""
    return with_ops(program, [*program.ops[:index], op, *program.ops[index + 1 :]])


def insert(program: Program, index: int, *ops: Op) -> Program:
    """Returns the program with ops inserted before op `index`."""
    return with_ops(program, [*program.ops[:index], *ops, *program.ops[index:]])


def drop(program: Program, *indices: int | None) -> Program:
    """Returns the program without these ops (None: nothing to drop)."""
    return with_ops(program, [op for i, op in enumerate(program.ops) if i not in indices])


def move(program: Program, index: int, to: int) -> Program:
    """Returns the program with op `index` moved to op `to`: before that op if moved up, after it if moved down."""
    rest = [*program.ops[:index], *program.ops[index + 1 :]]
    return with_ops(program, [*rest[:to], program.ops[index], *rest[to:]])


def replaced(op: Op, side: str, index: int, ref: Ref) -> Op:
    """An op with one of its references another."""
    refs = list(getattr(op, side))
    refs[index] = ref
    return replace(op, reads=tuple(refs)) if side == "reads" else replace(op, writes=tuple(refs))


def unfreed(program: Program, index: int, name: str) -> Program:
    """Returns the program without the free of one buffer at op `index`."""
    left = tuple(ref for ref in program.ops[index].reads if ref.name != name)
    return put(program, index, replace(program.ops[index], reads=left)) if left else drop(program, index)


def never_freed(program: Program, name: str) -> Program:
    """Returns the program with a buffer that is never freed."""
    frees = find(program, lambda op: op.is_free and name in names(op.reads))
    return unfreed(program, frees[0], name) if frees else program
