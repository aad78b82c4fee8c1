"""The child process that looks into the pickles of others. The only file of fzero that unpickles, and it runs alone.

`python -m fzero.interop._unpickle` reads a request from its standard input and answers on its standard output, both
JSON, a line for each: what the pickles hold, of tensors only where their bytes lie in the file (the parent reads
those). No tensor gets memory, no class or function of a file is imported, and what a pickle may use of memory, time
and answer is bounded by its length:

- files of `torch.save` are archives that `fzero.interop.archive` reads; the pickle in them goes through the
  unpickler of `torch.load(weights_only=True)`. The further names that are allowed stand for `Inert`, which
  keeps nothing;
- the `.metadata` of torch.distributed.checkpoint (an ordinary pickle, which torch itself loads without any limit) goes
  through an unpickler that knows the names in `DCP`, each of which stands for `MetadataStub`, and refuses all others.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fzero._torch_compat import place_in_file, weights_only
from fzero.interop import archive

# A pickle can be small and mean a great deal. An honest one of 20,000 tensors has 2.2 MB, and takes 15 MB and 2.3 MB of
# answer
MAX_PICKLE_BYTES = 64 << 20
MEMORY_BYTES, MEMORY_BYTES_A_BYTE = 256 << 20, 64
SECONDS, SECONDS_A_BYTE = 30, 30e-6
ANSWER_BYTES, ANSWER_BYTES_A_BYTE = 1 << 16, 16
MAX_DEPTH, MAX_INT_BITS = 200, 1024

Room = Callable[[int], object]  # what bounds a process that is about to unpickle so many bytes

METADATA = "torch.distributed.checkpoint.metadata"
DCP = {
    f"{METADATA}.Metadata",
    f"{METADATA}.TensorStorageMetadata",
    f"{METADATA}.BytesStorageMetadata",
    f"{METADATA}.ChunkStorageMetadata",
    f"{METADATA}.TensorProperties",
    f"{METADATA}.MetadataIndex",
    f"{METADATA}.StorageMeta",
    f"{METADATA}._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
}


class Refused(Exception):
    """What the parent is to tell the user."""


class Inert:
    """Stands for a class that is allowed by name: takes whatever a pickle gives it, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class MetadataStub:
    """Stands for a class of torch's metadata: keeps what it is given, and does nothing with it."""

    name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *_: Any) -> MetadataStub:
        made = object.__new__(cls)
        made.args, made.state = (), None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Metadata(pickle.Unpickler):
    """Unpickles records alone."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full not in DCP:
            raise Refused(f"it asks for {full}, which is no part of torch's checkpoint metadata: nothing was executed")
        return type("MetadataStub", (MetadataStub,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("it refers to something outside itself")


class Slice(io.RawIOBase):
    """The bytes [start, start + size) of an open file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, size: int) -> None:
        self.file, self.start, self.size, self.place = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = max(0, offset + (0, self.place, self.size)[whence])
        return self.place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self.place))
        self.file.seek(self.start + self.place)
        done = self.file.readinto(memoryview(buffer)[:count])
        self.place += done
        return done


def saved(file: Any, room: Room) -> tuple[Any, int]:
    """What `torch.save` wrote, with tensors that have no memory and know their place; and how long its pickle is."""
    parts = archive.members(file)
    (name,) = [name for name in parts if name.endswith("/data.pkl") and name.count("/") == 1] or [""]
    if not name:
        raise Refused("it is no archive of torch.save: it has no data.pkl")
    top = name.removesuffix("data.pkl")
    order = parts.get(f"{top}byteorder")
    if order is not None and archive.read(file, order, 16, "byteorder") != b"little":
        raise Refused("its numbers are not little-endian: save it again on another machine")
    data = archive.read(file, parts[name], MAX_PICKLE_BYTES, "data.pkl")
    room(len(data))
    return weights_only(data, lambda key: _place(parts.get(f"{top}data/{key}"), key)), len(data)


def _place(member: archive.Member | None, key: str) -> tuple[int, int]:
    if member is None:
        raise Refused(f"a tensor's bytes are to lie in its member data/{key:.80}, which it has not")
    return member.start, member.size


