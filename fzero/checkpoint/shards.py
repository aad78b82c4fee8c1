"""shards: one rank's part of a checkpoint as one safetensors file.

    8 bytes       the header's length, little-endian
    header        JSON: {path: {"dtype", "shape", "data_offsets": [start, stop)}, ...}, padded with spaces
    data          every piece, 1-D, one after the other without gaps, the widest dtypes first (so that all are aligned)

Two threads hash blocks of 4 MiB while they are written. The kernel is asked to send them to the disk as they come, so
that the sync at the end finds little to do. The file is not read back: the bytes would come from the page cache and
prove nothing about the disk (docs/checkpoints.md has the figures).

The header is checked against the file before anything in it is used. The safetensors library is not used for reading.
It maps the whole file by its name and does not say where in the file a tensor lies; verifying single blocks needs that.
The library reads these files, and this module reads the library's: the tests do both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from fzero import progress
from fzero.checkpoint.manifest import BLOCK, ShardRecord, root
from fzero.checkpoint.strict import MAX_INT, Invalid, Reader, dump, parse
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError

MAX_HEADER = 100_000_000  # bytes; the library's own limit
AHEAD = 16  # blocks that are written before they are hashed
HASHERS = 2  # threads: SHA-256 reaches 1.7 GB/s on one core, which a disk may exceed
METADATA = "__metadata__"

# The format's names. It has no complex128: such a piece of n elements is 2n of F64
NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "F64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
BYTES = {name: dtype.itemsize for dtype, name in NAMES.items() if dtype != torch.complex128} | {"F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece to write: a 1-D tensor on the CPU, under its leaf's path. One of the meta device has the form alone, and
    `read(start, stop)` gives its elements."""

    path: str
    data: torch.Tensor
    read: Callable[[int, int], torch.Tensor] | None = None

    def values(self) -> Iterator[torch.Tensor]:
        """Its elements, in order: all, or what is read, `BLOCK` bytes at a time."""
        if self.read is None:
            yield self.data
            return
        step = BLOCK // self.data.dtype.itemsize
        for start in range(0, self.data.numel(), step):
            yield self.read(start, min(start + step, self.data.numel()))


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a safetensors file: bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def key_of(path: str) -> str:
    """Returns the key of a leaf in a shard: its path.

    Only "__metadata__" is taken by the format. That path, with any slashes in front, gets one more slash in front.

    >>> key_of("params/w"), key_of("__metadata__"), key_of("/__metadata__")
    ('params/w', '/__metadata__', '//__metadata__')
    """
    return f"/{path}" if path.lstrip("/") == METADATA else path


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts in the order of the file, without empty ones."""
    return sorted((p for p in parts if p.data.numel()), key=lambda p: -p.data.dtype.itemsize)


def header_of(parts: Sequence[Part]) -> bytes:
    """Returns the length and the header of a file with these parts, in this order."""
    rows, place = {}, 0
    for part in parts:
        size = part.data.numel() * part.data.dtype.itemsize
        elements = part.data.numel() * (2 if part.data.dtype == torch.complex128 else 1)
        offsets = [place, place + size]
        rows[key_of(part.path)] = {"dtype": NAMES[part.data.dtype], "shape": [elements], "data_offsets": offsets}
        place += size
    text = dump(rows)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(disk: Disk, path: Path, parts: Sequence[Part]) -> ShardRecord:
    """Writes the file; it is on the disk when this returns. Raises CheckpointError."""
    parts = in_order(parts)
    first = header_of(parts)
    if len(first) > MAX_HEADER:
        raise CheckpointError(path, f"would need a header of {len(first):,} bytes: at most {MAX_HEADER:,} are allowed")
    views = chain([memoryview(first)], (_bytes(value) for part in parts for value in part.values()))
    digests: list[Future[bytes]] = []
    nbytes = len(first) + sum(part.data.numel() * part.data.dtype.itemsize for part in parts)
    writing = progress.shown("writing", nbytes, "B")
    with disk.create(path) as file, ThreadPoolExecutor(HASHERS) as pool, writing as work:
        try:
            for block in blocks(views):
                digests.append(pool.submit(_digest, block))
                file.write(block)
                work.advance(sum(view.nbytes for view in block))
                if len(digests) > AHEAD:  # what is read from a file is not kept for a hasher that is behind
                    digests[-1 - AHEAD].result()
            rows = [digest.result() for digest in digests]
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or the rest would be hashed before the error is seen
            raise
        file.sync()
    return ShardRecord(nbytes, root(rows), tuple(d.hex() for d in rows))


def blocks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yields the bytes of the views in groups of BLOCK bytes (the last group may be shorter)."""
    group: list[memoryview] = []
    room = BLOCK
    for view in views:
        while view.nbytes:
            part, view = view[:room], view[room:]
            group.append(part)
            room -= part.nbytes
            if not room:
                yield group
                group, room = [], BLOCK
    if group:
        yield group


