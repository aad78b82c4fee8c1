"""The program: the work of one step, one op per line.

A `Program` is one rank role's schedule. In data parallelism every rank shares one object; verify and interpret take
`{rank: Program}`, so that a pipeline's stages, or a mutation on one rank, are ordinary cases. A program and its records
(`fzero.ir.records`, `fzero.ir.op`) are frozen, and a pass makes a new program with `dataclasses.replace`.

Text form (`str(program)`, `fzero.parse`): one line per record. The text after `#` on an op line holds derived facts
(bytes on the wire, live bytes after the op) and the reason for the op. Only the reason is read back.

    all_gather params.b1 -> full.b1.0  axis=dp  # wire 4,096 live 1.2M | forward blocks/0 (gpt.py:41)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any
from urllib.parse import quote

from fzero import backend
from fzero.html_table import html_table
from fzero.ir.liveness import live_bytes
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op
from fzero.ir.records import (
    ALIGN,
    DEVICE,
    DISK,
    DTYPE_NAMES,
    HOST,
    SPACES,
    Bucket,
    Buffer,
    Ref,
    SlotKey,
    shape_text,
    tile_text,
)
from fzero.ir.wire import op_bytes

HEADER = "fzero program 3"
TRANSPORTS = tuple(name for known in backend.BACKENDS.values() for name in known.transports)


class Level(IntEnum):
    """How much of a program is final. A level holds what those before it hold; a pass says which it reaches.

    NAIVE: nothing. CAPPED: gathers start where they stay, and `gather_cap_bytes` bounds what they hold at once. FREED:
    what the step makes is freed after its last use. SIZED: each segment's workspace is known. PLACED: buffers and
    workspaces have their places in the arenas.
    """

    NAIVE = 0
    CAPPED = 1
    FREED = 2
    SIZED = 3
    PLACED = 4


@dataclass(frozen=True)
class Program:
    """A step for one role.

    metrics: by a metric's name, the buffer that holds it at the end.
    meaning: the digest of what the captured step computes; verify recomputes it from the ops.
    trainable: the slots that the step must reduce and update once.
    passes: the names of the passes that made it, for who reads it. level: what they made final, for what asks.
    role: which role of a pipeline it is for, the coordinate on the mesh axis `pp`. None: there is no pipeline.
    transport: how bytes move between ranks: "p2p" (messages), "shared" (one memory) or "nccl".
    segments: by hash, the `torch.fx.GraphModule`s. They take no part in equality: the hash in the op does.
    """

    mesh: Mesh
    buckets: Mapping[str, Bucket]
    buffers: Mapping[str, Buffer]
    ops: tuple[Op, ...]
    metrics: Mapping[str, str]
    meaning: str = ""
    gather_cap_bytes: int = 0
    microbatches: int = 1
    trainable: tuple[SlotKey, ...] = ()
    passes: tuple[str, ...] = ()
    level: Level = Level.NAIVE
    transport: str = "p2p"
    role: int | None = None
    segments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        """All ranks of the mesh."""
        return self.mesh.world_size

    def is_shared(self, bucket: str) -> bool:
        """Whether several ranks own a slice of a bucket each."""
        return self.mesh.size(self.buckets[bucket].axis) > 1

    def slice_length(self, bucket: Bucket, axis: str | None = None) -> int:
        """The elements of a bucket that each rank owns, or has along an axis."""
        return bucket.length // self.mesh.size(axis or bucket.axis)

    def cut(self, ref: Ref) -> str | None:
        """The axis along which a reference is the rank's slice; None if it is the same on every rank."""
        buffer = self.buffers[ref.name]
        if ref.mine and buffer.bucket is not None:
            return self.buckets[buffer.bucket].axis
        return buffer.sharded

    def _slice(self, bucket: Bucket, axis: str, rank: int) -> tuple[int, int]:
        size, place = self.slice_length(bucket, axis), self.mesh.coordinate(rank, axis)
        return place * size, (place + 1) * size

    def space(self, op: Op) -> str:
        """The space that an op works in: that of what it names. A move is of the space that it brings a value to."""
        names = [ref.name for ref in (*op.writes, *op.reads) if ref.name in self.buffers]
        return self.buffers[names[0]].space if names else DEVICE

    @property
    def arena_bytes(self) -> int:
        """Bytes of the one piece of device memory that placed buffers and workspaces lie in."""
        return self.arenas[DEVICE]

    @cached_property
    def arenas(self) -> Mapping[str, int]:
        """By space, the bytes of the one piece of it that placed buffers and workspaces lie in. Disk: the file."""
        ends = {space: [0] for space in SPACES}
        for b in self.buffers.values():
            if b.at is not None:
                ends[b.space].append(b.at + b.nbytes)
        for op in self.ops:
            if op.offset is not None:
                ends[self.space(op)].append(op.offset + op.workspace)
        return {space: -(-max(of) // ALIGN) * ALIGN for space, of in ends.items()}  # whole elements of every dtype

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of the text without comments: equal programs, equal digests."""
        text = "\n".join(line.split("  # ")[0] for line in to_text(self, live=()).split("\n"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """By each copy that stays between steps, its master: the column of parameters whose cast it is, before the step
        and after it. A copy without one is left out."""
        masters = {(b.bucket, b.entry): b.name for b in self.buffers.values() if b.kind == "param"}
        held = (b for b in self.buffers.values() if b.kind == "copy")
        return {b.name: masters[b.bucket, b.entry] for b in held if (b.bucket, b.entry) in masters}

    def local_range(self, ref: Ref, rank: int) -> tuple[int, int]:
        """The elements of `ref`'s own buffer that it names on `rank`, in that buffer's coordinates."""
        buffer = self.buffers[ref.name]
        start, stop = (0, self.extent(buffer)) if ref.start is None else (ref.start, ref.stop or 0)
        base = 0
        if axis := self.cut(ref):
            assert buffer.bucket is not None, f"{ref} has no slice of its own: {buffer.name} is in no bucket"
            bucket = self.buckets[buffer.bucket]
            low, high = self._slice(bucket, axis, rank)
            start, stop = min(max(start, low), high), min(max(stop, low), high)
            base = self._slice(bucket, buffer.sharded, rank)[0] if buffer.sharded else 0
        if tile := ref.tile or buffer.tile:
            low, high = self.tile_range(ref, tile, rank)
            start, stop = min(max(start, low), high), min(max(stop, low), high)
            base = low if buffer.tile else base
        return (start - base) // buffer.per, (stop - base) // buffer.per

    def tile_range(self, ref: Ref, tile: tuple[int, int], rank: int) -> tuple[int, int]:
        """The elements of a tile of what `ref` names on `rank`, in the bucket's coordinates."""
        bucket = self.buckets[self.buffers[ref.name].bucket or ""]
        axis, (number, size) = self.cut(ref), tile
        low, high = self._slice(bucket, axis, rank) if axis else (0, bucket.length)
        return min(low + number * size, high), min(low + (number + 1) * size, high)

    def num_tiles(self, ref: Ref, size: int) -> int:
        """How many tiles of so many elements there are of what a rank has of a reference's bucket."""
        return -(-self.slice_of(ref) // size)

    def slice_of(self, ref: Ref) -> int:
        """The elements of its bucket that a rank has of what a reference may name: all, or an equal slice."""
        bucket, axis = self.buckets[self.buffers[ref.name].bucket or ""], self.cut(ref)
        return self.slice_length(bucket, axis) if axis else bucket.length

    def own_length(self, buffer: Buffer) -> int:
        """The elements of its bucket that a buffer has: all, an equal slice of them, or a tile of either."""
        bucket = self.buckets[buffer.bucket or ""]
        length = self.slice_length(bucket, buffer.sharded) if buffer.sharded else bucket.length
        if buffer.tile is None:
            return length
        number, size = buffer.tile
        return max(min(length - number * size, size), 0)

    def extent(self, buffer: Buffer) -> int:
        """The elements a whole reference spans, in the coordinates references use: the bucket's for a shard."""
        sharded = (buffer.sharded or buffer.tile) and buffer.bucket is not None
        return self.buckets[buffer.bucket or ""].length if sharded else int(buffer.numel * buffer.per) // buffer.parts

    def __str__(self) -> str:
        return to_text(self, live_bytes(self.ops, self.buffers, lambda buffer: buffer.space == DEVICE))

    def __repr__(self) -> str:
        role = "" if self.role is None else f"role {self.role}, "
        return f"Program(mesh {self.mesh}, {role}{len(self.ops):,} ops: print it)"

    def _repr_html_(self) -> str:
        """What a notebook shows: the ops as a table."""
        levels = live_bytes(self.ops, self.buffers, lambda buffer: buffer.space == DEVICE)
        rows = [
            (n, op_text(op).split("  ")[0], bytes_text(self, op), live, op.why)
            for n, (op, live) in enumerate(zip(self.ops, levels, strict=True))
        ]
        role = "" if self.role is None else f", role {self.role}"
        title = f"program {self.digest} on {self.mesh}{role}: {len(self.ops):,} ops"
        return html_table(title, ["op", "reads -> writes", "sent or moved", "live bytes", "why"], rows)


def to_text(program: Program, live: Iterable[int]) -> str:
    """The text form; `live` gives the live bytes after each op, or nothing."""
    lines = [HEADER]
    lines.append(f"mesh {program.mesh}")
    lines += [] if program.role is None else [f"role {program.role}"]
    lines.append(f"transport {program.transport}")
    lines.append(f"meaning {program.meaning or '-'}")
    lines.append(f"gather_cap_bytes {program.gather_cap_bytes}")
    lines.append(f"microbatches {program.microbatches}")
    lines.append("passes " + (" ".join(program.passes) or "-"))
    lines.append(f"level {program.level.name.lower()}")
    lines.append("trainable " + (" ".join(map(str, program.trainable)) or "-"))
    for bucket in program.buckets.values():
        slots = " ".join(f"{_quote(s.path)}[{s.start}:{s.stop}:{shape_text(s.shape)}]" for s in bucket.slots)
        facts = f"axis={bucket.axis} updates={'slices' if bucket.updates_slices else 'whole'} "
        facts += f"gathered={'kept' if bucket.keeps_gathered else 'dropped'} reduced={bucket.reduce_when}"
        facts += "" if bucket.role is None else f" role={bucket.role}"
        facts += "" if bucket.copy is None else f" copy={bucket.copy}"
        facts += (f" layer={_quote(bucket.layer)}" if bucket.layer else "") + " numbered" * bucket.numbered
        lines.append(f"bucket {bucket.name} length={bucket.length} {facts} {slots}")
    for b in program.buffers.values():
        extra = f" bucket={b.bucket}" if b.bucket else ""
        extra += (f" sharded={b.sharded}" if b.sharded else "") + (" per_rank" if b.per_rank else "")
        extra += (f" per={b.per}" if b.per != 1 else "") + (f" parts={b.parts}" if b.parts != 1 else "")
        extra += f" at={b.at}" if b.at is not None else ""
        extra += f" space={b.space}" if b.space != DEVICE else ""
        extra += f" tile={tile_text(b.tile)}" if b.tile is not None else ""
        extra += f" entry={_quote(b.entry)}" if b.entry else ""
        extra += (f" axis={b.axis}" if b.axis else "") + (f" lent={b.lent}" if b.lent else "")
        extra += f"  # {_one_line(b.note)}" if b.note else ""
        lines.append(f"buffer {b.name} {DTYPE_NAMES[b.dtype]}[{shape_text(b.shape)}] {b.kind}{extra}")
    for name, buffer in program.metrics.items():
        lines.append(f"metric {_quote(name)} {buffer}")
    lines.append("ops")
    levels = list(live)
    for index, op in enumerate(program.ops):
        after = levels[index] if index < len(levels) else None
        lines.append(_op_line(index, op, bytes_text(program, op), after))
    return "\n".join(lines) + "\n"


def op_text(op: Op) -> str:
    """An op without its number and comment."""
    text = f"{op.kind} " + " ".join(map(str, op.reads))
    text += (" -> " if op.writes else "") + " ".join(map(str, op.writes))
    return text + "".join(f"  {key}={value}" for key, value in ((("axis", op.axis),) if op.axis else ()) + op.attrs)


def bytes_text(program: Program, op: Op) -> str:
    """What an op sends or moves, as its comment has it; "" where it does neither."""
    if wire := wire_bytes(program, op):
        return f"wire {wire:,}"
    return f"{'→'.join(lane(program, op))} {moved_bytes(program, op):,}" if lane(program, op) else ""


def _op_line(index: int, op: Op, moved: str, live: int | None) -> str:
    text = f"{index:4d} {op_text(op)}"
    notes = ([moved] if moved else []) + ([f"live {live:,}"] if live is not None else [])
    comment = " ".join(notes) + (f" | {_one_line(op.why)}" if op.why else "")
    return text.rstrip() + (f"  # {comment}" if comment else "")


def _one_line(text: str) -> str:
    """A comment: the key of a leaf that it names may hold a line break."""
    return text.replace("\n", "\\n")


def _quote(text: str) -> str:
    return quote(text, safe="/._-+*@,()'!:") or "%"


def wire_bytes(program: Program, op: Op) -> int:
    """Bytes that one rank sends for `op`; 0 where it sends none, or where the op does not fit its program."""
    if any(ref.name not in program.buffers for ref in (*op.reads, *op.writes)):
        return 0  # verify refuses it, and prints it
    if op.is_collective and op.axis not in program.mesh:
        return 0
    ranks = program.mesh.size(str(op.axis)) if op.is_collective else 1
    read, written = ([program.buffers[ref.name].nbytes for ref in refs] for refs in (op.reads, op.writes))
    return op_bytes(op, read, written, ranks)


def route(program: Program, source: str, target: str) -> tuple[str, ...]:
    """The spaces that a value comes to on its way from one to another, the last included. A disk reads and writes the
    CPU's memory, which is a CPU world's device too; to a CUDA device it goes through the host."""
    if backend.of_transport(program.transport).disk_by_host and {source, target} == {DEVICE, DISK}:
        return (HOST, target)
    return (target,)


def lane(program: Program, op: Op) -> tuple[str, ...]:
    """(from which space, to which) a move goes; () for any other op, or where it does not fit its program."""
    names = [ref.name for ref in (*op.reads[:1], *op.writes[:1])]
    if not op.moves or len(names) < 2 or any(name not in program.buffers for name in names):
        return ()
    return tuple(program.buffers[name].space for name in names)


def moved_bytes(program: Program, op: Op) -> int:
    """Bytes that a move brings from one space to another on the first rank; 0 for any other op, or where it does not
    fit its program."""
    return named_bytes(program, op.reads[0]) if lane(program, op) else 0


def named_bytes(program: Program, ref: Ref) -> int:
    """Bytes that a reference names on the first rank; 0 where it does not fit its program."""
    buffer = program.buffers[ref.name]
    if ref.start is None:
        return buffer.nbytes
    if buffer.bucket is None:
        return ((ref.stop or 0) - ref.start) * buffer.dtype.itemsize
    bucket = program.buckets.get(buffer.bucket)
    axes = [axis for axis in (bucket.axis, buffer.sharded) if axis is not None] if bucket is not None else []
    if bucket is None or buffer.per <= 0 or any(axis not in program.mesh for axis in axes):
        return 0
    start, stop = program.local_range(ref, 0)
    return max(stop - start, 0) * buffer.parts * buffer.dtype.itemsize


def lane_bytes(program: Program) -> dict[str, int]:
    """By lane (`disk→host`), the bytes that one rank moves in a step."""
    total: dict[str, int] = {}
    for op in program.ops:
        if way := lane(program, op):
            name = "→".join(way)
            total[name] = total.get(name, 0) + moved_bytes(program, op)
    return total
