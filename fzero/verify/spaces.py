"""spaces: the rules about device, host and disk: which memory an op may name, and what a move may bring where."""

from __future__ import annotations

from collections.abc import Iterator

from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.op import Op
from fzero.ir.program import Program, route
from fzero.ir.records import DISK, LANES, PERSISTENT, Ref
from fzero.verify.lifetimes import Fault


def spaces(program: Program) -> Iterator[Fault]:
    """An op names memory of one space, never the disk's. A move alone goes between two, with a value of one form."""
    for buffer in program.buffers.values():
        if buffer.space == DISK and buffer.kind not in (*PERSISTENT, "grad"):
            yield -1, f"{buffer.name} lies on disk, where only what is held between steps and gradients lie"
    for i, op in enumerate(program.ops):
        if op.moves:
            yield from ((i, what) for what in _move(program, op))
        elif not op.is_wait:
            yield from ((i, what) for what in _apart(program, op))


def _apart(program: Program, op: Op) -> Iterator[str]:
    first: dict[str, Ref] = {}
    for ref in (*op.reads, *op.writes):
        space = program.buffers[ref.name].space
        if space == DISK and not op.is_free:
            yield f"names {ref.name}, which lies on disk: a move brings it to memory first"
        elif op.transfers and space != "device":
            yield f"sends {ref.name}, which lies on the host: ranks exchange what lies on the device"
        first.setdefault(space, ref)
    if len(first) > 1 and not op.is_free:
        (a, one), (b, other), *_ = first.items()
        yield f"works on {one} ({a}) and {other} ({b}): what an op names lies in one space"


def _move(program: Program, op: Op) -> Iterator[str]:
    source, target = (program.buffers[ref.name] for ref in (op.reads[0], op.writes[0]))
    if (source.space, target.space) not in LANES or len(route(program, source.space, target.space)) > 1:
        yield f"goes from {source.space} to {target.space}: there is no such lane"
    if source.dtype is not target.dtype:
        yield f"brings {source.dtype} to {target.dtype}: a move changes nothing"
    for ref in (op.reads[0], op.writes[0]):
        buffer = program.buffers[ref.name]
        starts = {program.local_range(ref, rank)[0] for rank in (0, program.world_size - 1)}
        if buffer.space == DISK and any(start * buffer.dtype.itemsize % PAGE_BYTES for start in starts):
            yield f"{ref} begins off a page of the disk: tiles there are multiples of {PAGE_BYTES:,} bytes"
    sizes = [_numel(program, ref) for ref in (op.reads[0], op.writes[0])]
    if sizes[0] != sizes[1]:
        yield f"brings {sizes[0]} elements to {sizes[1]}"


def _numel(program: Program, ref: Ref) -> int | tuple[int, int]:
    """The elements of a reference on the first rank and on the last: of an own slice each has others."""
    buffer = program.buffers[ref.name]
    if buffer.bucket is None:
        return buffer.numel if ref.start is None else (ref.stop or 0) - ref.start
    first, last = (program.local_range(ref, rank) for rank in (0, program.world_size - 1))
    return first[1] - first[0], last[1] - last[0]