def _bytes(data: torch.Tensor) -> memoryview:
    return data.detach().view(torch.uint8).numpy().data


def _digest(block: Sequence[memoryview]) -> bytes:
    hasher = hashlib.sha256()
    for view in block:
        hasher.update(view)
    return hasher.digest()


# --- reading --------------------------------------------------------------------------------------------------------


def header_bytes(first: bytes, size: int, file: Path | str) -> int:
    """Returns the byte at which a file's data begins, from its first 8 bytes and its size. Raises CorruptError."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or length > min(MAX_HEADER, size - 8):
        raise CorruptError(
            file, f"says that its header has {length:,} bytes; the file has {size:,} and {MAX_HEADER:,} are allowed"
        )
    return 8 + length


def places(header: bytes, size: int, file: Path | str) -> dict[str, Place]:
    """Returns the tensors of a safetensors file of `size` bytes, by key. `header` is its JSON alone.

    It takes any file of the format, from any writer. The tensors must fill the file without gap or overlap. Raises
    CorruptError.
    """
    try:
        return _places(header, size)
    except Invalid as error:
        raise CorruptError(file, f"has a damaged header: {error}") from None


def header(path: Path, disk: Disk | None = None) -> dict[str, Place]:
    """Returns `places` of a file of which nothing is known yet. Raises CorruptError."""
    disk = disk or Disk()
    size = disk.size(path)
    if size is None or size < 8:
        raise CorruptError(path, "is missing, or no plain file" if size is None else f"has only {size} bytes")
    first = bytearray(8)
    disk.read_into(path, 0, memoryview(first))
    text = bytearray(header_bytes(bytes(first), size, path) - 8)
    disk.read_into(path, 8, memoryview(text))
    return places(bytes(text), size, path)


def _places(header: bytes, size: int) -> dict[str, Place]:
    """The place of each tensor, by name, from a header's JSON. Raises Invalid unless they fill the file without
    gaps."""
    value = parse(header)
    if type(value) is not dict:
        raise Invalid("it is no object")
    notes = value.pop(METADATA, {})
    if type(notes) is not dict or any(type(v) is not str for v in notes.values()):
        raise Invalid(f"{METADATA} is no object of texts")
    base = 8 + len(header)
    by_key = {}
    for key, row in value.items():
        reader = Reader(repr(key)[:80], row, ("dtype", "shape", "data_offsets"))
        dtype, shape, offsets = reader.text("dtype"), reader.items("shape"), reader.items("data_offsets")
        if dtype not in BYTES:
            reader.fail(f"one of {', '.join(BYTES)}", dtype, "dtype")
        if len(shape) > 64 or any(type(d) is not int or not 0 <= d < 1 << 48 for d in shape):
            reader.fail("at most 64 sizes below 2**48", shape, "shape")
        if len(offsets) != 2 or any(type(o) is not int or not 0 <= o < MAX_INT for o in offsets):
            reader.fail("two offsets", offsets, "data_offsets")
        start, stop = offsets
        if stop - start != math.prod(shape) * BYTES[dtype] or base + stop > size:
            raise Invalid(
                f"{reader.where} has bytes [{start}, {stop}) for {dtype} of {shape} in a file of {size:,} bytes"
            )
        by_key[key] = Place(dtype, tuple(shape), base + start, base + stop)
    end = base
    for place in sorted(by_key.values(), key=lambda p: (p.start, p.stop)):
        if place.start != end:
            raise Invalid(f"its tensors overlap or leave a gap at byte {min(end, place.start):,}")
        end = place.stop
    if end != size:
        raise Invalid(f"its tensors end at byte {end:,} of a file of {size:,}")
    return by_key
