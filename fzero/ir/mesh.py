"""mesh: the ranks of a program as a grid with named axes.

Rank r stands at one coordinate on every axis; the last axis varies fastest, as in `torch.distributed.DeviceMesh`.

Several axes together are an axis too: `dp.dp_out` has the ranks of both, those of one `dp` coordinate side by side. So
the slice that a rank owns along `dp.dp_out` lies within its slice along `dp`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fzero.errors import SpecError

PIPELINE = "pp"  # the axis whose coordinate is the role
DATA = ("dp_out", "dp")  # the axes that a batch is split over; along all others ranks are given the same batch


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes as (name, ranks) pairs, the slowest first.

    >>> mesh = Mesh((("pp", 2), ("dp", 3)))
    >>> mesh.world_size, mesh.size("dp"), mesh.coordinate(4, "pp"), mesh.coordinate(4, "dp")
    (6, 3, 1, 1)
    >>> mesh.peers(4, "dp"), str(mesh)
    ([3, 4, 5], 'pp=2 dp=3')
    >>> mesh.size("dp.pp"), mesh.coordinate(4, "dp.pp"), mesh.peers(4, "dp.pp")
    (6, 3, [0, 3, 1, 4, 2, 5])
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
                fix = (
                    f"take {total} ranks (torchrun --nproc-per-node {total}, or world_size={total}), or leave mesh out"
                )
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
        parts = parts_of(axis) if isinstance(axis, str) else ()
        return bool(parts) and len(set(parts)) == len(parts) and all(part in self.names for part in parts)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis. Raises KeyError where the mesh has none of this name."""
        sizes = dict(self.axes)
        return math.prod(sizes[part] for part in parts_of(axis))

    def stride(self, axis: str) -> int:
        """How far apart neighbours on one axis are, in ranks."""
        return math.prod(size for _, size in self.axes[self.names.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank stands on an axis: 0 <= coordinate < size(axis)."""
        place = 0
        for part in parts_of(axis):
            place = place * self.size(part) + rank // self.stride(part) % self.size(part)
        return place

    @property
    def data_ranks(self) -> int:
        """Among how many ranks a batch is split."""
        return math.prod(size for name, size in self.axes if name in DATA)

    def data_rank(self, rank: int) -> int:
        """Which part of a batch a rank is given: 0 <= part < data_ranks."""
        axes = self.data_axes
        return self.coordinate(rank, axes) if axes else 0

    def in_order(self, axis: str) -> str:
        """The same axes as one, the slowest first: its ranks are in the order of their numbers.

        >>> Mesh((("dp_out", 2), ("dp", 2))).in_order("dp.dp_out")
        'dp_out.dp'
        """
        return ".".join(name for name in self.names if name in parts_of(axis))

    @property
    def data_axes(self) -> str:
        """The axes that a batch is split over, as one: those with several ranks, or the last one where none has; ""
        where there are no data axes.

        >>> Mesh((("dp_out", 2), ("dp", 2))).data_axes, Mesh((("dp_out", 2), ("dp", 1))).data_axes
        ('dp_out.dp', 'dp_out')
        """
        axes = [(name, size) for name, size in self.axes if name in DATA]
        return ".".join([name for name, size in axes if size > 1] or [name for name, _ in axes[-1:]])

    @property
    def model_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes with several ranks along which values lie in parts by their dims, the slowest first.

        >>> Mesh((("pp", 2), ("dp", 2), ("tp", 4), ("mp", 1))).model_axes
        (('tp', 4),)
        """
        return tuple((name, n) for name, n in self.axes if name not in (PIPELINE, *DATA) and n > 1)

    @property
    def same_batch(self) -> tuple[str, ...]:
        """The axes with several ranks along which ranks are given the same batch."""
        return tuple(name for name, size in self.axes if name not in DATA and size > 1)

    @property
    def roles(self) -> int:
        """How many roles a pipeline has; 1 without one."""
        return next((size for name, size in self.axes if name == PIPELINE), 1)

    def role(self, rank: int) -> int:
        """Which role of a pipeline a rank has; 0 without one."""
        return self.coordinate(rank, PIPELINE) if self.roles > 1 else 0

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
        ranks = [self.leader(rank, axis)]
        for part in parts_of(axis):
            steps = [i * self.stride(part) for i in range(self.size(part))]
            ranks = [r + step for r in ranks for step in steps]
        return ranks

    def leader(self, rank: int, axis: str) -> int:
        """The first of the peers on this axis."""
        return rank - sum(self.coordinate(rank, part) * self.stride(part) for part in parts_of(axis))

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)


def parts_of(axis: str | None) -> tuple[str, ...]:
    """The axes that one is made of; none for None and for "".

    >>> parts_of("dp"), parts_of("dp.dp_out"), parts_of(None)
    (('dp',), ('dp', 'dp_out'), ())
    """
    return tuple(axis.split(".")) if axis else ()


def within(axis: str | None, inner: str | None) -> str | None:
    """The axes that cut a slice along `inner` into slices along `axis`; None where these do not lie within.

    >>> within("dp.dp_out", "dp"), within("dp", None), within("dp", "dp_out")
    ('dp_out', 'dp', None)
    """
    outer, parts = parts_of(inner), parts_of(axis)
    return ".".join(parts[len(outer) :]) if parts[: len(outer)] == outer else None
