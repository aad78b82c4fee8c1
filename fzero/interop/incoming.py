"""incoming: writes a source as a checkpoint of fzero, in one process, one piece at a time.

The file is the one that a world of one would save. It is one shard, hashed in blocks as it is written, and committed by
the protocol of `fzero.checkpoint.commit`. `fzero.load` then loads it into any world and layout.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import progress, tree
from fzero.checkpoint import commit, shards, structure
from fzero.checkpoint.manifest import BLOCK, LeafRecord, Manifest, Piece, ShardRecord, root, shard_name
from fzero.disk.calls import Disk
from fzero.errors import TreeError
from fzero.interop.file_places import raw
from fzero.state.source import Source, like


def write_checkpoint(
    source: Source, directory: str | Path, *, step: int = 0, extra: Any = None, disk: Disk | None = None
) -> Path:
    """Writes a source as the checkpoint `directory/step-...` of a run. Returns its path.

    source: its tree is its own `like`, or a flat dict by name. directory: of the run. step: the number of the step.
    extra: anything in JSON. disk: the calls that write files, for tests. Raises CheckpointError.
    Memory: a few blocks of 4 MiB.
    """
    disk, run = disk or Disk(), Path(directory)
    paths, _, treedef = tree.flatten(like(source))
    containers, met = structure.describe(treedef)
    if sorted(paths) != sorted(source.leaves):
        raise TreeError("the source's tree and its leaves are not the same")
    held = {paths[number]: source.leaves[paths[number]] for number in met}
    versions = {"fzero": fzero.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    records = []
    for path, entry in held.items():
        n = math.prod(entry.shape)
        pieces = (Piece(0, 0, n),) if n else ()
        kind = "param" if path.startswith("params/") else "optimizer" if path.startswith("opt_state/") else "state"
        records.append(LeafRecord(path, tuple(entry.shape), entry.dtype, "replicate", kind, False, pieces))
    parts = shards.in_order(
        [shards.Part(p, torch.empty(math.prod(e.shape), dtype=e.dtype, device="meta")) for p, e in held.items()]
    )
    nbytes = sum(part.data.numel() * part.data.dtype.itemsize for part in parts)
    temporary, release = commit.prepare(run, step, nbytes, os.urandom(4).hex(), disk)
    try:
        shard = _shard(source, parts, temporary / shard_name(0), disk)
        manifest = Manifest(step, {"dp": 1}, 0, versions, None, extra, containers, tuple(records), (shard,))
        final = commit.commit(run, temporary, manifest, disk)
        commit.finish(run, final, None, disk)
    except BaseException:
        commit.undo(run, step, temporary, disk)
        raise
    finally:
        release()
    return final


def _shard(source: Source, parts: list[shards.Part], file: Path, disk: Disk) -> ShardRecord:
    """The one file of the checkpoint, hashed while it is written."""

    def views() -> Iterator[memoryview]:
        yield memoryview(shards.header_of(parts))
        for part in parts:
            step = BLOCK // part.data.dtype.itemsize
            for start in range(0, part.data.numel(), step):
                yield raw(source.read(part.path, start, min(start + step, part.data.numel())))

    digests, size = [], 0
    nbytes = sum(part.data.numel() * part.data.dtype.itemsize for part in parts)
    with disk.create(file) as out, progress.shown(f"writing {file.parent}", nbytes, "B") as work:
        for block in _blocks(views()):
            out.write([block])
            work.advance(len(block))
            digests.append(hashlib.sha256(block).digest())
            size += len(block)
        out.sync()
    return ShardRecord(size, root(digests), tuple(digest.hex() for digest in digests))


def _blocks(views: Iterator[memoryview]) -> Iterator[memoryview]:
    """The bytes in blocks of BLOCK."""
    block, filled = memoryview(bytearray(BLOCK)), 0
    for view in views:
        while len(view):
            part, view = view[: BLOCK - filled], view[BLOCK - filled :]
            block[filled : filled + len(part)] = part
            filled += len(part)
            if filled == BLOCK:
                yield block
                filled = 0
    if filled:
        yield block[:filled]