def room_for(pickle_bytes: int) -> None:
    """Bounds what this process may use from here on, by what it is about to unpickle: memory beyond what it holds, and
    seconds of a processor. It writes no file and leaves no core."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime + SECONDS + SECONDS_A_BYTE * pickle_bytes
    limits = {resource.RLIMIT_CPU: math.ceil(seconds), resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    with suppress(OSError):  # no Linux
        status = Path("/proc/self/status").read_text()
        held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
        limits[resource.RLIMIT_DATA] = held + MEMORY_BYTES + MEMORY_BYTES_A_BYTE * pickle_bytes
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def shown(value: Any, base: int, pickle_bytes: int) -> Any:
    """A value as JSON. Containers are `{"dict": [[key, value], ...]}` and lists, tensors `{"tensor": ...}`. What is
    long beside its pickle is refused: a pickle may name one object many times."""
    return _Shown(base, ANSWER_BYTES + ANSWER_BYTES_A_BYTE * pickle_bytes).value(value, 0)


class _Shown:
    def __init__(self, base: int, room: int) -> None:
        self.base, self.room = base, room

    def value(self, value: Any, depth: int) -> Any:
        self.takes(8)
        if depth > MAX_DEPTH:
            raise Refused("it is nested deeper than any checkpoint")
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int:
            if value.bit_length() > MAX_INT_BITS:
                raise Refused(f"it holds an integer that is {value.bit_length():,} bits long")
            return value
        if type(value) is str:
            self.takes(len(value))
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, dict):
            return {"dict": [[self.value(k, depth + 1), self.value(v, depth + 1)] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, MetadataStub):
            self.takes(len(value.name))
            return {"record": [value.name, self.value(value.args, depth + 1), self.value(value.state, depth + 1)]}
        return {"other": type(value).__name__}

    def takes(self, characters: int) -> None:
        self.room -= characters
        if self.room < 0:
            raise Refused("it means far more than it has bytes, as no checkpoint does")

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        self.takes(100)
        start, size = place_in_file(value)
        strided = value.layout is torch.strided
        first = value.storage_offset() * value.element_size() if strided else 0
        if strided and value.is_contiguous() and not 0 <= first <= first + value.nbytes <= size:
            raise Refused(f"a tensor of shape {list(value.shape)} lies outside its storage of {size:,} bytes")
        if value.is_conj() or value.is_neg():
            raise Refused(f"a tensor of shape {list(value.shape)} is a conjugated or negated view: save its clone")
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "start": self.base + start + first,
            "contiguous": strided and value.is_contiguous(),
        }


def torch_files(request: dict[str, Any], room: Room = bool) -> Iterator[Any]:
    """`files`: paths; `allow`: names that stand for `Inert`."""
    allowed: list[Any] = [(type("Inert", (Inert,), {}), name) for name in request["allow"]]
    with torch.serialization.safe_globals(allowed):
        for path in request["files"]:
            with open(path, "rb") as file:
                yield _named(path, file, 0, saved, room)


def dcp_metadata(request: dict[str, Any], room: Room = bool) -> Iterator[Any]:
    """`files`: one `.metadata`."""

    def records(file: Any, room: Room) -> tuple[Any, int]:
        data = file.read(MAX_PICKLE_BYTES + 1)
        if len(data) > MAX_PICKLE_BYTES:
            raise Refused(f"it is longer than {MAX_PICKLE_BYTES:,} bytes")
        room(len(data))
        return Metadata(io.BytesIO(data)).load(), len(data)

    (path,) = request["files"]
    with open(path, "rb") as file:
        yield _named(path, file, 0, records, room)


def dcp_chunks(request: dict[str, Any], room: Room = bool) -> Iterator[Any]:
    """`chunks`: (path, start, size) of what `torch.save` wrote as a part of a file."""
    for path, start, size in request["chunks"]:
        with open(path, "rb") as file:
            yield _named(path, io.BufferedReader(Slice(file, start, size)), start, saved, room)


def _named(path: str, file: Any, base: int, load: Callable[[Any, Room], tuple[Any, int]], room: Room) -> Any:
    """What a part of the file at `path` holds, as JSON. `base`: where in the file that part begins."""
    try:
        value, pickle_bytes = load(file, room)
        return shown(value, base, pickle_bytes)
    except (Refused, archive.Damaged) as error:
        raise Refused(f"{path}: {error}") from None
    except MemoryError:
        raise Refused(f"{path}: it takes far more memory than it has bytes, as no checkpoint does") from None
    except Exception as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is not None:
            raise Refused(f"{path}: it asks for {asked[1]}, which is not allowed: nothing was executed") from None
        text = " ".join(str(error).split())
        raise Refused(f"{path}: it cannot be read: {type(error).__name__}: {text[:300]}") from None


KINDS = {"torch": torch_files, "dcp metadata": dcp_metadata, "dcp chunks": dcp_chunks}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    try:
        for found in KINDS[request["kind"]](request, room_for):
            print(json.dumps({"found": found}), file=answers)
    except Refused as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"refused": f"{error.filename}: {error.strerror}"}
    if answer:
        print(json.dumps(answer), file=answers)
    answers.close()


if __name__ == "__main__":
    main()
