"""join_sums, split_bias and coded_sums: what is rewritten so that fewer, or smaller, sums over ranks are taken.

The graph computes what it did; which sums are left is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.ir.recorder import record
from fzero.kernels.codecs import CODECS, decode, decode_sum, encode
from fzero.shard import ops
from fzero.shard.coded_sums import coded_sums
from fzero.shard.join_sums import join_sums
from fzero.shard.placements import Placement, Replicated, Shard
from fzero.shard.split_bias import contracts, split_bias

aten = torch.ops.aten
R, ROWS, COLUMNS = Replicated(), Shard(0), Shard(1)


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with FakeTensorMode():
        return record(lambda *xs: [fn(*xs)], [torch.empty(x.shape, dtype=x.dtype) for x in inputs])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def calls(gm: fx.GraphModule) -> list[str]:
    return [node.target.overloadpacket.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def rewritten(rewrite: Any, fn: Callable[..., Any], inputs: list[Tensor], placed: list[Placement]) -> fx.GraphModule:
    """The graph after a rewrite that changes no value, but for rounding."""
    gm = graph_of(fn, *inputs)
    rewrite(gm, placed)
    gm.graph.lint()
    torch.testing.assert_close(gm(*inputs)[0], fn(*inputs))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"].shape == node.target(*fx.node.map_arg(node.args, lambda x: x.meta["val"])).shape
    return gm


# --- sums that are joined ---------------------------------------------------------------------------------------------

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


# --- biases -----------------------------------------------------------------------------------------------------------


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


# --- sums in codes ----------------------------------------------------------------------------------------------------


def over_ranks(gm: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """The result on every rank, node by node; `inputs`: of each rank."""
    values: list[dict[fx.Node, Any]] = []
    for x in inputs:
        values.append({node: x for node in gm.graph.nodes if node.op == "placeholder"})
    n = len(inputs)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        given = [fx.node.map_arg(node.args, own.__getitem__) for own in values]
        if node.target in ops.TRANSFERS:
            held = [args[0] for args in given]
            for rank, own in enumerate(values):
                if node.target is ops.ALL_TO_ALL:
                    moved = torch.stack([x.reshape(n, -1)[rank] for x in held])
                elif node.target is ops.ALL_GATHER:
                    moved = torch.cat([x.reshape(-1) for x in held])
                else:
                    total = sum(held[1:], held[0])
                    moved = total.reshape(n, -1)[rank] if node.target is ops.REDUCE_SCATTER else total
                own[node] = moved.reshape(node.meta["val"].shape)
        else:
            for own, args in zip(values, given, strict=True):
                own[node] = node.target(*args, **node.kwargs)
    (result,) = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    return [own[result] for own in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 64), (3, 70), (6, 128)])
@pytest.mark.parametrize("scatters", [True, False])
def test_a_sum_in_codes_is_that_of_what_ranks_say(scatters: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, how = 3, CODECS["int8"]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(n)]

    def fn(x: Tensor) -> Tensor:
        if scatters:
            return ops.REDUCE_SCATTER(x, "tp", n, [shape[0] // n, shape[1]])
        return ops.ALL_REDUCE(x, "tp", n, "sum")

    gm = graph_of(fn, inputs[0])
    made = coded_sums(gm, "int8")
    assert made is not gm
    kinds = [ops.TRANSFERS[node.target] for node in made.graph.nodes if node.target in ops.TRANSFERS]
    assert kinds == (["all_to_all"] if scatters else ["all_to_all", "all_gather"])
    moved = [node for node in made.graph.nodes if node.target in ops.TRANSFERS]
    assert {node.args[0].meta["val"].dtype for node in moved} == {torch.uint8}
    part = -(-(inputs[0].numel() // n) // 64) * 64 if scatters else -(-inputs[0].numel() // (64 * n)) * 64
    padded = [_padded(x.reshape(-1), n, part, scatters) for x in inputs]
    sums = [decode_sum(torch.stack([encode(p[rank], how) for p in padded]), 1, how) for rank in range(n)]
    for rank, found in enumerate(over_ranks(made, inputs)):
        if scatters:
            wanted = sums[rank][: inputs[0].numel() // n].view(-1, shape[1])
        else:
            wanted = torch.cat([decode(encode(x, how), part, how) for x in sums])[: inputs[0].numel()].view(shape)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-5, atol=1e-5)


def _padded(x: Tensor, n: int, part: int, scatters: bool) -> Tensor:
    """By rank, what it gets of a value: of each slice, or of the whole, zeros behind it."""
    if scatters:
        return F.pad(x.view(n, -1), (0, part - len(x) // n))
    return F.pad(x, (0, n * part - len(x))).view(n, part)


@pytest.mark.parametrize(
    ("x", "how"),
    [
        (torch.zeros(128), "sum"), (torch.zeros(4, 63), "sum"), (torch.zeros(4, 64, dtype=torch.float64), "sum"),
        (torch.zeros(4, 64), "max"),
    ],
)  # fmt: skip
def test_what_is_small_or_no_sum_stays(x: Tensor, how: str) -> None:
    gm = graph_of(lambda x: ops.ALL_REDUCE(x, "tp", 2, how), x)
    assert coded_sums(gm, "int8") is gm
