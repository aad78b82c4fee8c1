"""What other processes do with an offload file. Each tells its parent through a pipe, or prints where it is a script.

`python disks.py FOLDER` writes and reads a file, and prints `same` and what lies in the folder, or the error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from fzero.disk import UNIT, DiskFile, aligned
from fzero.errors import FzeroError

SIZE = 4 << 20


def draw(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes in page-aligned memory."""
    return aligned(nbytes).copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)))


def fill(folder: Path, pipe: Connection) -> None:
    """Writes and reads for ever; tells when it has begun."""
    file = DiskFile(folder, SIZE)
    tile, back = aligned(SIZE // 4).fill_(3), aligned(SIZE // 4)
    pipe.send("begun")
    while True:
        running = [file.write(n * SIZE // 4, tile) for n in range(3)] + [file.read(3 * SIZE // 4, back)]
        for one in running:
            one.result()


def fork(folder: Path, pipe: Connection) -> None:
    """Forks, and tells what the child could do, what it holds, what the parent reads meanwhile; then that it ends."""
    file = DiskFile(folder, SIZE)
    file.write(0, aligned(SIZE).fill_(3)).result()
    child = os.fork()
    if child == 0:
        for begin in (file.read, file.write):
            try:
                begin(0, torch.zeros(8))
            except FzeroError as error:
                pipe.send(str(error))
        file.close()
        pipe.send([link for link in map(_link, os.listdir("/proc/self/fd")) if link.startswith(str(folder))])
        sys.exit(7)
    status = os.waitpid(child, 0)[1]
    back = aligned(UNIT)
    file.read(0, back).result()
    pipe.send(("parent", bool((back == 3).all()), os.waitstatus_to_exitcode(status)))


def limited(limit: Callable[[], None], folder: Path, pipe: Connection) -> None:
    """Tells what `use` returned under a limit."""
    limit()
    pipe.send(use(folder))


def use(folder: Path) -> str:
    """Writes and reads a file."""
    try:
        with DiskFile(folder, SIZE) as file:
            tile, back = draw(SIZE), aligned(SIZE)
            file.write(0, tile).result()
            file.read(0, back).result()
            return f"{'same' if torch.equal(tile, back) else 'different'} {list(folder.iterdir())}"
    except FzeroError as error:
        return str(error)


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


if __name__ == "__main__":
    print(use(Path(sys.argv[1])))
