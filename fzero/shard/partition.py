"""partition: how a user says where a leaf lies: `P("tp", None)`, as `jax.sharding.PartitionSpec`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.shard.layouts import AxisCut, Layout
from fzero.shard.placements import Shard


@dataclass(frozen=True, slots=True)
class Groups:
    """An axis over each of `count` equal groups of a dim: made by `groups`."""

    axis: str | tuple[str, ...]
    count: int

    def __repr__(self) -> str:
        return f"groups({self.axis!r}, {self.count})"


def groups(axis: str | tuple[str, ...], count: int) -> Groups:
    """In a `P`: the dim is `count` parts one after the other, and each rank gets its share of every part.

    axis: a mesh axis, or several. count: parts, as 3 for a fused q, k and v, or 2 for a fused gate and up.

    >>> P(groups("tp", 3), None)
    P(groups('tp', 3), None)
    """
    if not (isinstance(axis, str) or _is_axes(axis)) or type(count) is not int or count < 1:
        raise SpecError(f"groups({axis!r}, {count!r}): needed a mesh axis and a positive int, as groups('tp', 3)")
    return Groups(axis, count)


class P(tuple[object, ...]):
    """The mesh axis of each dim of a leaf; None for a dim that no axis cuts. Dims beyond those given are not cut.

    Several axes, the outer one first, cut a dim one after the other.

    >>> P("tp", None), P(None, "tp"), P(), P(("tp", "mp"), None).axes
    (P('tp', None), P(None, 'tp'), P(), ('tp', 'mp'))
    >>> P("tp", "tp")
    Traceback (most recent call last):
    fzero.errors.SpecError: P('tp', 'tp'): axis 'tp' cuts two dims. Keep one of them
    """

    __slots__ = ()

    def __new__(cls, *dims: str | Groups | tuple[str, ...] | None) -> P:
        """Raises SpecError for a dim that is none of these, and for an axis that cuts two."""
        made = super().__new__(cls, dims)
        for dim in dims:
            if dim is not None and not (isinstance(dim, (str, Groups)) or _is_axes(dim)):
                raise SpecError(
                    f"{made}: {dim!r} is none of an axis, a tuple of axes, fzero.groups(axis, count) and None"
                )
        for name in made.axes:
            if not name.isidentifier():
                raise SpecError(f"{made}: {name!r} is no name of an axis, as 'tp'")
            if made.axes.count(name) > 1:
                raise SpecError(f"{made}: axis {name!r} cuts two dims. Keep one of them")
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What `__new__` takes: so that a copy and a pickle are made of the dims, one by one."""
        return tuple(self)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it names."""
        return tuple(axis for axis, _ in self.cuts)

    @property
    def cuts(self) -> tuple[tuple[str, Shard], ...]:
        """(axis, the dim that it cuts), dim by dim, the outer axis of a dim first."""
        found = []
        for d, dim in enumerate(self):
            axes, count = (dim.axis, dim.count) if isinstance(dim, Groups) else (dim, 1)
            named: Any = () if axes is None else (axes,) if isinstance(axes, str) else axes
            found += [(axis, Shard(d, count)) for axis in named]
        return tuple(found)

    def layout(self, path: str, shape: Sequence[int], mesh: Mesh) -> Layout:
        """How a leaf of this shape lies. Axes with one rank cut nothing.

        Raises SpecError, naming the leaf, where it has fewer dims, where the ranks would get unequal parts, and where
        the axes of a dim are in another order than those of the mesh.
        """
        if len(self) > len(shape):
            raise SpecError(f"shard: {self} names {len(self)} dims; {path} has shape {tuple(shape)}")
        place = dict(self.cuts)
        lies = Layout(tuple(AxisCut(axis, n, place[axis]) for axis, n in mesh.model_axes if axis in place))
        for d in range(len(self)):
            own = [axis for axis, cut in self.cuts if cut.dim == d and mesh.size(axis) > 1]
            if (right := [cut.axis for cut, where in lies.dims if where.dim == d]) != own:
                raise SpecError(f"shard: {path} as {self}: the mesh has these axes in the order {right}: name them so")
        for d, size in enumerate(shape):
            mine = [cut for cut, where in lies.dims if where.dim == d]
            parts = math.prod(cut.n for cut in mine)
            parts *= max((where.groups for _, where in lies.dims if where.dim == d), default=1)
            if len(mine) > 1 and size % parts:
                over = " x ".join(f"{cut.axis}={cut.n}" for cut in mine)
                raise SpecError(
                    f"shard: {path} of shape {tuple(shape)} as {self}: dim {d} over {over} needs {parts} equal parts: "
                    f"{size} is no multiple of {parts}; the next that is: {-(-size // parts) * parts}"
                )
        try:
            lies.local_shape(shape)
        except SpecError as error:
            raise SpecError(f"shard: {path} of shape {tuple(shape)} as {self}: {error}") from None
        return lies

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"

    __str__ = __repr__


def _is_axes(axes: object) -> bool:
    return isinstance(axes, tuple) and bool(axes) and all(isinstance(axis, str) for axis in axes)
