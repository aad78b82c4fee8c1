"""mesh: the ranks of a program as a grid with named axes.

Rank r stands at one coordinate on every axis; the last axis varies fastest, as in `torch.distributed.DeviceMesh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fzero.errors import SpecError

PIPELINE = "pp"  # the axis whose coordinate is the role
SAME_BATCH = (PIPELINE, "tp", "cp")  # axes along which ranks are given the same batch


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes as (name, ranks) pairs, the slowest first.

    >>> mesh = Mesh((("pp", 2), ("dp", 3)))
    >>> mesh.world_size, mesh.size("dp"), mesh.coordinate(4, "pp"), mesh.coordinate(4, "dp")
    (6, 3, 1, 1)
    >>> mesh.peers(4, "dp"), str(mesh)
    ([3, 4, 5], 'pp=2 dp=3')
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, axes: Mapping[str, int], world_size: int | None = None) -> Mesh:
        """The mesh of these axes for a world of this size: one axis may be -1, for the rest of the ranks.

        world_size: None leaves the mesh its own, with 1 for an axis of -1. Raises SpecError where the axes do not make
        that world.
        """
        known = math.prod(size for size in axes.values() if size != -1)
        rest = 1 if world_size is None else world_size // known
        sizes = {name: rest if size == -1 else size for name, size in axes.items()}
        total = math.prod(sizes.values())
        if world_size is not None and total != world_size:
            if -1 in axes.values():
                fix = f"start a multiple of {known} ranks"
            else:
                fix = f"start {total} (torchrun --nproc-per-node {total}), or leave mesh out"
            raise SpecError(f"mesh={dict(axes)} needs {total or known} ranks, there are {world_size}: {fix}")
        return cls(tuple(sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, the slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        """All ranks: the product of the axes."""
        return math.prod(size for _, size in self.axes)

    def __contains__(self, axis: object) -> bool:
        return axis in self.names

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis. Raises KeyError where the mesh has none of this name."""
        return dict(self.axes)[axis]

    def stride(self, axis: str) -> int:
        """How far apart neighbours on an axis are, in ranks."""
        return math.prod(size for _, size in self.axes[self.names.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank stands on an axis: 0 <= coordinate < size(axis)."""
        return rank // self.stride(axis) % self.size(axis)

    @property
    def data_ranks(self) -> int:
        """Among how many ranks a batch is split."""
        return math.prod(size for name, size in self.axes if name not in SAME_BATCH)

    def data_rank(self, rank: int) -> int:
        """Which part of a batch a rank is given: 0 <= part < data_ranks."""
        part = 0
        for name, size in self.axes:
            part = part if name in SAME_BATCH else part * size + self.coordinate(rank, name)
        return part

    @property
    def roles(self) -> int:
        """How many roles a pipeline has; 1 without one."""
        return dict(self.axes).get(PIPELINE, 1)

    def role(self, rank: int) -> int:
        """Which role of a pipeline a rank has; 0 without one."""
        return self.coordinate(rank, PIPELINE) if PIPELINE in self else 0

    def label(self, rank: int) -> str:
        """A rank as messages name it: with its coordinates, where several axes have more than one rank.

        >>> Mesh((("pp", 2), ("dp", 3))).label(4), Mesh((("dp", 3),)).label(2)
        ('rank 4 (pp=1 dp=1)', 'rank 2')
        """
        places = [f"{name}={self.coordinate(rank, name)}" for name, size in self.axes if size > 1]
        return (
            f"rank {rank} ({' '.join(places)})" if len(places) > 1 or (places and PIPELINE in self) else f"rank {rank}"
        )

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` on this axis alone, itself included, by their coordinate."""
        first = rank - self.coordinate(rank, axis) * self.stride(axis)
        return [first + i * self.stride(axis) for i in range(self.size(axis))]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)
