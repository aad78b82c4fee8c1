"""join_sums: products that are sums over ranks are added before they are summed. The graph computes what it did; which
sums are left is counted."""

from __future__ import annotations

import torch
from recorded import calls, drawn, graph_of, rewritten
from torch import Tensor, fx

from fzero.shard.join_sums import join_sums
from fzero.shard.placements import Replicated, Shard

aten = torch.ops.aten
R, ROWS, COLUMNS = Replicated(), Shard(0), Shard(1)

X, W, V = drawn(6, 4), drawn(4, 6), drawn(4, 6)


def sums_of_sums(gm: fx.GraphModule) -> int:
    """The additions of two products."""
    products = {node for node in gm.graph.nodes if node.target is aten.mm.default}
    adds = [node for node in gm.graph.nodes if node.target is aten.add.Tensor]
    return sum(set(node.all_input_nodes) <= products for node in adds)


def test_products_that_are_sums_over_ranks_are_added_first() -> None:
    def fn(r: Tensor, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (r + x @ w) + x @ v

    inputs = [drawn(6, 6), X, W, V]
    assert sums_of_sums(graph_of(fn, *inputs)) == 0
    made = rewritten(join_sums, fn, inputs, [R, R, ROWS, ROWS])
    assert sums_of_sums(made) == 1
    assert calls(made).count("add") == 2
    for placed in ([R, R, ROWS, R], [R, R, COLUMNS, COLUMNS], [R, R, R, R]):
        assert sums_of_sums(rewritten(join_sums, fn, inputs, placed)) == 0, placed


def test_sums_alone_and_sums_that_are_read_elsewhere_stay() -> None:
    both = rewritten(join_sums, lambda x, w, v: x @ w + x @ v, [X, W, V], [R, ROWS, ROWS])
    assert calls(both) == ["mm", "mm", "add"]

    def shared(r: Tensor, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        product = x @ w
        return ((r + product) + x @ v) * product

    assert sums_of_sums(rewritten(join_sums, shared, [drawn(6, 6), X, W, V], [R, R, ROWS, ROWS])) == 0


def test_a_sum_of_other_shapes_stays() -> None:
    def fn(r: Tensor, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (r + x @ w) + x @ v

    assert sums_of_sums(rewritten(join_sums, fn, [drawn(6), X, W, V], [R, R, ROWS, ROWS])) == 0, "r is broadcast"


def test_a_view_and_a_cast_of_a_product_are_it() -> None:
    def fn(r: Tensor, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (r + (x @ w).view(2, 3, 6)) + (x @ v).view(2, 3, 6)

    made = rewritten(join_sums, fn, [drawn(2, 3, 6), X, W, V], [R, R, ROWS, ROWS])
    views = {node for node in made.graph.nodes if node.target is aten.view.default}
    adds = [node for node in made.graph.nodes if node.target is aten.add.Tensor]
    assert sum(set(node.all_input_nodes) == views for node in adds) == 1
