"""abstract: runs a program on terms instead of tensors; verify compares the result with the meaning of the captured
step.

Memory is modelled as the ops see it. A buffer holds terms by range; a flat buffer holds one for each leaf. It knows the
ranges of which only the own slice was written. Flat references read and write whole leaves. A reference is `Undefined`
if it cuts through a leaf, reads a value that was never computed, or takes one rank's slice for the whole. A write
removes all terms that it overlaps: a later read must have the range of a write. A leaf of which tiles are written one
by one has a term for each tile (`Tiles`) until they are one.
"""

from __future__ import annotations

from typing import Any

from fzero.ir import fx_nodes
from fzero.ir.collectives import Collective
from fzero.ir.mesh import DATA, parts_of, within
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import GIVEN, PERSISTENT, VARYING, Bucket, Buffer, Ref
from fzero.verify.contents import Content, Tiles, tile_of, with_tile
from fzero.verify.terms import (
    NOWHERE,
    PartialTerm,
    Undefined,
    Vec,
    digest,
    evaluate,
    gathered,
    metric,
    moved,
    part,
    reduced,
    term,
)


class Abstract:
    """A program run on terms. `memory` maps a buffer to its `Content`; only the methods of this class write it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory: dict[str, Content] = {}
        self.sent: list[tuple[str, object]] = []  # messages: other ranks compute with them, so they are meant too
        everywhere = frozenset(axis for axis, size in program.mesh if size > 1 and axis in DATA)
        for name, buffer in program.buffers.items():
            if buffer.kind in PERSISTENT:
                over = everywhere if buffer.kind in VARYING or buffer.per_rank else NOWHERE
                what = name
                if buffer.kind == "rank":
                    over = frozenset(a for a in parts_of(buffer.axis) if program.mesh.size(a) > 1)
                    what = f"rank:{buffer.axis}"
                self.memory[name] = Content(
                    {key: term("input", what, slot).over(over) for slot, key in self._keys(buffer)}
                )

    def run(self) -> str:
        """The meaning of the state that the program leaves behind."""
        for index, op in enumerate(self.program.ops):
            try:
                self.step(op)
            except Undefined as error:
                raise Undefined(str(error), index) from None
        kept = digest(*self.results())
        return term(kept, sorted(self.sent, key=str)) if self.sent else kept

    def results(self) -> tuple[dict[tuple[str, int | None], Any], dict[str, Any]]:
        """(the state by buffer and slot, the metrics by name), as terms, at the end. Raises `Undefined` where a part is
        missing."""
        state: dict[tuple[str, int | None], Any] = {}
        for name, buffer in self.program.buffers.items():
            if buffer.kind in PERSISTENT and buffer.kind not in GIVEN:
                content = self._content(name)
                for slot, key in self._keys(buffer):
                    if key in content.own_slices:
                        raise Undefined(f"{name} keeps only one rank's slice of {key}: it was not gathered")
                    state[(name, slot)] = self._term(content, key, Ref(name))
        metrics = {name: self.program.buffers[buffer] for name, buffer in self.program.metrics.items()}
        return state, {name: metric(self.read(Ref(b.name)), b.dtype, b.shape) for name, b in metrics.items()}

    def step(self, op: Op) -> None:
        """Runs one op on terms: changes `memory`. Raises `Undefined` where the op has no meaning."""
        if op.computes:
            gm = self.program.segments[op.segment]
            num_dest = len(fx_nodes.placeholders(gm.graph)) - len(op.reads)
            dests = op.writes[len(op.writes) - num_dest :]
            values = [self.read(ref) for ref in op.reads]
            first: dict[Ref, int] = {}
            shared = {i: first[ref] for i, ref in enumerate((*op.reads, *dests)) if first.setdefault(ref, i) != i}
            outs, written = evaluate(gm, [*values, *map(self._held, dests)], shared)
            for ref, value in zip(op.writes, outs, strict=False):
                self.write(ref, value)
            for position, value in written.items():
                reads_too = position < len(op.reads)
                self.write(op.reads[position] if reads_too else dests[position - len(op.reads)], value)
        elif op.moves and op.reads[0].start is None and op.writes[0].start is None:
            self.bring(op.reads[0], op.writes[0])
        elif op.row.copies:
            self.write(op.writes[0], self.read(op.reads[0]))
        elif op.row.runs is not None:
            for i, ref in enumerate(op.writes):
                self.write(ref, term(op.kind, i, op.attrs, *map(self.read, op.reads)))
        elif (record := op.row.collective) is not None:
            self.collective(op, record)
        elif op.is_free:
            for ref in op.reads:
                self.memory.pop(ref.name, None)
        elif op.is_send:
            self.sent.append((f"{op.axis} {op.peer} {op.tag}", self.read(op.reads[0])))
        elif op.is_recv:
            over = frozenset((str(op.axis),))
            self.write(op.writes[0], term("recv", op.axis, op.peer, op.tag).over(over))
        elif not op.is_mark:
            raise Undefined(f"{op.kind} of {', '.join(map(str, op.reads))} has no meaning")

    def _held(self, ref: Ref) -> Any:
        """The term of a destination before it is written, for ops that work in place on it; `Undefined` where it holds
        nothing."""
        try:
            return self.read(ref)
        except Undefined as error:
            return error

    def collective(self, op: Op, record: Collective) -> None:
        """A transfer among the ranks of an axis: of a value that lies in parts, or of a bucket (`Collective.term`)."""
        if self.program.buffers[op.reads[0].name].bucket is None and not op.row.small:
            self.move(op)
        elif record.term == "reduced":
            self.reduce(op)
        elif record.term == "gathered":
            self.gather(op.reads[0], op.writes[0], op.axis)
        else:
            raise Undefined(f"{op.kind} of {', '.join(map(str, op.reads))} has no meaning")

    def move(self, op: Op) -> None:
        """A transfer of a value that lies in parts, in no bucket. Raises `Undefined` for anything but whole buffers."""
        source, dest = op.reads[0], op.writes[0]
        if op.axis is None or op.axis not in self.program.mesh:
            raise Undefined(f"there is no axis {op.axis!r}")
        if source.start is not None or dest.start is not None or self.program.buffers[dest.name].bucket is not None:
            raise Undefined(f"a {op.kind} of a value takes all of it to a value, not {source} to {dest}")
        for scratch in op.writes[1:]:
            self.memory.pop(scratch.name, None)
        world = self.program.mesh.size(op.axis)
        if op.divisor != 1 or (op.reduction != "sum" and op.kind != "all_reduce"):
            raise Undefined(f"a {op.kind} of a value takes a {op.reduction} divided by {op.divisor}")
        self.write(dest, moved(op.kind, self.read(source), op.axis, world, op.reduction))

    def bring(self, source: Ref, dest: Ref) -> None:
        """All of a buffer is moved to one of its form. Raises `Undefined` where they are not of one form."""
        a, b = self.program.buffers[source.name], self.program.buffers[dest.name]
        if (a.bucket, a.sharded, a.per, a.tile, a.numel) != (b.bucket, b.sharded, b.per, b.tile, b.numel):
            raise Undefined(f"{source.name} and {dest.name} do not have the same leaves at the same places")
        held = self._content(source.name)
        content = self.memory[dest.name] = Content(held.terms)
        content.own_slices = set(held.own_slices)

    def gather(self, source: Ref, dest: Ref, axis: str | None) -> None:
        """`dest` becomes all of the bucket whose own slice `source` is.

        Raises `Undefined` for anything but a whole slice, and for a value that differs between ranks: its slices,
        gathered, are no rank's value.
        """
        if axis is None or axis not in self.program.mesh:
            raise Undefined(f"there is no axis {axis!r}")
        origin, buffer = self.program.buffers[source.name], self.program.buffers[dest.name]
        bucket = self._bucket(origin)
        whole = source.start is None or (source.start, source.stop) == (0, bucket.length)
        if not whole or dest.start is not None or within(self.program.cut(source), buffer.sharded) != axis:
            raise Undefined(f"a gather takes a whole slice to what it is a slice of, not {source} to {dest}")
        if (buffer.bucket, buffer.per) != (origin.bucket, origin.per):
            raise Undefined(f"{source.name} and {dest.name} are of different buckets")
        content = self._content(source.name)
        held = content.terms
        if buffer.tile or origin.tile or any(isinstance(value, Tiles) for value in held.values()):
            raise Undefined(f"{source} is gathered, of which only tiles are there")
        if content.own_slices and self.program.cut(source) == origin.sharded:
            raise Undefined(f"{source} is gathered, of which only a part was written")
        if held and all(value.varies & {*parts_of(axis)} for value in held.values()):
            raise Undefined(f"{source} differs from rank to rank: its slices, gathered, are no rank's value")
        self.memory[dest.name] = Content({key: gathered(value, axis) for key, value in held.items()})

    def reduce(self, op: Op) -> None:
        """The target becomes the sum over the ranks of the source, or the largest; whole, or the own slice of it.

        Raises `Undefined` where source and target do not fit the kind.
        """
        source, dest = op.reads[0], op.writes[0]
        if op.axis is None or op.axis not in self.program.mesh:
            raise Undefined(f"there is no axis {op.axis!r}")
        world = self.program.mesh.size(op.axis)
        for scratch in op.writes[1:]:
            self.memory.pop(scratch.name, None)

        def over(value: Any) -> Any:
            how, divisor = op.reduction, op.divisor
            if isinstance(value, PartialTerm):
                if (how, divisor) != ("sum", 1) or {*parts_of(op.axis)} != {*parts_of(value.axis)}:
                    raise Undefined(f"a sum over slices along {value.axis} must be summed over that axis, once")
                return gathered(value.of, op.axis or "")
            return reduced(value, how, op.axis or "", world, divisor)

        buffer, target = self.program.buffers[source.name], self.program.buffers[dest.name]
        if op.row.small:
            if source.start is not None:
                self.write(dest, over(self.read(source)))
                return
            content = self._content(source.name)
            self.memory[dest.name] = Content({k: over(v) for k, v in content.terms.items()})
            return
        content = self._content(source.name)
        tiled = buffer.tile or target.tile or any(isinstance(value, Tiles) for value in content.terms.values())
        if source.start is not None or dest.start is not None or content.own_slices or tiled:
            raise Undefined(f"a reduction takes a whole bucket, not {source} to {dest}")
        cut = within(target.sharded, buffer.sharded)
        if buffer.bucket != target.bucket or cut != (op.axis if op.row.scatters else ""):
            raise Undefined(f"{source} and {dest} do not fit: {op.kind}")
        if {*parts_of(op.axis)} & {*parts_of(buffer.sharded)}:
            raise Undefined(f"{source} is a slice along {buffer.sharded}: over {op.axis} other slices would be added")
        self.memory[dest.name] = Content({k: over(v) for k, v in content.terms.items()})

    def read(self, ref: Ref) -> Any:
        """The term that a reference reads: of one leaf or buffer, or a `Vec` of a flat range of leaves.

        Raises `Undefined` where a part was never computed, where the range cuts through a leaf, and where only the own
        slice is there and more is read.
        """
        buffer, content = self.program.buffers[ref.name], self._content(ref.name)
        if ref.start is None and not buffer.bucket:
            key = (0, buffer.numel)
            if key not in content.terms:
                raise Undefined(f"{ref} was not computed as a whole")
            return content.terms[key]
        if buffer.bucket is None:
            return self._part(ref, buffer, content)
        bucket = self._bucket(buffer)
        start, stop = (0, bucket.length) if ref.start is None else (ref.start, ref.stop or 0)
        if ref.shape is not None:
            if bucket.find((start, stop, ref.shape), buffer.per) is None:
                raise Undefined(f"{ref} is no leaf of {bucket.name}")
            if buffer.sharded or buffer.tile or (start, stop) in content.own_slices:
                raise Undefined(f"{ref} reads a whole leaf of which only one rank's slice is there")
            return self._term(content, (start, stop), ref)
        keys = {i: bucket.place(i, buffer.per)[:2] for i in self._slots(bucket, start, stop, ref)}
        own_slice, tile = self.program.cut(ref), ref.tile or buffer.tile
        if tile is not None and tile[0] >= self.program.num_tiles(ref, tile[1]):
            raise Undefined(f"{ref} is a tile beyond what a rank has")
        terms = {i: self._term(content, key, ref, tile) for i, key in keys.items()}
        if own_slice == buffer.sharded and any(key in content.own_slices for key in keys.values()):
            raise Undefined(f"{ref} reads beyond the own slice, which is all that was written")
        tight = sum(last - first for first, last in keys.values()) == stop - start
        ranks = self.program.mesh.size(own_slice) if own_slice else 1
        shapes = {i: bucket.slots[i].shape for i in keys if buffer.per == 1 and _on_one_rank(bucket, i, ranks)}
        return Vec(terms, own_slice, (start, stop), buffer.per, tight, shapes, tile)

    def write(self, ref: Ref, value: Any) -> None:
        """Writes a term, or a `Vec` of them, to a reference. Removes the terms that it overlaps.

        Raises `Undefined` where the value and the reference do not fit.
        """
        buffer = self.program.buffers[ref.name]
        if ref.tile is not None and ref.tile[0] >= self.program.num_tiles(ref, ref.tile[1]):
            raise Undefined(f"{ref} is a tile beyond what a rank has")
        content = self.memory.setdefault(ref.name, Content())
        if buffer.bucket is None:
            if isinstance(value, Vec):
                raise Undefined(f"{ref} is in no bucket and gets a flat range")
            content.put((0, buffer.numel) if ref.start is None else (ref.start, ref.stop or 0), value)
            return
        bucket = self._bucket(buffer)
        start, stop = (0, bucket.length) if ref.start is None else (ref.start, ref.stop or 0)
        if not isinstance(value, Vec):
            slot = bucket.find((start, stop, ref.shape), buffer.per)
            if slot is None or buffer.sharded or buffer.tile or isinstance(value, PartialTerm):
                raise Undefined(f"{ref} cannot hold a whole leaf's value")
            content.put((start, stop), value)
            return
        own_slice, tile = self.program.cut(ref), ref.tile or buffer.tile
        if value.tile != tile:
            raise Undefined(f"{ref} gets tile {value.tile}")
        if (value.own_slice, value.span, value.block_size) != (own_slice, (start, stop), buffer.per):
            blocks = "" if value.block_size == buffer.per else f", one element for each {value.block_size}"
            raise Undefined(
                f"{ref} gets the range {value.span}{' of the own slice' if value.own_slice else ''}{blocks}"
            )
        for index, slot_term in value.slots.items():
            key = bucket.place(index, buffer.per)[:2]
            own = own_slice != buffer.sharded
            if ref.tile is not None and buffer.tile is None:
                held = content.terms.get(key)
                if (key in content.own_slices) > own or (
                    isinstance(held, Tiles) and (key in content.own_slices) != own
                ):
                    raise Undefined(f"{ref} is a tile of all that the rank has, beside tiles of the own slice")
                slot_term = with_tile(held, ref.tile, slot_term, self.program.num_tiles(ref, ref.tile[1]))
            content.put(key, slot_term, own_slice=own)

    def _part(self, ref: Ref, buffer: Buffer, content: Content) -> Any:
        key = (ref.start or 0, ref.stop or 0)
        if key in content.terms:
            return content.terms[key]
        whole = content.terms.get((0, buffer.numel))
        if whole is None or ref.shape is None or key[1] > buffer.numel:
            raise Undefined(f"{ref} was not computed")
        return part(whole, *key, ref.shape)

    def _content(self, name: str) -> Content:
        if name not in self.memory:
            raise Undefined(f"{name} holds nothing")
        return self.memory[name]

    def _term(self, content: Content, key: tuple[int, int], ref: Ref, tile: tuple[int, int] | None = None) -> Any:
        if key not in content.terms:
            raise Undefined(f"{ref} reads elements {key}, which were not computed")
        held = content.terms[key]
        if tile is not None:
            return tile_of(held, tile, ref)
        if isinstance(held, Tiles):
            raise Undefined(f"{ref} reads elements {key}, whose tiles are not of one value")
        return held

    def _slots(self, bucket: Bucket, start: int, stop: int, ref: Ref) -> list[int]:
        block_size = self.program.buffers[ref.name].per
        picked = bucket.inside(start, stop, block_size)
        exact = picked and bucket.slots[picked[0]].start == start
        if not exact or stop not in (bucket.place(picked[-1], block_size)[1], bucket.end(picked[-1])):
            raise Undefined(f"{ref} cuts through a leaf of {bucket.name}")
        return picked

    def _bucket(self, buffer: Buffer) -> Bucket:
        if buffer.bucket is None:
            raise Undefined(f"{buffer.name} is in no bucket")
        return self.program.buckets[buffer.bucket]

    def _keys(self, buffer: Buffer) -> list[tuple[int | None, tuple[int, int]]]:
        if buffer.bucket is None:
            return [(None, (0, buffer.numel))]
        bucket = self.program.buckets[buffer.bucket]
        return [(i, bucket.place(i, buffer.per)[:2]) for i in range(len(bucket.slots))]


def _on_one_rank(bucket: Bucket, index: int, ranks: int) -> bool:
    """Whether one of the equal slices of so many ranks holds all of a leaf."""
    slot, size = bucket.slots[index], bucket.length // ranks
    return any(low <= slot.start and slot.stop <= low + size for low in range(0, bucket.length, size))


def program_meaning(program: Program) -> str:
    """The meaning of the state that a program leaves behind, and of the messages it sends.

    Raises `Undefined` where it has none.
    """
    return Abstract(program).run()
