"""leaf_road: the road of one leaf through a step: how it lies at rest and in use, and every op that touches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fzero.errors import SpecError
from fzero.ir.op import Op
from fzero.ir.program import Program, moved_bytes, wire_bytes
from fzero.ir.records import PERSISTENT, Bucket, Buffer, Ref, Slot
from fzero.tree import suggest


@dataclass(frozen=True)
class Touch:
    """An op that touches a leaf. reads, writes: the buffers of the leaf in it. nbytes: sent or moved by one rank."""

    index: int
    op: Op
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class LeafRoad:
    """The road of a leaf. bucket, slot: where it lies; None for a leaf that has a buffer to itself. at_rest: the
    buffers between steps, of it and of its moments. in_use: those that exist within a step, with (first op, last op).
    """

    path: str
    role: int
    bucket: Bucket | None
    slot: Slot | None
    at_rest: tuple[Buffer, ...]
    in_use: Mapping[str, tuple[int, int]]
    touches: tuple[Touch, ...]


def road(programs: Mapping[int, Program], path: str) -> LeafRoad:
    """The road of a leaf, by its path in the state (`params/blocks/3/w`) or in the parameters (`blocks/3/w`).

    Raises SpecError for a path that no program has, with the nearest ones.
    """
    for role, program in programs.items():
        for bucket in program.buckets.values():
            for slot in bucket.slots:
                if path in names(program, bucket, slot):
                    return _of_bucket(program, role, path, bucket, slot)
        if path in program.buffers and program.buffers[path].kind in PERSISTENT:
            return _of_buffers(program, role, path, None, None, (program.buffers[path],))
    known = [slot.path for program in programs.values() for bucket in program.buckets.values() for slot in bucket.slots]
    shown = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
    raise SpecError(f"there is no leaf {path!r}.{suggest(path, known)} Leaves are {shown}")


def names(program: Program, bucket: Bucket, slot: Slot) -> set[str]:
    """The paths of a slot: below its entries, and in the state."""
    entries = {b.entry for b in program.buffers.values() if b.bucket == bucket.name and b.kind in PERSISTENT}
    return {slot.path, *(f"{entry}/{slot.path}" if entry else slot.path for entry in entries)}


def _of_bucket(program: Program, role: int, path: str, bucket: Bucket, slot: Slot) -> LeafRoad:
    held = tuple(b for b in program.buffers.values() if b.bucket == bucket.name and b.kind in PERSISTENT)
    entry = path.removesuffix(slot.path).rstrip("/")
    if entry:  # one column of the bucket was asked for
        held = tuple(b for b in held if b.entry == entry)
    return _of_buffers(program, role, path, bucket, slot, held)


def _of_buffers(
    program: Program, role: int, path: str, bucket: Bucket | None, slot: Slot | None, held: tuple[Buffer, ...]
) -> LeafRoad:
    touches = tuple(_touches(program, bucket, slot, {b.name for b in held}))
    used: dict[str, tuple[int, int]] = {}
    for touch in touches:
        for name in (*touch.reads, *touch.writes):
            if program.buffers[name].kind not in PERSISTENT:
                used[name] = (used.get(name, (touch.index,))[0], touch.index)
    return LeafRoad(path, role, bucket, slot, held, used, touches)


def _touches(program: Program, bucket: Bucket | None, slot: Slot | None, held: set[str]) -> Iterator[Touch]:
    def is_of(ref: Ref) -> bool:
        buffer = program.buffers.get(ref.name)
        if buffer is None or bucket is None or slot is None or buffer.bucket != bucket.name:
            return ref.name in held
        if buffer.kind in PERSISTENT and ref.name not in held:
            return False
        if ref.start is None:
            return True
        return ref.start * buffer.per < slot.stop and slot.start < (ref.stop or 0) * buffer.per

    for index, op in enumerate(program.ops):
        reads = tuple(dict.fromkeys(ref.name for ref in op.reads if is_of(ref)))
        writes = tuple(dict.fromkeys(ref.name for ref in op.writes if is_of(ref)))
        if reads or writes:
            yield Touch(index, op, reads, writes, wire_bytes(program, op) or moved_bytes(program, op))
