"""element_ways: from which elements a transfer makes each element of its result.

The copies and views around a transfer are followed back with it. `sharding` asks this of a value that is brought to
another placement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from fzero.errors import VerifyError
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.moves import VIEWS
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape

aten = torch.ops.aten


def refusal(node: Any, what: str) -> VerifyError:
    """The error of a node of a local graph, with the user's line."""
    line = node.meta.get("source", "") if isinstance(node, fx.Node) else ""
    return VerifyError(f"[sharding] {node} {line}: {what}".replace(" :", ":"))


def refuse(node: Any, what: str) -> NoReturn:
    """Raises it."""
    raise refusal(node, what)


@dataclass(frozen=True)
class ElementWays:
    """n: the ranks of the axis. is_rank: whether a node is proven to be the rank. checked: ways that were followed, of
    which each layer of a model has its own. Only `check` adds to it."""

    n: int
    axis: str
    is_rank: Callable[[Any], bool]
    checked: set[tuple[Any, ...]] = field(default_factory=set)

    def check(self, node: fx.Node, x: fx.Node, source: fx.Node, lies: Placement, want: Placement) -> None:
        """Raises VerifyError unless `node` is x as `want`, made of `source`, which is x as `lies`: elements of the
        result, at the borders of what the ranks hold, are followed back to those that they come from."""
        if isinstance(want, Partial):
            refuse(node, f"is moved to {want}: what is to be added is never sent")
        start = {source, *_bases(source)}
        shape = tuple(x.meta["val"].shape)
        here = tuple(node.meta["val"].shape)
        if here != local_shape(shape, want, self.n):
            refuse(node, f"has shape {list(here)}: {x.name} of shape {list(shape)} as {want} has another")
        way = (lies, want, shape, *self._way(node, start))
        if way in self.checked:
            return
        cuts = [p for p in (lies, want) if isinstance(p, Shard)]
        units = {p.dim: min(shape[q.dim] // (q.groups * self.n) for q in cuts if q.dim == p.dim) for p in cuts}
        for rank in sorted({0, min(1, self.n - 1), self.n - 1}):
            for place in _borders(here, units):
                came = _Origin(self, start).of(node, rank, _flat(place, here))
                if came != self._expected(lies, want, shape, rank, place):
                    refuse(node, f"is to bring {x.name} from {lies} to {want}, and brings others")
        self.checked.add(way)

    def _way(self, node: fx.Node, start: set[fx.Node]) -> Iterator[Any]:
        """All that following an element reads of the ops on its way: targets, literals, shapes, which nodes are the
        rank."""
        while node not in start and node.op == "call_function" and node.all_input_nodes:
            others = (self.is_rank(a) if isinstance(a, fx.Node) else str(a) for a in node.args[1:])
            yield node.target, tuple(node.meta["val"].shape), *others
            node = node.all_input_nodes[0]
        yield node in start, tuple(node.meta["val"].shape)

    def _expected(
        self, source: Placement, want: Placement, shape: Sequence[int], rank: int, place: Sequence[int]
    ) -> tuple[str, frozenset[tuple[int, int]]]:
        """(how they are joined, the ranks and elements of the source) of one element under `want`."""
        spot = _whole_place(want, shape, self.n, rank, place)
        if isinstance(source, Partial):
            return source.how, frozenset((r, _flat(spot, shape)) for r in range(self.n))
        if isinstance(source, Replicated):
            return "", frozenset({(rank, _flat(spot, shape))})
        assert isinstance(source, Shard), f"{source} is no placement of a value by its dims"
        dim, groups = source.dim, source.groups
        own = shape[dim] // (groups * self.n)
        group, rest = divmod(spot[dim], own * self.n)
        owner, inside = divmod(rest, own)
        there = (*spot[:dim], group * own + inside, *spot[dim + 1 :])
        return "", frozenset({(owner, _flat(there, local_shape(shape, source, self.n)))})


class _Origin:
    """Where elements come from. start: the nodes at which a way ends: the value that is moved, and what it views."""

    def __init__(self, ways: ElementWays, start: set[fx.Node]) -> None:
        self.ways, self.start, self.how = ways, start, ""

    def of(self, node: fx.Node, rank: int, at: int) -> tuple[str, frozenset[tuple[int, int]]]:
        """(how they are joined, the (rank, element)s) of element `at` of a node on a rank."""
        found = list(self._of(node, rank, at))
        if len(set(found)) < len(found):
            refuse(node, "adds an element twice")
        return self.how, frozenset(found)

    def _of(self, node: fx.Node, rank: int, at: int) -> Iterator[tuple[int, int]]:
        if node in self.start:
            yield rank, at
            return
        n, target = self.ways.n, node.target
        if target in ops.TRANSFERS or target is torch.ops.fzero.reduce.default:
            yield from self._transferred(node, rank, at)
        elif target is ops.OWN_PART:
            whole, own, ranks, dim, groups = node.args
            if not self.ways.is_rank(own) or ranks != n:
                refuse(node, "takes the part of another rank")
            shape = tuple(whole.meta["val"].shape)  # type: ignore[union-attr]
            place = _unflat(at, tuple(node.meta["val"].shape))
            spot = _whole_place(Shard(int(str(dim)), int(str(groups))), shape, n, rank, place)
            yield from self._of(fx_nodes.operand(node), rank, _flat(spot, shape))
        elif target in VIEWS or target is aten.clone.default:
            yield from self._of(fx_nodes.operand(node), rank, at)
        elif target is aten.permute.default:
            source = fx_nodes.operand(node)
            place = _unflat(at, tuple(node.meta["val"].shape))
            order: list[int] = list(node.args[1])  # type: ignore[arg-type]
            back = [place[order.index(d)] for d in range(len(order))]
            yield from self._of(source, rank, _flat(back, tuple(source.meta["val"].shape)))
        else:
            refuse(node, f"{target} is on the way of a transfer")

    def _transferred(self, node: fx.Node, rank: int, at: int) -> Iterator[tuple[int, int]]:
        n, source = self.ways.n, fx_nodes.operand(node)
        if node.target in ops.TRANSFERS:
            kind, axis, ranks = ops.TRANSFERS[node.target], node.args[1], node.args[2]
            how = str(node.args[3]) if kind == "all_reduce" else "sum"
        else:
            kind, axis, ranks, how = "all_reduce", node.args[2], n, str(node.args[1])
        if (axis, ranks) != (self.ways.axis, n):
            refuse(node, f"runs over {ranks} ranks of {axis}, not {n} of {self.ways.axis}")
        size = source.meta["val"].numel()
        if kind in ("all_reduce", "reduce_scatter"):
            if self.how:
                refuse(node, "is a sum of sums over the same ranks")
            self.how = how
            offset = rank * (size // n) if kind == "reduce_scatter" else 0
            for other in range(n):
                self.how, before = "", self.how
                yield from self._of(source, other, offset + at)
                if self.how:
                    refuse(node, "is a sum of sums over the same ranks")
                self.how = before
        elif kind == "all_gather":
            yield from self._of(source, at // size, at % size)
        else:
            part = size // n
            yield from self._of(source, at // part, rank * part + at % part)


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """What a contiguous value is a view of, with the same elements in the same order."""
    while node.target in VIEWS and fx_nodes.operand(node).meta["val"].is_contiguous():
        node = fx_nodes.operand(node)
        yield node


def _borders(shape: Sequence[int], units: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Places of a tensor: the first, second, middle and last of each dim, with the first and the last of all others,
    and some in between. units: of dims that are cut, the elements of a piece: the first and last of each piece too."""
    if not math.prod(shape):
        return
    found = [{0, min(1, s - 1), s // 3, s // 2, 2 * s // 3, s - 1} for s in shape]
    for d, unit in units.items():
        starts = range(0, shape[d], max(unit, 1))
        found[d] |= {*starts, *(start - 1 for start in starts if start)}
    edges = [sorted(own) for own in found]
    for d, own in enumerate(edges):
        for ends in (0, -1):
            for place in own:
                yield tuple(place if e == d else edges[e][ends] for e in range(len(shape)))
    yield from itertools.islice(itertools.product(*edges), 0, 64)


def _flat(place: Sequence[int], shape: Sequence[int]) -> int:
    at = 0
    for p, s in zip(place, shape, strict=True):
        at = at * s + p
    return at


def _unflat(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for s in reversed(shape):
        at, p = divmod(at, s)
        place.append(p)
    return tuple(reversed(place))


def _whole_place(want: Placement, shape: Sequence[int], n: int, rank: int, place: Sequence[int]) -> tuple[int, ...]:
    """Where in the whole value an element of a rank's part lies."""
    if not isinstance(want, Shard):
        return tuple(place)
    own = shape[want.dim] // (want.groups * n)
    group, inside = divmod(place[want.dim], own)
    return (*place[: want.dim], (group * n + rank) * own + inside, *place[want.dim + 1 :])
