"""tensorfile: one safetensors file, read in pieces and written tensor by tensor.

The format: eight bytes with the header's size, the header (JSON: per tensor its dtype, shape and place), then the bytes
of the tensors one after another. A header is checked whole before any of it is believed: every tensor inside the file,
none over another, no bytes left over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint.source import Entry
from fzero.errors import CorruptError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where the bytes of a contiguous tensor lie: `file`, from byte `start` on."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-D. Raises CorruptError where the file ends before."""
        found = torch.empty(stop - start, dtype=self.dtype)
        self.read_into(found, start)
        return found

    def read_into(self, found: torch.Tensor, start: int) -> None:
        """Fills `found` (1-D, contiguous, of this dtype) with the elements from `start` on."""
        size = self.dtype.itemsize
        view = memoryview(found.view(torch.uint8).numpy()) if found.numel() else memoryview(b"")
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start + start * size)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise CorruptError(self.file, f"ends {len(view) - done} bytes too early: it was cut, or replaced")
                done += count


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Place]]:
    """(metadata, the tensors' places by name). Raises CorruptError naming the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            lead = file.read(8)
            length = int.from_bytes(lead, "little")
            _check(path, len(lead) == 8 and length <= min(MAX_HEADER_BYTES, size - 8), "the header's size is absurd")
            text = file.read(length)
    except OSError as error:
        raise CorruptError(path, f"cannot be read: {error.strerror or error}", error.errno) from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(path, f"the header is no JSON ({error})") from error
    _check(path, isinstance(header, dict), "the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    plain = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    _check(path, plain, "__metadata__ is no object of strings")
    places = {name: _place(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for place in sorted(places.values(), key=lambda p: (p.start, p.nbytes)):
        _check(path, place.start == end, "tensors overlap, or leave bytes between them")
        end += place.nbytes
    _check(path, end == size, f"the tensors end at byte {end}, the file at {size}")
    return metadata, places


def _place(path: Path, name: str, entry: Any, base: int) -> Place:
    _check(path, isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}, f"{name!r}: keys")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CorruptError(path, f"{name!r} has dtype {entry['dtype']!r}, known are {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        whole = isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        _check(path, whole, f"{name!r}: shape and data_offsets must be lists of sizes")
    _check(path, len(offsets) == 2, f"{name!r}: data_offsets needs a start and an end")
    place = Place(path, base + offsets[0], tuple(shape), dtype)
    _check(path, place.nbytes == offsets[1] - offsets[0], f"{name!r}: its shape and its bytes disagree")
    return place


def _check(path: Path, ok: bool, what: str) -> None:
    if not ok:
        raise CorruptError(path, f"is no whole safetensors file: {what}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def header(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors, which follow in this order. Padded, so that these start on a multiple of 8."""
    shown: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in tensors.items():
        start, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        shown[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(shown, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(value: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    return memoryview(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else memoryview(b"")
