"""edits: what mutations share. Finding a place in a program, and the program with one thing changed there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Buffer, Op, Ref

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
    items = list(items)
    return rng.choice(items) if items else None


# --- places in a program ----------------------------------------------------------------------------------------------


def find(program: Program, test: Callable[[Op], Any]) -> list[int]:
    return [i for i, one in enumerate(program.ops) if test(one)]


def names(refs: Iterable[Ref]) -> set[str]:
    return {ref.name for ref in refs}


def touching(program: Program, name: str) -> list[int]:
    """Where a buffer is used, waits for it included, frees not."""
    return find(program, lambda op: not op.is_free and name in names((*op.reads, *op.writes)))


def wait_of(program: Program, at: int) -> int | None:
    """The wait for the transfer that op `at` starts."""
    op = program.ops[at]
    name = (op.writes or op.reads)[0].name
    waits = find(program, lambda other: other.is_wait and other.reads[0].name == name)
    return next((i for i in waits if i > at), None)


def alive(program: Program, name: str, at: int) -> bool:
    """Whether a buffer holds something that op `at` finds and a later op uses."""
    if program.buffers[name].kind in PERSISTENT:
        return True
    uses = touching(program, name)
    return bool(uses) and uses[0] < at < uses[-1]


def spots(program: Program, side: str, test: Callable[[Op, Ref], Any]) -> list[tuple[int, int]]:
    """(op, position) of the references on one side, "reads" or "writes", of all ops but waits and frees."""
    return [
        (i, n)
        for i, op in enumerate(program.ops)
        if not op.is_mark
        for n, ref in enumerate(getattr(op, side))
        if test(op, ref)
    ]


def form(program: Program, ref: Ref) -> tuple[object, ...]:
    """What makes one reference able to stand for another: dtype, and the shape a segment sees or the flat range."""
    buffer = program.buffers[ref.name]
    shape = buffer.shape if ref.start is None and buffer.bucket is None else ref.shape
    span = (ref.start, ref.stop, ref.mine or buffer.sharded, buffer.per) if shape is None else ()
    return buffer.dtype, shape, span


def alike(program: Program, ref: Ref) -> list[Ref]:
    """The other references of a reference's form: leaves, flat ranges, buffers without a bucket."""
    found = []
    for name, buffer in program.buffers.items():
        if buffer.bucket is None:
            found.append(Ref(name))
        elif ref.shape is None:
            found.append(replace(ref, name=name))
        else:
            bucket = program.buckets[buffer.bucket]
            found += [Ref(name, *bucket.place(i, buffer.per)) for i in range(len(bucket.slots))]
    return [other for other in found if other != ref and form(program, other) == form(program, ref)]


# --- a program with one thing changed ---------------------------------------------------------------------------------


def with_ops(program: Program, ops: Sequence[Op]) -> Program:
    return replace(program, ops=tuple(ops))


def with_buffers(program: Program, *buffers: Buffer) -> Program:
    return replace(program, buffers={**program.buffers, **{b.name: b for b in buffers}})


def put(program: Program, at: int, op: Op) -> Program:
    return with_ops(program, [*program.ops[:at], op, *program.ops[at + 1 :]])


def insert(program: Program, at: int, *ops: Op) -> Program:
    return with_ops(program, [*program.ops[:at], *ops, *program.ops[at:]])


def drop(program: Program, *at: int | None) -> Program:
    return with_ops(program, [one for i, one in enumerate(program.ops) if i not in at])


def move(program: Program, at: int, to: int) -> Program:
    """Op `at` to where op `to` is, which then follows it (moved up) or goes before it (moved down)."""
    rest = [*program.ops[:at], *program.ops[at + 1 :]]
    return with_ops(program, [*rest[:to], program.ops[at], *rest[to:]])


def replaced(op: Op, side: str, index: int, ref: Ref) -> Op:
    """An op with one of its references another."""
    refs = list(getattr(op, side))
    refs[index] = ref
    return replace(op, reads=tuple(refs)) if side == "reads" else replace(op, writes=tuple(refs))


def unfreed(program: Program, at: int, name: str) -> Program:
    """Without the free of one buffer at op `at`."""
    left = tuple(ref for ref in program.ops[at].reads if ref.name != name)
    return put(program, at, replace(program.ops[at], reads=left)) if left else drop(program, at)


def never_freed(program: Program, name: str) -> Program:
    at = find(program, lambda op: op.is_free and name in names(op.reads))
    return unfreed(program, at[0], name) if at else program
