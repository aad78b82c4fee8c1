"""The child process that looks into the pickles of others. The only file of fzero that unpickles, and it runs alone.

`python -m fzero.interop._unpickle` reads a request from its standard input and answers on its standard output, both
JSON: what the pickles hold, of tensors only where their bytes lie in the file (the parent reads those). No tensor is
ever made, and no class or function of a file is imported:

- files of `torch.save` go through `torch.load(weights_only=True)` under fake tensors. The further names that are
  allowed stand for `Inert`, which keeps nothing;
- the `.metadata` of torch.distributed.checkpoint (an ordinary pickle, which torch itself loads without any limit) goes
  through an unpickler that knows the names in `DCP`, each of which stands for `Record`, and refuses all others.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from fzero._torch_compat import FakeTensorMode, place_in_file

MAX_NODES = 20_000_000  # of an answer: a pickle can be small and mean a great deal

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


class Record:
    """Stands for a class of torch's metadata: keeps what it is given, and does nothing with it."""

    name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *_: Any) -> Record:
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
        return type("Record", (Record,), {"name": full})

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


def saved(file: Any) -> Any:
    """What `torch.save` wrote, with fake tensors."""
    with zipfile.ZipFile(file) as parts:
        for name in parts.namelist():
            if name.endswith("/byteorder") and parts.read(name) != b"little":
                raise Refused("its numbers are big-endian: save it again on another machine")
    file.seek(0)
    with FakeTensorMode():
        return torch.load(file, map_location="cpu", weights_only=True)


def shown(value: Any, base: int) -> Any:
    """A value as JSON. Containers are `{"dict": [[key, value], ...]}` and lists, tensors `{"tensor": ...}`."""
    return _Shown(base).value(value, 0)


class _Shown:
    def __init__(self, base: int) -> None:
        self.base, self.nodes = base, 0

    def value(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if depth > 200 or self.nodes > MAX_NODES:
            raise Refused("it is nested deeper, or means more, than any checkpoint")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, dict):
            return {"dict": [[self.value(k, depth + 1), self.value(v, depth + 1)] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, Record):
            return {"record": [value.name, self.value(value.args, depth + 1), self.value(value.state, depth + 1)]}
        return {"other": type(value).__name__}

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        start = place_in_file(value)
        if start is None:
            raise Refused("it is in torch.save's format of before 1.6: load and save it again with a newer torch")
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "start": self.base + start + value.storage_offset() * value.element_size(),
            "contiguous": value.layout is torch.strided and value.is_contiguous(),
        }


def torch_files(request: dict[str, Any]) -> Iterator[Any]:
    """`files`: paths; `allow`: names that stand for `Inert`."""
    allowed: list[Any] = [(type("Inert", (Inert,), {}), name) for name in request["allow"]]
    with torch.serialization.safe_globals(allowed):
        for path in request["files"]:
            with open(path, "rb") as file:
                yield shown(_named(path, lambda file=file: saved(file)), 0)


def dcp_metadata(request: dict[str, Any]) -> Iterator[Any]:
    """`files`: one `.metadata`."""
    (path,) = request["files"]
    with open(path, "rb") as file:
        yield shown(_named(path, lambda: Metadata(file).load()), 0)


def dcp_chunks(request: dict[str, Any]) -> Iterator[Any]:
    """`chunks`: (path, start, size) of what `torch.save` wrote as a part of a file."""
    for path, start, size in request["chunks"]:
        with open(path, "rb") as file:
            part = io.BufferedReader(Slice(file, start, size))
            yield shown(_named(path, lambda part=part: saved(part)), start)


def _named(path: str, call: Any) -> Any:
    try:
        return call()
    except Refused as error:
        raise Refused(f"{path}: {error}") from None
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
    try:
        answer: dict[str, Any] = {"found": list(KINDS[request["kind"]](request))}
    except Refused as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"refused": f"{error.filename}: {error.strerror}"}
    json.dump(answer, answers)
    answers.close()


if __name__ == "__main__":
    main()
