"""The child process that looks into other libraries' pickles. It is the only file of fzero that unpickles, and it runs
alone.

`python -m fzero.interop._unpickle` reads a request from standard input and writes its answers to standard output, both
JSON, one line each. An answer holds the contents of a pickle; for a tensor it holds only the place of its bytes in the
file (the parent reads them). No tensor gets memory. No class or function of a file is imported. A pickle's length
bounds the memory, the time and the answer that it may take:

- Files of `torch.save` are archives that `fzero.interop.archive` reads. Their pickle goes through the unpickler of
  `torch.load(weights_only=True)`. The further names that are allowed stand for `Inert`, which keeps nothing.
- The `.metadata` of torch.distributed.checkpoint is an ordinary pickle, which torch itself loads without any limit.
  Here it goes through an unpickler that knows the names in `DCP` and refuses all others. Each of these names stands for
  `MetadataStub`.
"""

from __future__ import annotations

import gc
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

# A small pickle can unfold to a very large value. An honest one of 20,000 tensors has 2.2 MB; it takes 15 MB of memory
# and 2.3 MB of answer.
MAX_PICKLE_BYTES = 64 << 20
MEMORY_BYTES, MEMORY_BYTES_A_BYTE = 256 << 20, 64
SECONDS, SECONDS_A_BYTE = 30, 30e-6
ANSWER_BYTES, ANSWER_BYTES_A_BYTE = 1 << 16, 16
MAX_DEPTH, MAX_INT_BITS = 200, 1024

Room = Callable[[int], object]  # sets the limits of a process that is about to unpickle so many bytes

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


class UnpickleRefused(Exception):
    """The message that the parent passes on to the user."""


