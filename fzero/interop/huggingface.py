"""huggingface: safetensors files as transformers writes and reads them.

A folder holds `model.safetensors`, or shards `model-00001-of-00003.safetensors` and `model.safetensors.index.json`. The
index names the file of each tensor. Both are read in pieces: one tensor at a time at most, for a model of any size.
They are written leaf by leaf: the headers need only shapes, so they are written first, and the bytes follow as they
come.

An export is a directory that appears whole: it is written beside its place, made durable, and renamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint.strict import Invalid, parse
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError, SpecError
from fzero.interop.file_places import FilePlace, inside, raw, read_all, safetensors_header, safetensors_places
from fzero.interop.fitted import Fitted, Names, Tied, fitted, renamed, tied_names
from fzero.interop.outgoing import Given, outgoing
from fzero.state.source import Entry, Source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 100 << 20
PICKLES = (b"PK", b"\x80\x02")  # how files of torch.save begin: since torch 1.6, and before
MAX_SHARD_BYTES = 50_000_000_000  # transformers' own default


class HuggingFaceFolder(Source):
    """The tensors of a Hugging Face folder, or of one safetensors file, by their names there. Nothing in it changes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.places: dict[str, FilePlace] = {}
        for file, names in self._files().items():
            places = safetensors_places(file)
            if names is not None and places.keys() != names:
                wrong = ", ".join(sorted(places.keys() ^ names)[:8])
                raise CorruptError(self.path / INDEX, f"and {file.name} disagree about {wrong}")
            self.places |= places

    @property
    def leaves(self) -> Mapping[str, Entry]:
        """See `Source`."""
        return {name: Entry(place.shape, place.dtype) for name, place in self.places.items()}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """See `Source`."""
        return self.places[path].read(start, stop)

    def _files(self) -> dict[Path, set[str] | None]:
        """The files, each with the names that the index lists for it (None: there is no index)."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                head = file.read(9)
                if head[:2] in PICKLES and head[8:] != b"{":  # a length of safetensors may have these bytes
                    raise CheckpointError(
                        self.path,
                        "is of torch.save, a pickle: torch.load it, and write it with safetensors.torch.save_file",
                    )
            return {self.path: None}
        if (
            self.path / SINGLE
        ).is_file():  # before an index, as transformers has it: one of an earlier save may be left
            return {self.path / SINGLE: None}
        if (self.path / INDEX).is_file():
            by_file: dict[Path, set[str] | None] = {}
            for name, file in _index(self.path / INDEX).items():
                members = by_file.setdefault(inside(self.path, file, ".safetensors"), set())
                assert members is not None
                members.add(name)
            return by_file
        others = sorted(self.path.glob("*.safetensors"))
        hint = f". It has {others[0].name}: give that file itself" if others else ""
        if list(self.path.glob("pytorch_model*.bin")):
            hint = ". It has pytorch_model.bin, a pickle: load it with transformers and save_pretrained it"
        raise CheckpointError(self.path, f"has neither {SINGLE} nor {INDEX}{hint}")


def _index(path: Path) -> dict[str, Any]:
    """The file of each tensor. Raises CorruptError."""
    try:
        shown = parse(read_all(path, MAX_INDEX_BYTES))
    except Invalid as error:
        raise CorruptError(path, f"is no index: {error}") from None
    files = shown.get("weight_map") if isinstance(shown, dict) else None
    if not isinstance(files, dict) or not files:
        raise CorruptError(path, "has no weight_map")
    return files


def safetensors(
    folder: str | Path,
    like: Any = None,
    *,
    names: Names = None,
    tied: Tied = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Fitted:
    """The tensors of a Hugging Face folder (or one safetensors file) for `fzero.init`, which reads them one by one.

    folder: as `save_pretrained` writes it, or one file.
    like: the pytree to fill, as `params` of `from_module` of a model on the meta device; without it every tensor is a
    leaf of a flat dict by its name. names, tied, dtype, strict: as in `fzero.interop.fitted`. Raises CorruptError
    for damaged files, MismatchError with all the differences.
    """
    return fitted(HuggingFaceFolder(folder), like, names=names, tied=tied, dtype=dtype, strict=strict)


def export_safetensors(
    given: Given,
    folder: str | Path,
    *,
    part: str = "params",
    names: Names = None,
    tied: Tied = None,
    write_tied: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    disk: Disk | None = None,
) -> Path:
    """Writes leaves as a folder that transformers' `from_pretrained` loads. Returns its path.

    folder: must not exist, or be empty: it appears with all files, or not at all.
    given: a live State, a checkpoint's directory or another Source. A State makes it a collective: every rank calls it,
    leaves travel to rank 0 one by one, and rank 0 writes. The others need no process group.

    part: the part of the state to export, by default `params`. names: from a path below `part` to a name (default: `/`
    becomes `.`). tied: as in `fitted`. write_tied: whether a tied weight is written under all of its names, or only
    under the first, as transformers does. dtype: the dtype to which floating leaves are converted.
    max_shard_bytes: of one file. config: a model's configuration, written as config.json.
    disk: the calls that write files, for tests.

    Rank 0 holds one leaf, and its converted copy, at a time. Raises SpecError for max_shard_bytes.
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise SpecError(f"export_safetensors(max_shard_bytes={max_shard_bytes!r}): needed a positive int")
    disk = disk or Disk()
    stream = outgoing(given, part)
    name_of = renamed(stream.entries, names)
    copies: dict[str, list[str]] = {}
    for other, first in tied_names(tied).items() if write_tied else ():
        copies.setdefault(first, []).append(other)
    written: dict[str, tuple[str, Entry]] = {}  # by name in the file: the leaf, and its form there
    for path, entry in stream.entries.items():
        kept_dtype = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        for name in (name_of[path], *copies.get(name_of[path], ())):
            written[name] = (path, Entry(entry.shape, kept_dtype))
    shards = split({name: entry for name, (_, entry) in written.items()}, max_shard_bytes)

    def body(place: Path, take: Callable[[str], torch.Tensor]) -> None:
        for file, members in shards.items():
            with disk.create(place / file) as out:
                out.write([memoryview(safetensors_header(members, {"format": "pt"}))])
                for name, entry in members.items():
                    out.write([raw(take(written[name][0]).to(entry.dtype))])
                out.sync()
        if len(shards) > 1:
            disk.write(place / INDEX, _index_of(shards).encode())
        if config is not None:
            disk.write(place / "config.json", _json(config).encode())

    stream.write([written[name][0] for members in shards.values() for name in members], Path(folder), body, disk)
    return Path(folder)


