"""dcp_folder: checkpoints of torch.distributed.checkpoint (DCP), read and written.

A DCP directory holds `.metadata` and data files. `.metadata` is a pickle: every tensor's name, shape and chunks, and
the place of each chunk. A data file holds each chunk as `torch.save` writes it. torch unpickles `.metadata` without any
limit. Here a child process looks into it. It knows nothing but the classes of torch's metadata, and makes none of them
(`fzero.interop.pickled`). It also finds the byte at which the plain bytes of each chunk begin.

From then on a chunk is read as bytes. torch would load a chunk whole; here just the elements that a rank holds are
read, and no pickle is loaded. Checkpoints are written with torch's own writer, which rank 0 hands one whole leaf at a
time.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError
from fzero.interop import pickled
from fzero.interop.file_places import FilePlace, inside
from fzero.interop.fitted import Fitted, Names, Tied, fitted, renamed, tied_names
from fzero.interop.outgoing import Given, outgoing
from fzero.interop.pickled import MetadataObject
from fzero.state.source import Entry, Source

METADATA = ".metadata"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its first corner, its sizes, and the place of its bytes (row by row)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: FilePlace

    def runs(self, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (first element in the flattened tensor, first in the chunk, count) of the stretches of [start, stop)
        in it.

        The chunk lies in the tensor as runs of equal length.
        """
        whole = len(shape)
        while whole and self.sizes[whole - 1] == shape[whole - 1]:
            whole -= 1  # dimensions from here on are whole in the chunk
        cut = max(whole - 1, 0)
        length = math.prod(self.sizes[cut:])
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        corner = sum(o * s for o, s in zip(self.offsets, strides, strict=True))
        for number, index in enumerate(itertools.product(*(range(n) for n in self.sizes[:cut]))):
            position = corner + sum(i * s for i, s in zip(index, strides[:cut], strict=True))
            first, last = max(position, start), min(position + length, stop)
            if first < last:
                yield first, number * length + first - position, last - first


class DcpFolder(Source):
    """The tensors of a DCP directory by name. `others` names the rest (numbers, text), which is not read. Written by
    `__init__` alone."""

    def __init__(self, path: str | Path, timeout: float = pickled.TIMEOUT) -> None:
        self.path, self.others = Path(path), list[str]()
        file = self.path / METADATA
        if not file.is_file():
            raise CheckpointError(self.path, f"is no directory of torch.distributed.checkpoint: it has no {METADATA}")
        try:
            self.tensors = self._tensors(pickled.dcp_metadata(file, timeout), timeout)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(file, f"is not torch's metadata ({type(error).__name__}: {error})") from error

    @property
    def leaves(self) -> Mapping[str, Entry]:
        """See `Source`."""
        return {name: entry for name, (entry, _) in self.tensors.items()}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """See `Source`. Raises CorruptError if the chunks do not cover the range once."""
        entry, chunks = self.tensors[path]
        values = torch.empty(stop - start, dtype=entry.dtype)
        spans: list[tuple[int, int]] = []
        for chunk in chunks:
            runs = list(chunk.runs(entry.shape, start, stop))
            if not runs:
                continue
            low, high = runs[0][1], runs[-1][1] + runs[-1][2]
            if len(runs) == 1:
                position, _, count = runs[0]
                values[position - start : position - start + count] = chunk.place.read(low, high)
            else:
                held = chunk.place.read(low, high)
                for position, in_chunk, count in runs:
                    values[position - start : position - start + count] = held[in_chunk - low : in_chunk - low + count]
            spans += [(position, position + count) for position, _, count in runs]
        ends = [start, *(last for _, last in sorted(spans))]
        if [first for first, _ in sorted(spans)] != ends[:-1] or ends[-1] != stop:
            raise CorruptError(self.path / METADATA, f"the chunks of {path!r} do not cover it once")
        return values

    def _tensors(self, metadata: MetadataObject, timeout: float) -> dict[str, tuple[Entry, list[Chunk]]]:
        """The entry and the chunks of each tensor. Names of other values go to `others`. Raises CorruptError or
        CheckpointError."""
        entries = metadata.field("state_dict_metadata")
        stored = {_index(key): item for key, item in metadata.field("storage_data")}
        wanted: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Path, int, int]]] = []
        tensors: dict[str, tuple[Entry, list[Chunk]]] = {}
        for name, item in entries.items():
            if not item.name.endswith(".TensorStorageMetadata"):
                self.others.append(name)
                continue
            shape, dtype = _size(item.field("size")), item.field("properties").state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name!r} has no dtype")
            tensors[name] = (Entry(shape, dtype), [])
            for chunk in item.field("chunks"):
                offsets, sizes = _size(chunk.field("offsets")), _size(chunk.field("sizes"))
                boxed = zip(offsets, sizes, shape, strict=True)
                if any(o + n > whole for o, n, whole in boxed):
                    raise ValueError(f"a chunk of {name!r} lies outside it")
                if math.prod(sizes):
                    wanted.append((name, offsets, sizes, self._stored(stored[name, offsets])))
        places = pickled.dcp_chunks([part for *_, part in wanted], timeout)
        for (name, offsets, sizes, (file, *_)), place in zip(wanted, places, strict=True):
            entry, chunks = tensors[name]
            if not isinstance(place, FilePlace) or place.shape != sizes or place.dtype != entry.dtype:
                raise CorruptError(file, f"does not hold the chunk of {name!r} that {METADATA} says")
            chunks.append(Chunk(offsets, sizes, place))
        for name, (entry, chunks) in tensors.items():
            if sum(chunk.place.numel for chunk in chunks) != math.prod(entry.shape):
                raise ValueError(f"the chunks of {name!r} do not cover it once")
        return tensors

    def _stored(self, info: MetadataObject) -> tuple[Path, int, int]:
        if info.field("transform_descriptors"):
            raise CheckpointError(self.path, "is compressed or otherwise transformed, which is not supported")
        file = inside(self.path, info.field("relative_path"), ".distcp")
        start, size = info.field("offset"), info.field("length")
        if not file.is_file():
            raise CorruptError(file, "is missing")
        if type(start) is not int or type(size) is not int or not 0 <= start <= start + size <= file.stat().st_size:
            raise CorruptError(file, f"{METADATA} says that it has {size} bytes at {start}")
        return file, start, size


