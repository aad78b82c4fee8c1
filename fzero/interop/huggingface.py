"""huggingface: safetensors files as transformers writes and reads them.

A folder holds `model.safetensors`, or shards `model-00001-of-00003.safetensors` and `model.safetensors.index.json`,
which says what tensor is in which. Both are read in pieces (one tensor at a time at most, whatever the model's size)
and written leaf by leaf: the headers need shapes only, so they are written first, and the bytes follow as they come.

An export is a directory that appears whole: it is written beside its place, made durable, and renamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint.source import Entry
from fzero.errors import CheckpointError, CorruptError
from fzero.interop import tensorfile
from fzero.interop.fitted import Fitted, Names, Tied, fitted, renamed, tied_names
from fzero.interop.outgoing import Given, outgoing

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 50_000_000_000  # transformers' own default


class Folder:
    """The tensors of a Hugging Face folder, or of one safetensors file, by their names there: a `Source`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.places: dict[str, tensorfile.Place] = {}
        for file, names in self._files().items():
            found = tensorfile.read_header(file)[1]
            if names is not None and found.keys() != names:
                wrong = sorted(found.keys() ^ names)[:8]
                raise CorruptError(self.path / INDEX, f"and {file.name} disagree about {', '.join(wrong)}")
            self.places |= found
        self.leaves = {name: Entry(place.shape, place.dtype) for name, place in self.places.items()}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, 1-D."""
        return self.places[path].read(start, stop)

    def _files(self) -> dict[Path, set[str] | None]:
        """The files, each with the names that the index says are in it (None: there is no index)."""
        if self.path.is_file():
            return {self.path: None}
        if (self.path / INDEX).is_file():
            files: dict[Path, set[str] | None] = {}
            for name, file in _index(self.path / INDEX).items():
                members = files.setdefault(self.path / file, set())
                assert members is not None
                members.add(name)
            return files
        if (self.path / SINGLE).is_file():
            return {self.path / SINGLE: None}
        other = sorted(p.name for p in self.path.glob("*.safetensors")) if self.path.is_dir() else []
        hint = f" It has {', '.join(other[:4])}: give the file itself" if other else ""
        old = " It has pytorch_model.bin, a pickle: convert it with transformers first" if not other else ""
        old = old if list(self.path.glob("pytorch_model*.bin")) else ""
        raise CheckpointError(self.path, f"has neither {SINGLE} nor {INDEX}.{hint}{old}")


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor. Raises CorruptError, also for a file outside the folder."""
    try:
        shown = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptError(path, f"cannot be read as JSON ({error})") from error
    files = shown.get("weight_map") if isinstance(shown, dict) else None
    if not isinstance(files, dict) or not files:
        raise CorruptError(path, "has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CorruptError(path, f"{file!r} is no name of a safetensors file in this folder")
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

    like: the pytree to fill, as `params` of `from_module` of a model on the meta device; without it every tensor is a
    leaf of a flat dict by its name. names, tied, dtype and strict: see `fzero.interop.fitted`. Raises CorruptError
    for damaged files, MismatchError with all the differences.
    """
    return fitted(Folder(folder), like, names=names, tied=tied, dtype=dtype, strict=strict)


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
) -> Path:
    """Writes leaves as a folder that transformers' `from_pretrained` loads. Returns its path.

    given: a live State (a collective: every rank calls it; leaves travel to rank 0 one by one, and rank 0 writes), or
    a checkpoint's directory or another Source (no process group needed). part: whose leaves, `params` by default.
    names: from a path below `part` to a name (default: `/` becomes `.`). tied: as in `fitted`; a tied weight is
    written under its first name, which is how transformers does it, or with `write_tied` under all. dtype: what
    floating leaves become. config: a model's configuration, written as config.json. Rank 0 holds one leaf, and its
    converted copy, at a time. `folder` must not exist, or be empty: it appears whole, or not at all.
    """
    stream = outgoing(given, part)
    name_of = renamed(stream.entries, names)
    copies: dict[str, list[str]] = {}
    for other, first in tied_names(tied).items() if write_tied else ():
        copies.setdefault(first, []).append(other)
    written: dict[str, tuple[str, Entry]] = {}  # by name in the file: the leaf, and what becomes of it
    for path, entry in stream.entries.items():
        kept = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        for name in (name_of[path], *copies.get(name_of[path], ())):
            written[name] = (path, Entry(entry.shape, kept))
    shards = split({name: entry for name, (_, entry) in written.items()}, max_shard_bytes)

    def body(place: Path, take: Callable[[str], torch.Tensor]) -> None:
        for file, members in shards.items():
            with open(place / file, "wb", buffering=0) as out:
                _all(out, tensorfile.header(members, {"format": "pt"}))
                for name, entry in members.items():
                    _all(out, tensorfile.raw(take(written[name][0]).to(entry.dtype)))
        if len(shards) > 1:
            (place / INDEX).write_text(_index_of(shards), "utf-8")
        if config is not None:
            (place / "config.json").write_text(_json(config), "utf-8")

    stream.write([written[name][0] for members in shards.values() for name in members], Path(folder), body)
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


def _all(out: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]
