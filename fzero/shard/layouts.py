"""layouts: how a value lies over the axes of a mesh: a leaf, a bucket, the gradient of a bucket, a batch.

A layout is a row of placements, the outer cut first: each cuts the part that those before it leave. Along an axis that
it does not name every rank holds all of it. Role and home say who holds a value and in which memory; none of them is
part of a layout.

    Layout((AxisCut("tp", 2, Shard(0)), AxisCut("mp", 2, Shard(1))))   a quarter of a matrix, by rows and by columns
    Layout((AxisCut("tp", 2, Shard(0)), AxisCut("mp", 2, Shard(0))))   a quarter of its rows
    Layout((AxisCut("tp", 2, Shard(0)), AxisCut("dp", 2, Flat())))     ZeRO's slice of half of its rows
    Layout((AxisCut("dp", 2, Partial()), AxisCut("dp_out", 2, Partial())))   a gradient, before its sum over both
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fzero.ir.mesh import Mesh, parts_of
from fzero.shard.placements import Flat, Partial, Placement, Replicated, Shard, join, local_shape, own_part


@dataclass(frozen=True, slots=True)
class AxisCut:
    """How a value lies over the n ranks of an axis."""

    axis: str
    n: int
    placement: Placement

    def __str__(self) -> str:
        return f"{self.placement} over {self.axis}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value lies over the axes of a mesh. cuts: the outer one first; without any it is whole on every rank.

    >>> lies = Layout((AxisCut("tp", 2, Shard(0)), AxisCut("mp", 3, Shard(1))))
    >>> str(lies), lies.on("mp"), lies.on("dp"), lies.local_shape((4, 6))
    ('S0 over tp, S1 over mp', Shard(dim=1, groups=1), Replicated(), (2, 2))
    >>> Layout.over(Mesh((("dp_out", 2), ("dp", 2))), ("dp", "dp_out"), Flat()).axes
    'dp.dp_out'
    """

    cuts: tuple[AxisCut, ...] = ()

    @classmethod
    def over(cls, mesh: Mesh, axes: str | Iterable[str] | None, placement: Placement) -> Layout:
        """One placement over several axes, in this order."""
        names = parts_of(axes) if isinstance(axes, str) or axes is None else axes
        return cls(tuple(AxisCut(axis, mesh.size(axis), placement) for axis in names))

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def __str__(self) -> str:
        return ", ".join(map(str, self.cuts))

    @property
    def axes(self) -> str:
        """The axes that it names, as one: the place along it is that of the part. "" where it names none."""
        return ".".join(cut.axis for cut in self.cuts)

    @property
    def parts(self) -> int:
        """The ranks along `axes`: among so many a value is divided."""
        count = 1
        for cut in self.cuts:
            count *= cut.n
        return count

    def on(self, axis: str) -> Placement:
        """The placement over one axis."""
        return next((cut.placement for cut in self.cuts if cut.axis == axis), Replicated())

    @property
    def dims(self) -> tuple[tuple[AxisCut, Shard], ...]:
        """The cuts of dims, each with its placement."""
        return tuple((cut, cut.placement) for cut in self.cuts if isinstance(cut.placement, Shard))

    @property
    def partial(self) -> Layout:
        """Of its placements those that a sum over ranks is missing of, in the order in which it is taken."""
        return Layout(tuple(cut for cut in self.cuts if isinstance(cut.placement, Partial)))

    @property
    def flat(self) -> Layout:
        """Of its placements ZeRO's slices."""
        return Layout(tuple(cut for cut in self.cuts if isinstance(cut.placement, Flat)))

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one rank's part. Raises SpecError where the ranks would get unequal parts."""
        for cut in self.cuts:
            shape = local_shape(shape, cut.placement, cut.n)
        return tuple(shape)

    def place(self, mesh: Mesh, rank: int) -> int:
        """Which of the parts a rank holds: 0 <= place < parts."""
        return mesh.coordinate(rank, self.axes) if self.cuts else 0

    def own_part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """What a rank holds of a value: a view or a copy."""
        for cut in self.cuts:
            whole = own_part(whole, cut.placement, cut.n, mesh.coordinate(rank, cut.axis))
        return whole

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value whose parts are given, in the order of their places.

        >>> lies = Layout((AxisCut("tp", 2, Shard(1)), AxisCut("mp", 2, Shard(0))))
        >>> lies.join([torch.tensor([[x]]) for x in (0, 1, 2, 3)]).tolist()
        [[0, 2], [1, 3]]
        """
        values = list(parts)
        for cut in reversed(self.cuts):
            values = [join(values[i : i + cut.n], cut.placement) for i in range(0, len(values), cut.n)]
        (whole,) = values
        return whole


WHOLE = Layout()