class Inert:
    """Stands for a class that is allowed by name. It accepts all arguments and state, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class MetadataStub:
    """Stands for a class of torch's metadata: keeps its arguments and its state, and does nothing with them.

    The unpickler writes `args` and `state`, once each.
    """

    name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *_: Any) -> MetadataStub:
        stub = object.__new__(cls)
        stub.args, stub.state = (), None
        return stub

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Metadata(pickle.Unpickler):
    """Unpickles nothing but the records of torch's checkpoint metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a class. Raises UnpickleRefused for a name outside of `DCP`."""
        full = f"{module}.{name}"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full not in DCP:
            raise UnpickleRefused(
                f"it asks for {full}, which is no part of torch's checkpoint metadata: nothing was executed"
            )
        return type("MetadataStub", (MetadataStub,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        """Raises UnpickleRefused."""
        raise UnpickleRefused("it refers to something outside itself")


class Slice(io.RawIOBase):
    """The bytes [start, start + size) of an open file, as a file. `place` is the position in the slice; reads and seeks
    write it."""

    def __init__(self, file: io.BufferedReader, start: int, size: int) -> None:
        self.file, self.start, self.size, self.place = file, start, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in the slice."""
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves the position; it never goes below 0. Returns it."""
        self.place = max(0, offset + (0, self.place, self.size)[whence])
        return self.place

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer from the position on. Returns the number of bytes; 0 at the end."""
        count = max(0, min(len(buffer), self.size - self.place))
        self.file.seek(self.start + self.place)
        done = self.file.readinto(memoryview(buffer)[:count])
        self.place += done
        return done


def saved(file: Any, room: Room) -> tuple[Any, int]:
    """(the object that `torch.save` wrote, the length of its pickle). Its tensors have no memory and know their
    place."""
    parts = archive.members(file)
    (name,) = [name for name in parts if name.endswith("/data.pkl") and name.count("/") == 1] or [""]
    if not name:
        raise UnpickleRefused("it is no archive of torch.save: it has no data.pkl")
    top = name.removesuffix("data.pkl")
    order = parts.get(f"{top}byteorder")
    if order is not None and archive.read(file, order, 16, "byteorder") != b"little":
        raise UnpickleRefused("its numbers are not little-endian: save it again on another machine")
    data = archive.read(file, parts[name], MAX_PICKLE_BYTES, "data.pkl")
    room(len(data))
    return weights_only(data, lambda key: _place(parts.get(f"{top}data/{key}"), key)), len(data)


def _place(member: archive.Member | None, key: str) -> tuple[int, int]:
    if member is None:
        raise UnpickleRefused(f"a tensor's bytes are to lie in its member data/{key:.80}, which it has not")
    return member.start, member.size


def room_for(pickle_bytes: int) -> None:
    """Sets this process's limits for a pickle of this length: memory beyond the present use, and seconds of a
    processor.

    From here on the process writes no file and leaves no core.
    """
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
    """A value as JSON. Containers are `{"dict": [[key, value], ...]}` and lists; a tensor is `{"tensor": ...}`.

    A value that is long beside its pickle is refused: a pickle may name one object many times.
    """
    return _Shown(base, ANSWER_BYTES + ANSWER_BYTES_A_BYTE * pickle_bytes).value(value, 0)


class _Shown:
    """Turns values into JSON. `room`: the characters that the answer may still have; `takes` alone writes it. `base`:
    the start of the pickle's archive in the file."""

    def __init__(self, base: int, room: int) -> None:
        self.base, self.room = base, room

    def value(self, value: Any, depth: int) -> Any:
        """A value as JSON. Raises UnpickleRefused for one that is nested too deep, or too long."""
        self.takes(8)
        if depth > MAX_DEPTH:
            raise UnpickleRefused("it is nested deeper than any checkpoint")
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int:
            if value.bit_length() > MAX_INT_BITS:
                raise UnpickleRefused(f"it holds an integer that is {value.bit_length():,} bits long")
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
            return [self.value(item, depth + 1) for item in value]
        if isinstance(value, MetadataStub):
            self.takes(len(value.name))
            return {"record": [value.name, self.value(value.args, depth + 1), self.value(value.state, depth + 1)]}
        return {"other": type(value).__name__}

    def takes(self, characters: int) -> None:
        """Counts characters of the answer. Raises UnpickleRefused if there are too many."""
        self.room -= characters
        if self.room < 0:
            raise UnpickleRefused("it means far more than it has bytes, as no checkpoint does")

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        """A tensor's dtype, shape and place in the file. Raises UnpickleRefused if bytes lie outside its storage."""
        self.takes(100)
        start, size = place_in_file(value)
        strided = value.layout is torch.strided
        first = value.storage_offset() * value.element_size() if strided else 0
        if strided and value.is_contiguous() and not 0 <= first <= first + value.nbytes <= size:
            raise UnpickleRefused(f"a tensor of shape {list(value.shape)} lies outside its storage of {size:,} bytes")
        if value.is_conj() or value.is_neg():
            raise UnpickleRefused(
                f"a tensor of shape {list(value.shape)} is a conjugated or negated view: save its clone"
            )
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "start": self.base + start + first,
            "contiguous": strided and value.is_contiguous(),
        }


def torch_files(request: dict[str, Any], room: Room = bool) -> Iterator[Any]:
    """Answers a request for `files`: paths. `allow`: names that stand for `Inert`."""
    allowed: list[Any] = [(type("Inert", (Inert,), {}), name) for name in request["allow"]]
    with torch.serialization.safe_globals(allowed):
        for path in request["files"]:
            with open(path, "rb") as file:
                yield _named(path, file, 0, saved, room)


def dcp_metadata(request: dict[str, Any], room: Room = bool) -> Iterator[Any]:
    """Answers a request for `files`: one `.metadata`."""

    def records(file: Any, room: Room) -> tuple[Any, int]:
        data = file.read(MAX_PICKLE_BYTES + 1)
        if len(data) > MAX_PICKLE_BYTES:
            raise UnpickleRefused(f"it is longer than {MAX_PICKLE_BYTES:,} bytes")
        room(len(data))
        return Metadata(io.BytesIO(data)).load(), len(data)

    (path,) = request["files"]
    with open(path, "rb") as file:
        yield _named(path, file, 0, records, room)


def dcp_chunks(request: dict[str, Any], room: Room = bool) -> Iterator[Any]:
    """Answers a request for `chunks`: (path, start, size) of parts that `torch.save` wrote into a file."""
    for path, start, size in request["chunks"]:
        with open(path, "rb") as file:
            yield _named(path, io.BufferedReader(Slice(file, start, size)), start, saved, room)


def _named(path: str, file: Any, base: int, load: Callable[[Any, Room], tuple[Any, int]], room: Room) -> Any:
    """The contents of a part of the file at `path`, as JSON. `base`: where in the file that part begins."""
    try:
        value, pickle_bytes = load(file, room)
        return shown(value, base, pickle_bytes)
    except (UnpickleRefused, archive.Damaged) as error:
        raise UnpickleRefused(f"{path}: {error}") from None
    except MemoryError:
        raise UnpickleRefused(f"{path}: it takes far more memory than it has bytes, as no checkpoint does") from None
    except Exception as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is not None:
            raise UnpickleRefused(
                f"{path}: it asks for {asked[1]}, which is not allowed: nothing was executed"
            ) from None
        text = " ".join(str(error).split())
        raise UnpickleRefused(f"{path}: it cannot be read: {type(error).__name__}: {text[:300]}") from None


KINDS = {"torch": torch_files, "dcp metadata": dcp_metadata, "dcp chunks": dcp_chunks}


def main() -> None:
    """Answers the request on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is no answer
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    try:
        for contents in KINDS[request["kind"]](request, room_for):
            print(json.dumps({"found": contents}), file=answers)
    except UnpickleRefused as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"refused": f"{error.filename}: {error.strerror}"}
    if answer:
        print(json.dumps(answer), file=answers)
    answers.close()


if __name__ == "__main__":
    main()
    gc.freeze()  # Python ends without a walk over all that torch made: a third of a second
