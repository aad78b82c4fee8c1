"""The order of a leaf over `tp`: what a rank holds is one range of it, and views find that range in the leaf."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.shard.placements import Shard, split
from fzero.state.order import Cut, Order, split_like


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut]:
    ranks, groups = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= ranks * groups
    return tuple(shape), Cut(dim, groups, ranks)


@given(cuts(), st.data())
@settings(max_examples=200, deadline=None)
def test_the_order_is_that_of_the_parts(given: tuple[tuple[int, ...], Cut], data: st.DataObject) -> None:
    shape, cut = given
    order = Order.of(shape, cut)
    leaf = torch.arange(order.numel)
    parts = split(leaf.view(shape), Shard(cut.dim, cut.groups), cut.ranks)
    counted = torch.cat([part.reshape(-1) for part in parts])
    assert [order.at(i) for i in range(order.numel)] == counted.tolist()

    rank = data.draw(st.integers(0, cut.ranks - 1))
    low = data.draw(st.integers(0, order.numel - 1))
    high = data.draw(st.integers(low + 1, order.numel))
    start, stop = order.within(rank, low, high)
    own = parts[rank].reshape(-1)
    assert counted[start:stop].tolist() == own[(own >= low) & (own < high)].tolist()
    views = order.views(leaf[low:high], low, start, stop)
    assert len(views) <= 3
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
    assert order == Order(1, 1, 15)
    assert list(order.ranges(2, 12, 4)) == [(2, 6), (6, 10), (10, 12)]
    assert [view.tolist() for view in order.views(torch.arange(4, 9), 4, 5, 8)] == [[5, 6, 7]]
