"""abstract_memory: memory that holds terms instead of elements, as the ops see it.

A buffer holds terms by range; a flat buffer holds one for each leaf. It knows the ranges of which only the own slice
was written. Flat references read and write whole leaves. A reference is `Undefined` if it cuts through a leaf, reads a
value that was never computed, or takes one rank's slice for the whole. A write removes all terms that it overlaps: a
later read must have the range of a write. A leaf of which tiles are written one by one has a term for each tile
(`Tiles`) until they are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero.ir.program import Program
from fzero.ir.records import Bucket, Buffer, Ref
from fzero.verify.contents import Content, Tiles, tile_of, with_tile
from fzero.verify.terms import PartialTerm, Undefined, Vec, apply, part


class AbstractMemory:
    """The memory of a program. `memory` maps a buffer to its `Content`; only methods of this class and of `Abstract`
    write it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory: dict[str, Content] = {}

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
            if buffer.sharded or buffer.tile or buffer.parts > 1 or (start, stop) in content.own_slices:
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
        return Vec(terms, own_slice, (start, stop), buffer.per, tight, shapes, tile, buffer.parts)

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
            if slot is None or buffer.sharded or buffer.tile or buffer.parts > 1 or isinstance(value, PartialTerm):
                raise Undefined(f"{ref} cannot hold a whole leaf's value")
            content.put((start, stop), value)
            return
        own_slice, tile = self.program.cut(ref), ref.tile or buffer.tile
        if value.tile != tile:
            raise Undefined(f"{ref} gets tile {value.tile}")
        form = (value.own_slice, value.span, value.block_size, value.parts)
        if form != (own_slice, (start, stop), buffer.per, buffer.parts):
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

    def casts(self, copy: str, terms: Mapping[Any, Any]) -> dict[Any, Any]:
        """What a copy holds beside a master that holds these terms."""
        options = {"dtype": self.program.buffers[copy].dtype}
        return {key: apply(torch.ops.aten._to_copy.default, (value,), options) for key, value in terms.items()}

    def check_copies(self) -> None:
        """Raises `Undefined` where a copy is not the cast of its master at the end: the next step would read it."""
        for copy, master in self.program.copies.items():
            held, wanted = self._content(copy), self.casts(copy, self._content(master).terms)
            if held.terms != wanted or held.own_slices != self._content(master).own_slices:
                raise Undefined(f"{copy} is stale at the end: it is not the cast of what {master} holds then")

    def _part(self, ref: Ref, buffer: Buffer, content: Content) -> Any:
        key = (ref.start or 0, ref.stop or 0)
        of_nothing = not buffer.numel and ref.shape not in (None, buffer.shape)  # no elements say which part it is
        if key in content.terms and not of_nothing:
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