def split(entries: Mapping[str, Entry], max_bytes: int) -> dict[str, dict[str, Entry]]:
    """The shards by file name: tensors in their order, each into the last shard unless that would be too large; a
    larger one gets a shard of its own (as huggingface_hub does it). In a shard the wider dtypes come first, so that
    each tensor lies aligned."""
    shards: list[dict[str, Entry]] = []
    last: dict[str, Entry] = {}
    filled = 0
    for name, entry in entries.items():
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if size > max_bytes:
            shards.append({name: entry})
            continue
        if filled + size > max_bytes:
            shards.append(last)
            last, filled = {}, 0
        last[name] = entry
        filled += size
    shards += [last] if last else []
    sorted_shards = [dict(sorted(s.items(), key=lambda item: -item[1].dtype.itemsize)) for s in shards]
    if len(shards) == 1:
        return {SINGLE: sorted_shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(sorted_shards, 1)}


def _index_of(shards: Mapping[str, Mapping[str, Entry]]) -> str:
    """transformers' index."""
    entries = [entry for members in shards.values() for entry in members.values()]
    sizes = {
        "total_parameters": sum(math.prod(e.shape) for e in entries),
        "total_size": sum(math.prod(e.shape) * e.dtype.itemsize for e in entries),
    }
    where = {name: file for file, members in shards.items() for name in members}
    return json.dumps({"metadata": sizes, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _json(config: Any) -> str:
    """A model's configuration, as transformers writes it, or of a mapping."""
    return config.to_json_string() if hasattr(config, "to_json_string") else json.dumps(dict(config), indent=2) + "\n"