def _index(key: MetadataObject) -> tuple[str, tuple[int, ...]]:
    """(name, offsets) of a MetadataIndex."""
    offset = key.field("offset")
    return key.field("fqn"), () if offset is None else _size(offset)


def _size(shown: MetadataObject) -> tuple[int, ...]:
    """A torch.Size."""
    (sizes,) = shown.args
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in sizes):
        raise ValueError(f"{sizes} is no size")
    return tuple(sizes)


def dcp(
    folder: str | Path,
    like: Any = None,
    *,
    part: str = "",
    names: Names = None,
    tied: Tied = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    timeout: float = pickled.TIMEOUT,
) -> Fitted:
    """Returns the tensors of a torch.distributed.checkpoint directory for `fzero.init`, which reads a rank's part of
    each.

    folder: that `torch.distributed.checkpoint.save` wrote.
    part: their place in the saved state dict, as `model` in `{"model": ..., "optim": ...}`.
    like, names, tied, dtype, strict: as in `fzero.interop.fitted`. timeout: seconds for the child process that looks
    into the pickles. Raises MismatchError, and CorruptError, also if `.metadata` holds anything but torch's metadata.
    """
    return fitted(NamedPart(DcpFolder(folder, timeout), part), like, names=names, tied=tied, dtype=dtype, strict=strict)


class NamedPart(Source):
    """The tensors of a source whose names begin with `part` and a dot, without it. Nothing in it changes."""

    def __init__(self, source: DcpFolder, part: str) -> None:
        self.source, self.prefix, self.path = source, f"{part}." if part else "", source.path
        if not self.leaves:
            tops = sorted({name.split(".")[0] for name in source.leaves})
            raise CheckpointError(source.path, f"has no tensors in {part!r}: it has {', '.join(tops[:8]) or 'none'}")

    @property
    def leaves(self) -> Mapping[str, Entry]:
        """See `Source`."""
        held = self.source.leaves.items()
        return {name.removeprefix(self.prefix): entry for name, entry in held if name.startswith(self.prefix)}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """See `Source`."""
        return self.source.read(self.prefix + path, start, stop)


def export_dcp(
    given: Given,
    folder: str | Path,
    *,
    part: str = "params",
    names: Names = None,
    tied: Tied = None,
    write_tied: bool = False,
    dtype: torch.dtype | None = None,
    disk: Disk | None = None,
) -> Path:
    """Writes leaves as a torch.distributed.checkpoint directory that `dcp.load` loads. Returns its path.

    given, folder, names, tied, write_tied, dtype, disk: as in `export_safetensors`.
    part: of the state; "" is all of it, moments included, under the names of its paths.
    torch's FileSystemWriter writes it on rank 0, one whole tensor after the other, each to a file.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.planner import WriteItem

    stream = outgoing(given, part)
    name_of = renamed(stream.entries, names)
    leaf_of = {name: path for path, name in name_of.items()}
    for other, first in tied_names(tied).items() if write_tied else ():
        if first in leaf_of:
            leaf_of[other] = leaf_of[first]

    def dtype_of(entry: Entry) -> torch.dtype:
        return dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype

    def body(place: Path, take: Callable[[str], torch.Tensor]) -> None:
        class Planner(DefaultSavePlanner):
            def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
                path = leaf_of[write_item.index.fqn]
                return take(path).to(dtype_of(stream.entries[path]))

        shapes = {
            name: torch.empty(stream.entries[path].shape, dtype=dtype_of(stream.entries[path]), device="meta")
            for name, path in leaf_of.items()
        }
        # a file for each tensor, as the writer keeps those of a file until its end; they are written in the given order
        writer = FileSystemWriter(place, single_file_per_rank=False, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process saves, as is meant
            save(shapes, storage_writer=writer, planner=Planner(), no_dist=True)

    stream.write(list(leaf_of.values()), Path(folder), body, disk or Disk())
    return Path(folder)
