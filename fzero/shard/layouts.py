"""layouts: how a leaf lies over all axes of a mesh that cut it by a dim.

A layout is a row of cuts, the outer one first: each cuts the part that those before it leave. Along an axis that it
does not name every rank holds all of it. What ZeRO cuts lies flat in a bucket (`fzero.plan.stages`); role and home say
who holds a leaf and in which memory. None of them is part of a layout.

    Layout((AxisCut("tp", 2, Shard(0)), AxisCut("mp", 2, Shard(1))))   a quarter of a matrix, by rows and by columns
    Layout((AxisCut("tp", 2, Shard(0)), AxisCut("mp", 2, Shard(0))))   a quarter of its rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fzero.ir.mesh import Mesh
from fzero.shard.placements import Placement, Replicated, Shard, join, local_shape, own_part


@dataclass(frozen=True, slots=True)
class AxisCut:
    """A dim in parts over the n ranks of an axis."""

    axis: str
    n: int
    placement: Shard

    def __str__(self) -> str:
        return f"{self.placement} over {self.axis}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value lies over the axes of a mesh. cuts: the outer one first; without any it is whole on every rank.

    >>> lies = Layout((AxisCut("tp", 2, Shard(0)), AxisCut("mp", 3, Shard(1))))
    >>> str(lies), lies.on("mp"), lies.on("dp"), lies.local_shape((4, 6))
    ('S0 over tp, S1 over mp', Shard(dim=1, groups=1), Replicated(), (2, 2))
    """

    cuts: tuple[AxisCut, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def __str__(self) -> str:
        return ", ".join(map(str, self.cuts))

    @property
    def axes(self) -> str:
        """The axes that cut the value, as one: the place along it is that of the part. "" where none does."""
        return ".".join(cut.axis for cut in self.cuts)

    @property
    def parts(self) -> int:
        """Among how many ranks the value is divided."""
        count = 1
        for cut in self.cuts:
            count *= cut.n
        return count

    def on(self, axis: str) -> Placement:
        """The placement over one axis."""
        return next((cut.placement for cut in self.cuts if cut.axis == axis), Replicated())

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
