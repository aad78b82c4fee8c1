"""The order of a leaf in parts: what a rank holds is one range of it, and views find that range in the leaf."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.shard.layouts import AxisCut, Layout
from fzero.shard.placements import Shard, split
from fzero.state.order import DimCut, Order, split_like


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[DimCut]]:
    """A shape and up to three cuts of it; those of one dim have the same groups."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    groups = [draw(st.sampled_from([1, 2, 3])) for _ in shape]
    found = []
    for _ in range(draw(st.integers(0, 3))):
        dim, ranks = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 2, 3]))
        shape[dim] *= ranks
        found.append(DimCut(dim, groups[dim], ranks))
    sizes = [size * (groups[d] if any(cut.dim == d for cut in found) else 1) for d, size in enumerate(shape)]
    return tuple(sizes), found


@given(cuts(), st.data())
@settings(max_examples=200, deadline=None)
def test_the_order_is_that_of_the_parts(given: tuple[tuple[int, ...], list[DimCut]], data: st.DataObject) -> None:
    shape, found = given
    order = Order.of(shape, found)
    leaf = torch.arange(order.numel)
    parts = [leaf.view(shape)]
    for cut in found:
        parts = [each for part in parts for each in split(part, Shard(cut.dim, cut.groups), cut.ranks)]
    lies = Layout(tuple(AxisCut(f"a{i}", cut.ranks, Shard(cut.dim, cut.groups)) for i, cut in enumerate(found)))
    assert torch.equal(lies.join(parts), leaf.view(shape))
    assert order.parts == len(parts) == lies.parts
    counted = torch.cat([part.reshape(-1) for part in parts])
    assert [order.at(i) for i in range(order.numel)] == counted.tolist()

    rank = data.draw(st.integers(0, order.parts - 1))
    low = data.draw(st.integers(0, order.numel - 1))
    high = data.draw(st.integers(low + 1, order.numel))
    start, stop = order.within(rank, low, high)
    own = parts[rank].reshape(-1)
    assert counted[start:stop].tolist() == own[(own >= low) & (own < high)].tolist()
    views = order.views(leaf[low:high], low, start, stop)
    assert len(views) <= 3 or order.block < order.part
    assert [x for view in views for x in view.reshape(-1).tolist()] == counted[start:stop].tolist()
    pieces = split_like(counted[start:stop], views)
    assert all(torch.equal(view, piece) for view, piece in zip(views, pieces, strict=True))

    most = data.draw(st.integers(1, order.numel))
    ranges = list(order.ranges(start, stop, most))
    assert [edge for pair in ranges for edge in pair] == sorted(edge for pair in ranges for edge in pair)
    assert sum(b - a for a, b in ranges) == stop - start
    assert all(order.at(b - 1) + 1 - order.at(a) <= most for a, b in ranges)


def test_a_flattened_leaf_is_one_run() -> None:
    order = Order.of((3, 5))
    assert order == Order((), (), 15)
    assert list(order.ranges(2, 12, 4)) == [(2, 6), (6, 10), (10, 12)]
    assert [view.tolist() for view in order.views(torch.arange(4, 9), 4, 5, 8)] == [[5, 6, 7]]
