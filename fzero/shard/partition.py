"""partition: how a user says where a leaf lies: `P("tp", None)`, as `jax.sharding.PartitionSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fzero.errors import SpecError
from fzero.shard.placements import Replicated, Shard, local_shape

AXIS = "tp"  # the axis that leaves are sharded over by dims


@dataclass(frozen=True, slots=True)
class Groups:
    """An axis over each of `count` equal groups of a dim: made by `groups`."""

    axis: str
    count: int

    def __repr__(self) -> str:
        return f"groups({self.axis!r}, {self.count})"


def groups(axis: str, count: int) -> Groups:
    """In a `P`: the dim is `count` parts one after the other, and each rank gets its share of every part.

    axis: a mesh axis. count: parts, as 3 for a fused q, k and v, or 2 for a fused gate and up.

    >>> P(groups("tp", 3), None)
    P(groups('tp', 3), None)
    """
    if not isinstance(axis, str) or type(count) is not int or count < 1:
        raise SpecError(f"groups({axis!r}, {count!r}): needed a mesh axis and a positive int, as groups('tp', 3)")
    return Groups(axis, count)


class P(tuple[object, ...]):
    """The mesh axis of each dim of a leaf; None for a dim that no axis cuts. Dims beyond those given are not cut.

    >>> P("tp", None), P(None, "tp"), P()
    (P('tp', None), P(None, 'tp'), P())
    >>> P("tp", "tp")
    Traceback (most recent call last):
    fzero.errors.SpecError: P('tp', 'tp'): axis 'tp' cuts two dims. Keep one of them
    """

    __slots__ = ()

    def __new__(cls, *dims: str | Groups | Sequence[str] | None) -> P:
        """Raises SpecError for a dim that is none of these, and for an axis that cuts two."""
        made = super().__new__(cls, dims)
        for dim in dims:
            if isinstance(dim, (tuple, list)):
                raise SpecError(f"{made}: one dim over several axes is not supported. Name one axis for each dim")
            if dim is not None and not isinstance(dim, (str, Groups)):
                raise SpecError(f"{made}: {dim!r} is none of an axis, fzero.groups(axis, count) and None")
        names = [dim.axis if isinstance(dim, Groups) else dim for dim in dims if dim is not None]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"{made}: axis {name!r} cuts two dims. Keep one of them")
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What `__new__` takes: so that a copy and a pickle are made of the dims, one by one."""
        return tuple(self)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it names."""
        return tuple(dim.axis if isinstance(dim, Groups) else str(dim) for dim in self if dim is not None)

    def placement(self, path: str, shape: Sequence[int], n: int) -> Replicated | Shard:
        """The placement of a leaf of this shape over the n ranks of the axis.

        Raises SpecError, naming the leaf, where it has fewer dims, or where n does not divide its dim.
        """
        if len(self) > len(shape):
            raise SpecError(f"shard: {self} names {len(self)} dims; {path} has shape {tuple(shape)}")
        placement = self.place()
        if not isinstance(placement, Shard):
            return placement
        try:
            local_shape(shape, placement, n)
        except SpecError as error:
            raise SpecError(f"shard: {path} of shape {tuple(shape)} as {self}: {error}") from None
        return placement if n > 1 else Replicated()

    def place(self) -> Replicated | Shard:
        """The placement of a value over one axis, whatever its shape."""
        cut = [(d, dim) for d, dim in enumerate(self) if dim is not None]
        if not cut:
            return Replicated()
        ((dim, axis),) = cut
        return Shard(dim, axis.count if isinstance(axis, Groups) else 1)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"

    __str__ = __repr__
