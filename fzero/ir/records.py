"""records: the frozen records that a program's ops work on: `Slot`, `Bucket`, `Buffer`, `Ref`.

A **bucket** is one contiguous 1-D stretch of elements that holds leaves on 64-element boundaries (`Slot`). A **buffer**
is memory: of a bucket's geometry (whole, or a `shard`: the 1/N that this rank owns) or of any shape. A buffer with
`per=64` has one element for each block of 64 of the bucket's (the scales of quantised moments), one with `per=16/17`
68 (their codes and scales as bytes). With `parts=4` it is four such stretches, one of each rank. An op names what it
reads and writes by **`Ref`**: a buffer, or elements [start, stop) of it in the *bucket's* coordinates seen as some
shape. `mine` cuts that range with the rank's own slice, so one text serves every rank. `tile=(i, size)` cuts it once
more, with the i-th stretch of so many elements of what the rank has.

A buffer lies in a **space**: the device's memory, the host's, or the rank's file on disk. Only `move` ops go from one
to another.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from typing import NamedTuple

import torch

ALIGN = 64  # elements; under every stage, so that elementwise kernels give equal bits however a bucket is cut

Per = int | Fraction  # elements of a bucket for each of a buffer's own

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

GIVEN = ("batch", "constant", "rank")  # inputs of a step that it never changes; "rank": this rank's place on an axis
PERSISTENT = ("param", "copy", "optimizer", "state", *GIVEN)  # live before and after the step
VARYING = ("batch", "rank")  # they differ from rank to rank
KINDS = (*PERSISTENT, "gathered", "grad", "scratch", "activation", "metric", "staging")

DEVICE, HOST, DISK = "device", "host", "disk"
SPACES = (DEVICE, HOST, DISK)
LANES = tuple((one, other) for one in SPACES for other in SPACES if one != other)  # from where to where a move goes


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a leaf lies in its bucket: elements [start, stop), seen as `shape`."""

    path: str
    start: int
    stop: int
    shape: tuple[int, ...]


