"""mesh: the ranks of a program as a grid with named axes.

Rank r stands at one coordinate on every axis; the last axis varies fastest, as in `torch.distributed.DeviceMesh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

SAME_BATCH = ("pp", "tp", "cp")  # axes along which ranks are given the same batch


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

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` on this axis alone, itself included, by their coordinate."""
        first = rank - self.coordinate(rank, axis) * self.stride(axis)
        return [first + i * self.stride(axis) for i in range(self.size(axis))]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)
