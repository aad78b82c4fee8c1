"""split_bias: a bias is added once, after the sum over ranks. The graph computes what it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from recorded import calls, drawn, graph_of, rewritten
from torch import Tensor

from fzero.shard.placements import Placement, Replicated, Shard
from fzero.shard.split_bias import contracts, split_bias

aten = torch.ops.aten
R, ROWS, COLUMNS = Replicated(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("placed", "split"),
    [([R, COLUMNS, R], True), ([R, ROWS, ROWS], False), ([R, R, R], False), ([COLUMNS, R, R], False)],
)
def test_a_bias_of_a_product_that_is_a_sum_is_added_once(placed: list[Placement], split: bool) -> None:
    """The weight is transposed: its columns are summed over."""
    made = rewritten(split_bias, F.linear, [drawn(3, 4), drawn(5, 4), drawn(5)], placed)
    assert ("addmm" in calls(made)) != split
    assert ("add" in calls(made)) == split


def test_a_bias_is_added_behind_the_view_of_a_product() -> None:
    """There the sum over ranks is taken; but not where the bias has no place in the view."""
    inputs = [drawn(2, 3, 4), drawn(6, 4), drawn(6)]
    made = rewritten(split_bias, F.linear, inputs, [R, COLUMNS, R])
    assert calls(made)[-1] == "add"
    assert calls(made)[-2] == "view"

    def heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w, b).view(3, 2, 3)

    made = rewritten(split_bias, heads, [drawn(3, 4), *inputs[1:]], [R, COLUMNS, R])
    assert calls(made)[-2:] == ["add", "view"]


@pytest.mark.parametrize(("transposed", "weight"), [(False, (4, 6, 3, 3)), (True, (6, 4, 3, 3))])
def test_a_bias_of_a_convolution(transposed: bool, weight: tuple[int, ...]) -> None:
    conv = F.conv_transpose2d if transposed else F.conv2d
    inputs, channels = [drawn(2, 6, 5, 5), drawn(*weight), drawn(4)], Shard(0 if transposed else 1)
    made = rewritten(split_bias, conv, inputs, [R, channels, R])
    assert calls(made) == ["convolution", "view", "add"]
    other = rewritten(split_bias, conv, inputs, [R, Shard(1 - channels.dim), R])
    assert calls(other) == ["convolution"]


VIEWED: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...], list[int]]] = [
    (lambda w: w.clone().t(), (4, 6), []), (lambda w: w.t(), (4, 6), [1]), (lambda w: w.transpose(0, -1), (4, 6), [1]),
    (lambda w: w.permute(1, 0), (4, 6), [1]), (lambda w: w.permute(2, 0, 1)[0], (4, 6, 2), [0]),
    (lambda w: w[0], (2, 4, 6), [1]), (lambda w: w[:, 0], (4, 2, 6), [0]), (lambda w: w.select(-1, 0), (4, 6, 2), [0]),
    (lambda w: w.float(), (4, 6), [0]), (lambda w: w.unsqueeze(1)[:, 0], (4, 6), [0]),
    (lambda w: w.unsqueeze(0)[0].t(), (4, 6), [1]), (lambda w: w.detach(), (4, 6), [0]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VIEWED)))
def test_the_dim_that_a_product_sums_over_is_followed_to_the_leaf(number: int) -> None:
    fn, shape, dims = VIEWED[number]
    gm = graph_of(fn, drawn(*shape))
    (leaf,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    (result,) = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    assert [d for d in range(len(shape)) if contracts(result, {leaf: Shard(d)})] == dims
    assert not contracts(result, {leaf: R})
    assert not contracts(result, {})


def test_a_product_that_several_read_has_its_bias_added_before_their_views() -> None:
    """Each view is of the whole sum; and a view that splits the last dim has no place for the bias."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        product = F.linear(x, w, b)
        return product.view(2, 3, 6) + product.t().reshape(2, 3, 6)

    made = rewritten(split_bias, fn, [drawn(6, 4), drawn(6, 4), drawn(6)], [R, COLUMNS, R])
    assert calls(made)[:3] == ["t", "mm", "add"]
    assert calls(made).count("add") == 2


def test_a_bias_of_rows_and_a_factor_stay_with_the_product() -> None:
    """A bias as wide as the product, (3, 6), is not one of the view's last dim; a product that is scaled is no sum."""

    def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, w).view(1, 3, 6)

    made = rewritten(split_bias, rows, [drawn(3, 4), drawn(4, 6), drawn(3, 6)], [R, ROWS, R])
    assert calls(made) == ["mm", "add", "view"]

    def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, w, beta=0.5)

    gm = graph_of(scaled, drawn(3, 4), drawn(4, 6), drawn(6))
    split_bias(gm, [R, ROWS, R])
    assert calls(gm) == ["addmm"]
