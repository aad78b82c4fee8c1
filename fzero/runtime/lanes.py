"""lanes: the moves of one rank from one of its spaces to another.

On a CPU world the device's memory and the host's are both RAM: a copy between them is made when it starts (`Lanes`). On
CUDA each direction has a stream of its own (`fzero.runtime.stream_lanes`). The disk's lanes read and write the rank's
file in threads, so a step goes on beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from fzero.errors import HangError

Call = Callable[[], Any]


class RankFile(Protocol):
    """The rank's file, as the lanes use it. Offsets are bytes."""

    def read(self, offset: int, into: torch.Tensor, what: str = "") -> Future[None]:
        """Starts to read bytes into a contiguous tensor. what: its name in errors."""

    def write(self, offset: int, source: torch.Tensor, what: str = "") -> Future[None]:
        """Starts to write the bytes of a contiguous tensor. what: its name in errors."""

    def wait(self, *transfers: Future[None]) -> None:
        """Returns when these have ended. Raises the first error, and HangError if one does not end."""


class Lanes:
    """The moves of one rank. `pending` holds those that the disk works on, by the buffer that they fill, in the order
    of their starts, which is that of their waits; only the methods here write it."""

    def __init__(self, file: RankFile | None = None) -> None:
        self.file = file
        self.pending: dict[str, list[Future[None]]] = {}

    def copy(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Starts a move between the device and the host."""
        target.copy_(source.view(target.shape))

    def read(self, name: str, offset: int, into: torch.Tensor, what: str) -> None:
        """Starts to bring bytes of the file to memory of the CPU."""
        assert self.file is not None, "a program with a disk needs the rank's file"
        self.pending.setdefault(name, []).append(self.file.read(offset, into, what))

    def write(self, name: str, offset: int, source: torch.Tensor, what: str) -> None:
        """Starts to write bytes of such memory to the file."""
        assert self.file is not None, "a program with a disk needs the rank's file"
        self.pending.setdefault(name, []).append(self.file.write(offset, source, what))

    def wait(self, name: str) -> None:
        """Returns when what follows may use what the first move in flight into `name` fills. Raises its error.
        HangError: the disk does not answer; the move stays in `pending`."""
        if name in self.pending:
            self._end(name)

    def on_host(self, calls: list[Call], tensors: Sequence[torch.Tensor], what: str) -> list[Call]:
        """What runs `calls` of the host, which read and write these tensors. what: the op's name in errors."""
        return calls

    def finish(self) -> None:
        """Ends a step: what it left on the host can be read there."""

    def drain(self) -> None:
        """Ends every move in flight, after a step that failed; their errors are those of that step. Raises HangError
        if the disk still does not answer."""
        while self.pending:
            try:
                self._end(next(iter(self.pending)))
            except HangError:
                raise
            except Exception:
                continue

    def _end(self, name: str) -> None:
        assert self.file is not None
        moves = self.pending[name]
        try:
            self.file.wait(moves[0])
        finally:
            if moves[0].done():
                del moves[0]
            if not moves:
                del self.pending[name]
