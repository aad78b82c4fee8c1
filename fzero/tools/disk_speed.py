"""disk_speed: how fast a folder's disk is, in the two ways that fzero uses one. Rates are in MB/s, of 2**20 bytes.

Checkpoints: written through the page cache, synced, dropped from it and read. Offload: 8 MiB at a time by threads, past
the page cache where the file system allows that, alone and in both directions at a time. The first writes go to room
that was never written, which costs more on some file systems, so the second ones are timed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from fzero.disk import UNIT, DiskFile, aligned
from fzero.disk.direct import Direct

MB = 1 << 20
TILE = 8 * MB  # bytes of a transfer, at most
TILES = 8  # in flight, at most; and in a measurement, at least


@dataclass(frozen=True)
class CheckpointSpeed:
    """write, read: MB/s. cold: whether the bytes were read from the disk. right: whether they were those written."""

    write: float
    read: float
    cold: bool
    right: bool


@dataclass(frozen=True)
class OffloadSpeed:
    """write, read, mixed: MB/s; mixed counts both directions. direct: its alignment, false without direct I/O."""

    write: float
    read: float
    mixed: float
    direct: Direct


def of_checkpoints(folder: Path, nbytes: int) -> CheckpointSpeed:
    """Writes, syncs and reads `nbytes`, a multiple of MB, in a temporary file of `folder`. Raises OSError."""
    block = os.urandom(MB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fzero-doctor-") as file:
        began = time.perf_counter()
        for _ in range(nbytes // MB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        writing = time.perf_counter() - began
        cold = hasattr(os, "posix_fadvise")
        if cold:  # a read from memory says nothing about the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        file.seek(0)
        right = all(file.read(MB) == block for _ in range(nbytes // MB))
        reading = time.perf_counter() - began
    return CheckpointSpeed(nbytes / MB / writing, nbytes / MB / reading, cold, right)


def of_offload(folder: Path, nbytes: int) -> OffloadSpeed:
    """Writes and reads about `nbytes` in a file of `folder` without a name, three times. Raises OffloadError."""
    tile = min(nbytes // TILES // UNIT * UNIT, TILE)
    count = nbytes // tile
    source = aligned(tile).random_(0, 256)  # a disk that compresses would like zeros too much
    into = [aligned(tile) for _ in range(TILES)]
    with DiskFile(folder, count * tile) as file:

        def rate(reads: range, writes: range) -> float:
            began = time.perf_counter()
            running: deque[Future[None]] = deque()
            for n in range(max(len(reads), len(writes))):
                if n < len(writes):
                    running.append(file.write(tile * writes[n], source))
                if n < len(reads):
                    running.append(file.read(tile * reads[n], into[n % TILES]))
                while len(running) >= TILES:  # so that a slot is read into once at a time
                    file.wait(running.popleft())
            file.wait(*running)
            return tile * (len(reads) + len(writes)) / MB / (time.perf_counter() - began)

        half, nothing, everything = count // 2, range(0), range(count)
        rate(nothing, everything)
        write, read = rate(nothing, everything), rate(everything, nothing)
        mixed = rate(range(half), range(half, 2 * half))
        return OffloadSpeed(write, read, mixed, file.file.direct)
