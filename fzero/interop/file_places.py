"""file_places: tensors that lie as plain bytes in files, and new files and directories of them.

This serves safetensors files and the checkpoints of torch and of DeepSpeed. As soon as the first byte of a tensor is
known, elements are read from there, and no more of them than asked for. Output appears whole: it is written in a
directory beside its place, made durable, then renamed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fzero.checkpoint import shards
from fzero.checkpoint.strict import dump
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError
from fzero.state.source import Entry

DTYPES = {name: dtype for dtype, name in shards.NAMES.items() if dtype != torch.complex128}


@dataclass(frozen=True)
class FilePlace:
    """The place of a contiguous tensor's bytes: `file`, from byte `start` on."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of the flattened tensor, 1-D. Raises CorruptError if the file ends before."""
        values = torch.empty(stop - start, dtype=self.dtype)
        if len(values):
            Disk().read_into(self.file, self.start + start * self.dtype.itemsize, raw(values))
        return values


def safetensors_places(file: Path) -> dict[str, FilePlace]:
    """Returns the tensors of a safetensors file by name. Raises CorruptError.

    Links are followed, since the cache of huggingface_hub is made of them.
    """
    file = file.resolve()
    places = {}
    for name, tensor in shards.header(file).items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(file, f"{name!r} has dtype {tensor.dtype}, which torch or fzero does not know")
        places[name] = FilePlace(file, tensor.start, tensor.shape, DTYPES[tensor.dtype])
    return places


def safetensors_header(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the header of a file whose tensors follow in this order, padded so that they start on a multiple of 8."""
    rows: dict[str, object] = {shards.METADATA: dict(metadata)}
    end = 0
    for name, entry in tensors.items():
        if name == shards.METADATA or entry.dtype == torch.complex128:
            raise CheckpointError(name, f"is a name or a dtype ({entry.dtype}) that a safetensors file has not")
        start, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        rows[name] = {"dtype": shards.NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = dump(rows)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(value: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor in host memory, without a copy."""
    return value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else memoryview(b"")


@contextmanager
def directory(folder: Path, disk: Disk) -> Iterator[Path]:
    """Yields a new directory beside `folder` that becomes it at the end, once the names in it are durable.

    It is removed after an error. Raises CheckpointError if `folder` exists and is not empty.
    """
    folder = folder.absolute()
    if disk.names(folder):
        raise CheckpointError(folder, "is not empty: an export makes a new directory. Give another name, or remove it")
    place = folder.parent / f".{folder.name}.tmp-{os.urandom(4).hex()}"
    disk.do("mkdir", folder.parent, lambda: os.makedirs(folder.parent, exist_ok=True))
    disk.mkdir(place)
    try:
        yield place
        disk.sync_directory(place)
        disk.rename(place, folder)
    except BaseException:
        with suppress(CheckpointError):  # as far as the disk still works
            for name in disk.names(place) or []:
                disk.unlink(place / name)
            disk.rmdir(place)
        raise
    disk.sync_directory(folder.parent)


def read_all(file: Path, limit: int) -> bytes:
    """Returns the bytes of a small file. Raises CorruptError for one with more than `limit` bytes."""
    return Disk().read(file.resolve(), limit=limit)


def inside(folder: Path, name: object, suffix: str) -> Path:
    """Returns the path of a file of `folder` that an index names. Raises CorruptError unless it is a plain name."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix) or "\0" in name:
        raise CorruptError(folder, f"its index names the file {name!r:.80}: needed the plain name of a *{suffix}")
    return folder / name
