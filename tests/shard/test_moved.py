"""What one axis sees of another's transfers: moving parts and then joining them is joining and then moving.

The ranks are a grid. Along the first axis a transfer runs, as torch.distributed defines it; along the second each value
lies as a strategy of its rule says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fzero.shard import ops
from fzero.shard.placements import Partial, Shard, join, split
from fzero.shard.rules import localised, strategies


def moved(op: Any, values: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor]:
    """What each rank of the first axis gets. values: what each gives. args: those behind the value."""
    n = len(values)
    if op is ops.ALL_REDUCE:
        return [join(values, Partial(args[2]))] * n
    if op is ops.OWN_PART:
        return [split(x, Shard(args[2], args[3]), n)[rank] for rank, x in enumerate(values)]
    flat = [x.reshape(n, -1) if op is not ops.ALL_GATHER else x.reshape(1, -1) for x in values]
    if op is ops.ALL_GATHER:
        return [torch.cat(flat).view(args[2])] * n
    if op is ops.REDUCE_SCATTER:
        return [sum(flat)[rank].view(args[2]) for rank in range(n)]  # type: ignore[index, union-attr]
    return [torch.stack([x[rank] for x in flat]).view(args[2]) for rank in range(n)]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, list[int], list[Any], int]:
    """(op, the shape of its operand, its other arguments, ranks along the first axis)."""
    n = draw(st.sampled_from([2, 3]))
    part = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    op = draw(st.sampled_from([*ops.TRANSFERS, ops.OWN_PART]))
    if op is ops.ALL_REDUCE:
        return op, part, ["tp", n, draw(st.sampled_from(["sum", "max"]))], n
    if op is ops.OWN_PART:
        dim, groups = draw(st.integers(0, len(part) - 1)), draw(st.sampled_from([1, 2]))
        part[dim] *= n * groups
        return op, part, [None, n, dim, groups], n
    first = draw(st.booleans())  # the ranks are in the first dim, or a dim of their own
    whole = [n * part[0], *part[1:]] if first else [n, *part]
    if op is ops.ALL_GATHER:
        return op, part, ["tp", n, whole], n
    if op is ops.REDUCE_SCATTER:
        return op, whole, ["tp", n, part], n
    rest = math.prod(part)
    other = draw(st.sampled_from([d for d in (1, 2, 4) if rest % d == 0]))
    return (
        op,
        whole,
        ["tp", n, draw(st.sampled_from([whole, [n, other, rest // other], [n * other, rest // other]]))],
        n,
    )


def node_of(op: Any, shape: Sequence[int], args: Sequence[Any]) -> fx.Node:
    graph = fx.Graph()
    x, rank = graph.placeholder("x"), graph.placeholder("rank")
    x.meta["val"], rank.meta["val"] = (
        torch.empty(shape, device="meta"),
        torch.zeros((), dtype=torch.int64, device="meta"),
    )
    given = [rank if a is None else a for a in args]
    node = graph.call_function(op, (x, *given))
    node.meta["val"] = op(x.meta["val"], *[a.meta["val"] if isinstance(a, fx.Node) else a for a in given])
    return node


@given(calls(), st.sampled_from([2, 3]), st.sampled_from([1, 2]))
@settings(max_examples=400, deadline=None)
def test_parts_are_moved_as_the_whole(call: tuple[Any, list[int], list[Any], int], m: int, groups: int) -> None:
    op, shape, args, n = call
    node = node_of(op, shape, args)
    draw = torch.Generator().manual_seed(0)
    values = [torch.randint(-50, 50, shape, generator=draw).float() for _ in range(n)]
    whole = moved(op, values, args)
    for strategy in strategies(node, m, sorted({1, groups})):
        source, (target,) = strategy.inputs[0], strategy.outputs
        local = list(localised(node, strategy, m)[0][1:])
        if (
            isinstance(source, Partial) and source.how == "sum"
        ):  # random addends: zeros on other ranks would hide faults
            noise = [torch.randint(-9, 9, shape, generator=draw).float() for _ in values]
            parts = [[x - e, e, *[torch.zeros_like(x)] * (m - 2)] for x, e in zip(values, noise, strict=True)]
        else:
            parts = [split(x, source, m) for x in values]  # by rank of the first axis, then of the second
        found = [moved(op, [own[place] for own in parts], local) for place in range(m)]
        for rank in range(n):
            assert torch.equal(join([found[place][rank] for place in range(m)], target), whole[rank]), (
                str(strategy),
                rank,
            )


CALLS: list[tuple[Any, list[int], list[Any]]] = [
    (ops.ALL_REDUCE, [4, 6], ["tp", 2, "sum"]),
    (ops.ALL_GATHER, [4, 6], ["tp", 2, [8, 6]]),
    (ops.REDUCE_SCATTER, [2, 4, 6], ["tp", 2, [4, 6]]),
    (ops.ALL_TO_ALL, [8, 6], ["tp", 2, [2, 4, 6]]),
    (ops.OWN_PART, [8, 6], [None, 2, 0, 1]),
    (ops.CONSTRAIN, [8, 6], ["tp", 0, 1]),
]
MORE: list[tuple[Any, list[int], list[Any]]] = [
    (ops.ALL_REDUCE, [4, 6], ["tp", 2, "max"]),
    (ops.ALL_GATHER, [1, 4, 6], ["tp", 2, [2, 4, 6]]),
    (ops.REDUCE_SCATTER, [8, 6], ["tp", 2, [1, 4, 6]]),
    (ops.REDUCE_SCATTER, [4, 6], ["tp", 3, [8]]),  # parts that are no part of the first dim
    (ops.ALL_TO_ALL, [1, 8, 6], ["tp", 2, [1, 8, 6]]),
    (ops.OWN_PART, [4, 24], [None, 2, 1, 3]),
    (ops.CONSTRAIN, [8, 6], ["tp", -1, 1]),
]


def test_what_is_offered_for_each_transfer(golden: Callable[[str, str], None]) -> None:
    """One that is offered no more would be a transfer over the second axis too. Behind each, what a rank gives the op
    but the value."""
    lines = []
    for op, shape, args in [*CALLS, *MORE]:
        node = node_of(op, shape, args)
        found = [f"    {s} with {localised(node, s, 2)[0][1:]}" for s in strategies(node, 2, (1, 2))]
        lines += [f"{op} {shape} {args}", *found]
    golden("shard/transfers", "\n".join(lines))


def test_dims_may_lie_in_parts() -> None:
    """Not everything is whole: each op has a strategy that cuts something, where there is something to cut."""
    for op, shape, args in CALLS:
        found = strategies(node_of(op, shape, args), 2)
        cut = {s.outputs[0].dim for s in found if isinstance(s.outputs[0], Shard)}
        assert len(cut) >= 2, (op, [str(s) for s in found])