class SlotKey(NamedTuple):
    """A slot of a bucket, by the bucket's name and the slot's place among its slots. In a text: `bucket:slot`."""

    bucket: str
    slot: int

    def __str__(self) -> str:
        return f"{self.bucket}:{self.slot}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """The geometry that a parameter, its gradient and its moments share.

    length: elements, a multiple of ALIGN times the ranks of `axis`: each owns an equal slice of them, in their order.
    axis: the mesh axis whose ranks own the slices; several as one, as `dp.dp_out`.
    updates_slices: whether a rank updates its own slice alone. Else every rank updates all of it.
    keeps_gathered: whether a gathered parameter stays whole until the step ends. Else each use gathers it anew.
    reduce_when: when its gradient is reduced: as soon as it is "produced", or at the "end" of the backward.
    role: the role of a pipeline that keeps it. None: every rank does.
    copy: the axis of a second, smaller gathered copy that a step keeps between a parameter's uses. None: none is kept.
    layer: the layer of the model whose leaves it holds; "": that of its own name. Several buckets may share a layer.
    numbered: whether that is one of a row of layers, as `blocks.3` is.
    """

    name: str
    length: int
    slots: tuple[Slot, ...]
    axis: str
    updates_slices: bool = False
    keeps_gathered: bool = True
    reduce_when: str = "produced"
    role: int | None = None
    copy: str | None = None
    layer: str = ""
    numbered: bool = False

    def end(self, index: int) -> int:
        """Where the padding after slot `index` ends: the next slot's start, or the bucket's length."""
        return self.slots[index + 1].start if index + 1 < len(self.slots) else self.length

    def place(self, index: int, block_size: Per = 1) -> tuple[int, int, tuple[int, ...]]:
        """(start, stop, shape) of slot `index` in a buffer with one element for each `block_size` of the bucket's:
        whole blocks of ALIGN, counted in 1-D."""
        slot = self.slots[index]
        if block_size == 1:
            return slot.start, slot.stop, slot.shape
        size = -(-(slot.stop - slot.start) // ALIGN) * ALIGN
        return slot.start, slot.start + size, (int(size / block_size),)

    def find(self, place: tuple[int | None, int | None, tuple[int, ...] | None], block_size: Per = 1) -> int | None:
        """The slot at exactly this place, or None."""
        for i in range(self._first(place[0] or 0), len(self.slots)):
            if self.slots[i].start != place[0]:
                break
            if self.place(i, block_size) == place:
                return i
        return None

    def inside(self, start: int, stop: int, block_size: Per = 1) -> list[int]:
        """The slots that lie wholly in elements [start, stop), in a buffer with one element for each `block_size` of
        the bucket's."""
        first = self._first(start)
        return list(takewhile(lambda i: self.place(i, block_size)[1] <= stop, range(first, len(self.slots))))

    def _first(self, start: int) -> int:
        """The first slot that begins at `start` or later: slots lie in order."""
        return bisect_left(self.slots, start, key=lambda slot: slot.start)

    @property
    def padding(self) -> int:
        """The elements that belong to no leaf."""
        return self.length - sum(slot.stop - slot.start for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory by name.

    shape: this rank's. kind: one of `KINDS`; a "copy" is the cast of its master (`Program.copies`). bucket: the bucket
    whose geometry it has, if any.
    sharded: the axis along which it is the own slice of the bucket; None for all of it.
    at: its place in the step's arena, in bytes; None: memory of its own, from the allocator.
    per: elements of the bucket for each of its own. parts: how many such stretches it is, those of as many ranks, in
    their order. per_rank: every rank keeps a leaf of its own.
    space: "device", "host" or "disk". There `at` is a byte of the rank's file, and what is held has one too.
    tile: (i, size) where it is only the i-th stretch of so many elements of what the rank has; the last may be shorter.
    entry: of a column of the state, and of its copies in a step, the entry of the state that has its leaves.
    axis: of kind "rank", the axis along which it is this rank's place.
    lent: of a copy of leaves for a role of a pipeline that does not keep them, the buffer that they are of.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    bucket: str | None = None
    sharded: str | None = None
    at: int | None = None
    note: str = ""
    per: Per = 1
    per_rank: bool = False
    space: str = DEVICE
    tile: tuple[int, int] | None = None
    entry: str = ""
    axis: str | None = None
    lent: str | None = None
    parts: int = 1

    @property
    def numel(self) -> int:
        """The elements of `shape`: this rank's."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of `shape`: this rank's."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer, or elements [start, stop) of it as `shape`; `mine`: only the part in this rank's slice (1-D).

    tile: (i, size), only the part in the i-th stretch of so many elements of what the rank has (1-D).
    """

    name: str
    start: int | None = None
    stop: int | None = None
    shape: tuple[int, ...] | None = None
    mine: bool = False
    tile: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        form = "mine" if self.mine else ("flat" if self.shape is None else shape_text(self.shape))
        form += "" if self.tile is None else f":{tile_text(self.tile)}"
        return f"{self.name}[{self.start}:{self.stop}:{form}]"

    def overlaps(self, other: Ref) -> bool:
        """Whether two references may share elements: of one buffer, and their ranges meet."""
        if self.name != other.name:
            return False
        if self.start is None or other.start is None:
            return True
        alike = self.tile and other.tile and (self.tile[1], self.mine) == (other.tile[1], other.mine)
        if alike and self.tile != other.tile:
            return False  # two tiles of one cut
        return self.start < (other.stop or 0) and other.start < (self.stop or 0)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as the text form has it: `8x64`, and nothing for a scalar."""
    return "x".join(map(str, shape))


def tile_text(tile: tuple[int, int]) -> str:
    """A tile as the text form has it, its number and the elements of one: `3*65536`."""
    return f"{tile[0]}*{tile[1]}"


def buffer_name(text: str) -> str:
    """A buffer's name: `text` with "_" for characters that the text form cannot hold without quotes."""
    return re.sub(r"[^\w./:~@-]", "_", text)
