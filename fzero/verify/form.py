"""form: rules about a program's records, each by itself: kinds, counts, attributes, sizes, ranges, segments.

`form` comes first of all rules. It takes nothing for granted but that the text could be parsed; the others read the
records without a question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from fzero.codegen import inplace, segment_memory
from fzero.codegen.fusion import always_fused
from fzero.ir import as_strided, fx_nodes, fx_values
from fzero.ir.kinds import ANY, OPS, UNKNOWN
from fzero.ir.mesh import PIPELINE, within
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.program import Level, Program
from fzero.ir.records import ALIGN, DEVICE, DTYPE_NAMES, KINDS, PERSISTENT, SPACES, Buffer, Ref, tile_text
from fzero.ir.rewrite import Spans
from fzero.shard.moves import VIEWS
from fzero.verify.lifetimes import Fault

MOST = 1 << 62  # bytes and elements: what 64-bit integers hold
NUMBERS = ("at", "divisor", "flat", "fresh", "heap", "microbatch", "peer", "tag", "workspace")  # attributes


def form(program: Program) -> Iterator[Fault]:
    """Every record names things that exist: kinds, names, counts of references, numbers in their ranges."""
    yield from ((-1, what) for what in _mesh(program))
    for bucket in program.buckets.values():
        if not 0 < bucket.length < MOST:
            yield -1, f"bucket {bucket.name} has {bucket.length} elements"
    for buffer in program.buffers.values():
        yield from ((-1, f"{buffer.name} {what}") for what in _buffer(program, buffer))
    for name, target in program.metrics.items():
        if target not in program.buffers:
            yield -1, f"metric {name} is in {target}: there is no buffer {target}"
    for slot_key in program.trainable:
        slots = program.buckets[slot_key.bucket].slots if slot_key.bucket in program.buckets else ()
        if not 0 <= slot_key.slot < len(slots):
            yield -1, f"trainable {slot_key} is no slot of a bucket"
    for i, op in enumerate(program.ops):
        yield from ((i, what) for what in _op(program, op))


def _copy(program: Program, buffer: Buffer) -> Iterator[str]:
    """A copy has one master, of its form, and lies on the device."""
    like = [
        b
        for b in program.buffers.values()
        if b.kind == "param" and (b.bucket, b.entry) == (buffer.bucket, buffer.entry)
    ]
    if len(like) != 1 or buffer.bucket is None:
        yield f"is a copy, and {len(like)} columns of parameters could be its master"
        return
    forms = [(b.shape, b.sharded, b.per, b.parts, b.tile, b.space) for b in (buffer, like[0])]
    narrower = buffer.dtype.is_floating_point and buffer.dtype.itemsize < like[0].dtype.itemsize
    if forms[0] != forms[1] or buffer.space != DEVICE or buffer.per != 1 or not narrower:
        yield f"is a copy of {like[0].name}: needed its form on the device, in a smaller floating dtype"


def _mesh(program: Program) -> Iterator[str]:
    names, sizes = program.mesh.names, [size for _, size in program.mesh]
    if len(set(names)) < len(names) or min(sizes, default=1) < 1 or program.world_size > MOST:
        yield f"the mesh is {program.mesh}: every axis once, of one rank or more"
    if program.role is not None and PIPELINE not in program.mesh:
        yield f"the program is for role {program.role} of a pipeline: the mesh has no axis pp"
    for bucket in program.buckets.values():
        if bucket.axis not in program.mesh:
            yield f"bucket {bucket.name} is cut along axis {bucket.axis}, which the mesh has not"


def _buffer(program: Program, buffer: Buffer) -> Iterator[str]:
    if buffer.kind not in KINDS:
        yield f"is of kind {buffer.kind}: none of {', '.join(KINDS)}"
    if buffer.bucket is not None and buffer.bucket not in program.buckets:
        yield f"is of bucket {buffer.bucket}, which is not there"
    if buffer.bucket is None and (buffer.sharded or buffer.per != 1 or buffer.parts != 1):
        yield "is in no bucket: it has no own slice (sharded), no blocks (per) and no parts of ranks (parts)"
    bucket = program.buckets.get(buffer.bucket or "")
    if buffer.sharded and bucket is not None and within(bucket.axis, buffer.sharded) is None:
        yield f"is sharded along {buffer.sharded}: its bucket is cut along {bucket.axis}"
    if buffer.per <= 0 or buffer.parts < 1:
        yield f"has one element for each {buffer.per}, {buffer.parts} times"
    if buffer.space not in SPACES:
        yield f"lies in {buffer.space}: none of {', '.join(SPACES)}"
    if buffer.tile is not None and (buffer.bucket is None or not _is_tile(buffer.tile)):
        yield f"is tile {tile_text(buffer.tile)}: of a buffer of a bucket, whole blocks of {ALIGN} elements"
    if buffer.kind == "rank" and buffer.axis not in program.mesh:
        yield f"is this rank's place along {buffer.axis}: the mesh has {list(program.mesh.names)}"
    if buffer.kind == "copy":
        yield from _copy(program, buffer)
    if buffer.nbytes >= MOST or abs(buffer.at or 0) >= MOST:
        yield f"has {buffer.nbytes:,} bytes at {buffer.at}: more than memory has"


def _op(program: Program, op: Op) -> Iterator[str]:
    if op.row is UNKNOWN:
        yield f"{op.kind} is none of {', '.join(OPS)}"
        return
    counts = (("reads", op.reads, op.row.num_reads), ("writes", op.writes, op.row.num_writes))
    for side, refs, (least, most) in counts:
        if not least <= len(refs) <= most:
            needed = f"{least} or more" if most == ANY else str(least) if least == most else f"{least} to {most}"
            yield f"{side} {len(refs)} buffers: a {op.kind} {side} {needed}"
    for ref in (*op.reads, *op.writes):
        if ref.name not in program.buffers:
            yield f"there is no buffer {ref.name}"
        if ref.tile is not None and not (_is_tile(ref.tile) and ref.shape is None):
            yield f"{ref} names a tile that is none: needed whole blocks of {ALIGN} elements of a flat range"
        if ref.mine and ref.shape is not None:
            yield f"{ref} is this rank's own slice, and of shape {list(ref.shape)}: a slice is a flat range"
    for name in NUMBERS:
        value = op.get(name, 0)
        if not isinstance(value, int) or not 0 <= value < MOST:
            yield f"{name}={value} is no number of zero or more"
    if op.divisor == 0:
        yield "divides by zero"
    if op.is_message and op.peer is None:
        yield f"names no peer to {op.kind} with"


def _is_tile(tile: tuple[int, int]) -> bool:
    number, size = tile
    return 0 <= number < MOST and 0 < size < MOST and size % ALIGN == 0


def partition(program: Program) -> Iterator[Fault]:
    """Slots are aligned and apart; shards of a bucket are its length over the ranks; references stay inside."""
    for bucket in program.buckets.values():
        n, end = program.mesh.size(bucket.axis), 0
        for slot in bucket.slots:
            if slot.start < end or slot.start % ALIGN or slot.stop > bucket.length:
                place = f"[{slot.start}:{slot.stop}] of {bucket.name}"
                yield -1, f"leaf {slot.path} lies at {place}: overlapping, unaligned or out"
            if math.prod(slot.shape) != slot.stop - slot.start:
                yield -1, f"leaf {slot.path} has shape {slot.shape}, and {slot.stop - slot.start} elements"
            end = slot.stop
        if bucket.length % (n * ALIGN):
            yield -1, f"bucket {bucket.name} has {bucket.length} elements: not a multiple of {n} ranks x {ALIGN}"
    for buffer in program.buffers.values():
        if buffer.bucket is not None:
            bucket = program.buckets[buffer.bucket]
            needed = (program.own_length(buffer) // buffer.per * buffer.parts,)
            if ALIGN % buffer.per:
                yield -1, f"{buffer.name} has one element for each {buffer.per}: they do not part {ALIGN} evenly"
            if buffer.shape != needed:
                yield (
                    -1,
                    f"{buffer.name} has shape {buffer.shape}: a {_part_text(buffer)} has {needed}",
                )
    for i, op in enumerate(program.ops):
        for ref in (*op.reads, *op.writes):
            buffer = program.buffers[ref.name]
            if ref.start is not None and not 0 <= ref.start <= (ref.stop or 0) <= program.extent(buffer):
                yield i, f"{ref} lies outside of {buffer.name}, which has {program.extent(buffer)} elements"
            if ref.start is not None and (ref.start % buffer.per or (ref.stop or 0) % buffer.per):
                yield i, f"{ref} cuts through a block: {buffer.name} has one element for each {buffer.per}"
            cut = buffer.kind == "batch" and ref.start is not None and ref.shape is not None
            if cut and (ref.shape or ())[1:] != buffer.shape[1:]:
                yield i, f"{ref} is no part of the batch: {ref.name} of shape {buffer.shape} is cut along its first dim"
            if (ref.mine or ref.tile) and buffer.bucket is None:
                yield i, f"{ref}: {buffer.name} is in no bucket and has no own slice"
            if buffer.tile is not None and ref.start is not None and ref.tile != buffer.tile:
                yield i, f"{ref} is not of the tile that {buffer.name} is: {tile_text(buffer.tile)}"
            if ref.shape is not None and math.prod(ref.shape) * buffer.per * buffer.parts != (ref.stop or 0) - (
                ref.start or 0
            ):
                yield i, f"{ref} has {math.prod(ref.shape)} elements in its shape, and others in its range"
        yield from _cut_alike(program, i, op)


def _part_text(buffer: Buffer) -> str:
    """What a buffer has of its bucket, in a word."""
    return "tile" if buffer.tile is not None else "shard" if buffer.sharded else "whole"


def _cut_alike(program: Program, i: int, op: Op) -> Iterator[Fault]:
    """Equal flat ranges of two buckets that one op works on hold leaves at the same places."""
    seen: dict[tuple[int, int | None], tuple[Ref, list[tuple[int, int]]]] = {}
    for ref in (*op.reads, *op.writes):
        bucket = program.buckets.get(program.buffers[ref.name].bucket or "")
        if bucket is None or ref.start is None or ref.shape is not None:
            continue
        inside = [(bucket.slots[n].start, bucket.slots[n].stop) for n in bucket.inside(ref.start, ref.stop or 0)]
        other, places = seen.setdefault((ref.start, ref.stop), (ref, inside))
        if places != inside:
            yield i, f"{ref} holds leaves at {inside}, {other} at {places}"


def aliasing(program: Program) -> Iterator[Fault]:
    """Each write of a run is equal to one of its reads or apart from all of them. Its writes are apart from one
    another."""
    for i, op in enumerate(program.ops):
        if not op.computes:
            continue
        refs = (*op.reads, *op.writes)
        spans = Spans(refs)
        for n, ref in enumerate(op.writes, len(op.reads)):
            for other in spans.over(ref):
                if other < len(op.reads) and ref != refs[other]:
                    yield i, f"writes {ref}, which overlaps {refs[other]} that it reads"
                elif other > n:
                    yield i, f"writes {ref} and {refs[other]}, which overlap"


def calls(program: Program) -> Iterator[Fault]:
    """A run names a segment that is there, gives it the tensors that it takes and returns, and room to work in."""
    fused = always_fused(program)
    for i, op in ((i, op) for i, op in enumerate(program.ops) if op.computes):
        gm = program.segments.get(op.segment)
        if gm is None:
            yield i, f"segment {op.get('segment')} is not in the program: fzero.parse(text, program.segments)"
            continue
        results, takes = fx_nodes.outputs(gm.graph), fx_nodes.placeholders(gm.graph)
        num_results = len(results)
        num_given = len(op.reads) + len(op.writes) - num_results
        if num_results != op.num_outputs or len(takes) != num_given or num_results > len(op.writes):
            yield (
                i,
                f"segment {op.get('segment')} takes {len(takes)} and returns {num_results}, the op gives {num_given}",
            )
            continue
        nothing = [ref for ref, node in zip(op.writes, results, strict=False) if node.meta["val"] is None]
        if nothing:
            yield i, f"segment {op.get('segment')} returns nothing for {nothing[0]}"
            continue
        owners = [fx_nodes.base(node) for node in results]
        values = [value for node in results for value in fx_values.memory(node)]
        returns_input = any(node.op == "placeholder" for node in owners)
        if returns_input or len(set(owners)) < len(owners) or len(set(values)) < len(values):
            yield i, f"segment {op.get('segment')} returns a tensor that shares its memory with another or an input"
        for ref, node in zip(op.writes[:num_results], results, strict=True):
            if fx_nodes.is_view(node):
                yield i, f"returns {ref} as a view of {fx_nodes.base(node)}: a buffer holds a value as it is computed"
            if not fx_values.is_dense(node.meta["val"]):
                yield i, f"returns {ref} with strides {node.meta['val'].stride()}: its buffer has no room for the gaps"
            buffer = program.buffers[ref.name]
            if buffer.kind in PERSISTENT:
                yield i, f"returns {ref} as a new tensor: {ref.name} is held between steps and must be written in place"
            elif ref.start is not None or buffer.bucket is not None:
                yield i, f"returns {ref} as a new tensor: only a whole buffer that is in no bucket can become one"
        for ref, node in zip(
            (*op.writes[:num_results], *op.reads, *op.writes[num_results:]), (*results, *takes), strict=True
        ):
            if (what := _unfit(program, ref, node.meta["val"])) is not None:
                yield i, what
        cut = next((ref for ref in (*op.reads, *op.writes) if ref.shape is None and (ref.stop or 0) % ALIGN), None)
        if cut is not None and op.is_flat and not any(map(_by_blocks, gm.graph.nodes)):
            yield i, f"{cut} ends off a multiple of {ALIGN} elements: the bits of the last ones depend on that"
        if op.offset is not None or program.level >= Level.SIZED:
            yield from ((i, what) for what in _short_of_room(op, fused.get(op.segment, gm)))


def _short_of_room(op: Op, gm: fx.GraphModule) -> Iterator[str]:
    need, room = segment_memory.layout(gm, inplace.apart(op)).nbytes, op.workspace
    if need > room:
        yield f"segment {op.get('segment')} works in {need:,} bytes, its workspace has {room:,}"


def _by_blocks(node: fx.Node) -> bool:
    """Whether an op works on blocks, whose last one it pads itself."""
    pure, *_ = of(node.target).in_place or (node.target,)
    return of(pure).blockwise is not None


def _unfit(program: Program, ref: Ref, value: torch.Tensor) -> str | None:
    """The reason why a reference does not fit the segment's operand; None where it fits. A flat range may be shorter
    than planned."""
    buffer = program.buffers[ref.name]
    shape = buffer.shape if ref.start is None else ref.shape
    wanted = f"the segment has {DTYPE_NAMES[value.dtype]}{list(value.shape)} there"
    if buffer.dtype is not value.dtype or (shape is not None and shape != tuple(value.shape)):
        return f"{ref} is {DTYPE_NAMES[buffer.dtype]}{list(shape or ())}: {wanted}"
    if shape is None:
        bucket = program.buckets.get(buffer.bucket or "")
        cut = program.cut(ref)
        most = min(length(program, ref), program.slice_length(bucket, cut) if cut and bucket else MOST)
        if (tile := ref.tile or buffer.tile) is not None and bucket is not None:
            most = min(most, tile[1])
        most = int(most / buffer.per)
        if (
            value.ndim == 0
            or tuple(value.shape[:-1]) != ((buffer.parts,) if buffer.parts > 1 else ())
            or most > value.shape[-1]
        ):
            return f"{ref} has up to {most} elements: {wanted}"
    return None


def length(program: Program, ref: Ref) -> int:
    """The elements that a reference names, in the coordinates of its bucket."""
    return program.buffers[ref.name].numel if ref.start is None else (ref.stop or 0) - ref.start


def inside(program: Program) -> Iterator[Fault]:
    """No op of a segment reads or writes outside its operands' memory, and none views what its strides do not allow."""
    checked: set[str] = set()
    for i, op in enumerate(program.ops):
        key = op.segment
        if key in program.segments and key not in checked:
            checked.add(key)
            for what in (*as_strided.faults(program.segments[key]), *_no_views(program.segments[key])):
                yield i, what


def _no_views(gm: fx.GraphModule) -> Iterator[str]:
    """The views that would have to copy: of values in another order of memory than the trace's."""
    for node in gm.graph.nodes:
        if node.target not in VIEWS:
            continue
        value = fx_nodes.operand(node).meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            held = torch.empty_strided(value.shape, value.stride(), device="meta")
            try:
                held.view(node.args[1])
            except RuntimeError:
                yield f"{node.name} sees a value of strides {list(value.stride())} as {list(node.args[1])}: no view can"
