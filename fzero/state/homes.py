"""homes: a rank's state buffers by name, those in memory and those in the rank's file.

A buffer on disk is a range of the file, in whole pages. Reading it, or a part of it, makes a copy in memory. A new
value of it comes through `rounds`: some buffers at a time, so that a state larger than memory can be filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fzero.disk import UNIT, DiskFile, aligned
from fzero.ir.records import DISK, Buffer
from fzero.plan.state_plan import Plan
from fzero.state import storage

ROUND_BYTES = 64 << 20  # of buffers on disk that are filled together; a larger one is filled alone


class Homes(Mapping[str, torch.Tensor]):
    """A rank's state buffers. in_memory: those that are tensors. on_disk: the others. file: the rank's, if the spec
    names a folder for one.

    Nothing changes after it is made but the contents of tensors and file.
    """

    def __init__(self, plan: Plan, rank: int, in_memory: Mapping[str, torch.Tensor], file: DiskFile | None) -> None:
        self.plan, self.rank, self.in_memory, self.file = plan, rank, dict(in_memory), file
        self.on_disk = {name: b for name, b in plan.held_by(rank).items() if b.space == DISK and file is not None}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, or a copy of all of a buffer on disk."""
        if name in self.in_memory:
            return self.in_memory[name]
        buffer = self.on_disk[name]
        return self.part(name, 0, buffer.numel).view(buffer.shape)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.in_memory, *self.on_disk])

    def __len__(self) -> int:
        return len(self.in_memory) + len(self.on_disk)

    def __contains__(self, name: object) -> bool:
        return name in self.in_memory or name in self.on_disk

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a buffer, 1-D: a view, or a copy of what lies on disk."""
        if name in self.in_memory:
            return self.in_memory[name].view(-1)[start:stop]
        assert self.file is not None
        buffer = self.on_disk[name]
        size = buffer.dtype.itemsize
        first = (buffer.at or 0) + start * size
        low = first // UNIT * UNIT
        room = aligned((buffer.at or 0) + stop * size - low)
        self.file.wait(self.file.read(low, room, f"a read of {name}"))
        return (
            room[first - low :].view(buffer.dtype)
            if first % size == 0
            else room[first - low :].clone().view(buffer.dtype)
        )

    def shapes(self) -> dict[str, torch.Tensor]:
        """Every buffer as a tensor: those in memory, and on the meta device those on disk."""
        absent = {n: torch.empty(b.shape, dtype=b.dtype, device="meta") for n, b in self.on_disk.items()}
        return {**self.in_memory, **absent}

    def rounds(self, *, kept: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the buffers to fill: those in memory, then those on disk, some at a time, as new tensors of zeros, or
        with `kept` of what lies there. These are written to the file when the next is asked for."""
        yield self.in_memory
        for names in _together(self.on_disk):
            memory = storage.allocate(self.plan, aligned, self.rank, {DISK: aligned}, only=names)
            for name in names if kept else ():
                memory[name].copy_(self[name])
            yield memory
            assert self.file is not None
            writes = [self.file.write(self.on_disk[n].at or 0, memory[n], f"the first {n}") for n in names]
            self.file.wait(*writes)


def file_bytes(plan: Plan, rank: int) -> int:
    """The bytes of a rank's file: 0 where nothing of it lies on disk."""
    held = (b for b in plan.held_by(rank).values() if b.space == DISK)
    return max(((b.at or 0) + -(-b.nbytes // UNIT) * UNIT for b in held), default=0)


def _together(buffers: Mapping[str, Buffer]) -> Iterator[list[str]]:
    """The names in groups of up to `ROUND_BYTES`, or of one."""
    group: list[str] = []
    size = 0
    for name, buffer in buffers.items():
        if group and size + buffer.nbytes > ROUND_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += buffer.nbytes
    if group:
        yield group
