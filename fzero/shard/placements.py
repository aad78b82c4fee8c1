"""placements: how a global value lies on the n ranks of one mesh axis.

| placement | text | a rank holds | the value is |
|---|---|---|---|
| `Replicated()` | `R` | all of it | any rank's |
| `Shard(0)` | `S0` | one of n equal parts of dim 0 | the parts, one after the other |
| `Shard(0, groups=3)` | `S0/3` | its part of each third of dim 0, one after the other | each third joined |
| `Partial()` | `P` | an addend of the same shape | the sum over ranks |
| `Partial("max")` | `Pmax` | a candidate of the same shape | the maximum over ranks |
| `Flat()` | `F` | one of n equal stretches of its elements (ZeRO) | the stretches, joined |

Groups express two things. A fused weight holds q, k and v in one dim: groups=3 gives each rank its heads of all three.
A dim (a, b) flattened to one, of which b is sharded, is groups=a.

The functions here work on real tensors, in one process. They are the meaning of a placement; no rank calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fzero.errors import SpecError


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is seen as (groups, size / groups); a rank holds one of n equal parts of each group, joined.

    >>> str(Shard(1)), str(Shard(0, groups=3))
    ('S1', 'S0/3')
    """

    dim: int
    groups: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.groups == 1 else f"S{self.dim}/{self.groups}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a tensor of the whole shape; the value is their sum, or their maximum (`how="max"`).

    >>> str(Partial()), str(Partial("max"))
    ('P', 'Pmax')
    """

    how: str = "sum"

    def __post_init__(self) -> None:
        if self.how not in _JOINS:
            raise SpecError(f"Partial({self.how!r}): parts are joined by one of {', '.join(_JOINS)}")

    def __str__(self) -> str:
        return "P" if self.how == "sum" else f"P{self.how}"


@dataclass(frozen=True, slots=True)
class Flat:
    """A rank holds one of n equal stretches of the value's elements, whatever its dims: ZeRO's slice of a bucket."""

    def __str__(self) -> str:
        return "F"


Placement = Replicated | Shard | Partial | Flat


def split(whole: torch.Tensor, placement: Placement, n: int) -> list[torch.Tensor]:
    """The parts of a value on n ranks, in rank order. `join` is its inverse.

    The part of rank 0 of a `Partial` is the whole. The others hold what changes nothing: zeros, or the least number.

    >>> [part.tolist() for part in split(torch.arange(6), Shard(0), 2)]
    [[0, 1, 2], [3, 4, 5]]
    >>> [part.tolist() for part in split(torch.arange(12), Shard(0, groups=3), 2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    >>> [part.tolist() for part in split(torch.tensor([1, 2]), Partial(), 3)]
    [[1, 2], [0, 0], [0, 0]]
    """
    if isinstance(placement, Replicated):
        return [whole] * n
    if isinstance(placement, Partial):
        return [whole, *[torch.full_like(whole, _neutral(placement, whole.dtype))] * (n - 1)]
    return [own_part(whole, placement, n, rank).contiguous() for rank in range(n)]


def own_part(whole: torch.Tensor, placement: Placement, n: int, place: int) -> torch.Tensor:
    """The part of a value that the rank at `place` holds: a view or a copy.

    >>> own_part(torch.arange(12), Shard(0, groups=3), 2, 1).tolist()
    [2, 3, 6, 7, 10, 11]
    """
    if not isinstance(placement, Shard | Flat):
        return whole
    local_shape(whole.shape, placement, n)
    if isinstance(placement, Flat):
        return whole.reshape(n, -1)[place]
    dim = placement.dim
    seen = whole.unflatten(dim, (placement.groups, n, whole.shape[dim] // (placement.groups * n)))
    return seen.select(dim + 1, place).flatten(dim, dim + 1)


def join(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The value whose parts on the ranks, in rank order, are given. Sums are taken in rank order. Of `Flat` it is 1-D.

    >>> join([torch.tensor([1, 2]), torch.tensor([3, 4])], Partial()).tolist()
    [4, 6]
    >>> join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], Shard(0, groups=2)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if isinstance(placement, Replicated):
        return parts[0]
    if isinstance(placement, Partial):
        value = parts[0]
        for part in parts[1:]:
            value = _JOINS[placement.how](value, part)
        return value
    if isinstance(placement, Flat):
        return torch.cat([part.reshape(-1) for part in parts])
    dim, groups = placement.dim, placement.groups
    seen = [part.unflatten(dim, (groups, part.shape[dim] // groups)) for part in parts]
    return torch.stack(seen, dim + 1).flatten(dim, dim + 2)


def local_shape(shape: Sequence[int], placement: Placement, n: int) -> tuple[int, ...]:
    """The shape of one rank's part of a value of shape `shape`.

    Raises SpecError where the ranks would get unequal parts.

    >>> local_shape((4, 12), Shard(1, groups=3), 2)
    (4, 6)
    >>> local_shape((4, 12), Partial(), 2)
    (4, 12)
    """
    if isinstance(placement, Flat):
        if (size := math.prod(shape)) % n:
            raise SpecError(f"{n} ranks need equal stretches: {size} elements of a value of shape {tuple(shape)}")
        return (size // n,)
    if not isinstance(placement, Shard):
        return tuple(shape)
    dim, groups = placement.dim, placement.groups
    if not 0 <= dim < len(shape):
        raise SpecError(f"{placement} shards dim {dim} of a value of shape {tuple(shape)}: it has {len(shape)} dims")
    if shape[dim] % (groups * n):
        need = "" if groups == 1 else f" {groups} groups of"
        raise SpecError(
            f"{placement} on {n} ranks needs dim {dim} in{need} {n} equal parts: {shape[dim]} is no multiple of "
            f"{groups * n}; the next that is: {-(-shape[dim] // (groups * n)) * groups * n}"
        )
    return (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])


_JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sum": torch.add, "max": torch.maximum}


def _neutral(placement: Partial, dtype: torch.dtype) -> float | int | bool:
    """What an element is joined with, and stays as it is."""
    if placement.how == "sum" or dtype is torch.bool:
        return 0
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
