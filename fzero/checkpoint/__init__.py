"""Checkpoints: a directory per step, of safetensors and JSON, committed as a whole or not at all. See README.md and
docs/checkpoints.md."""

from __future__ import annotations

import os

from fzero.checkpoint import manifest as records
from fzero.checkpoint.commit import committed, locate
from fzero.checkpoint.manifest import Manifest
from fzero.checkpoint.save import Snapshot, save, snapshot, write
from fzero.disk.calls import Disk


def manifest(directory: str | os.PathLike[str], disk: Disk | None = None) -> Manifest:
    """Returns the manifest of a checkpoint (`.step`, `.extra`, `.leaves`).

    directory: of a step, or of a run, whose newest committed step is meant. disk: the calls that read files, for tests.
    Raises CheckpointError if there is none, CorruptError if it is damaged.
    """
    return records.read(locate(directory, disk), disk)


__all__ = ["Disk", "Manifest", "Snapshot", "committed", "locate", "manifest", "save", "snapshot", "write"]
