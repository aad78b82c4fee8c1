"""followers: whom a leaf of another shape follows, and which dims of it it has."""

from __future__ import annotations

import torch

from fzero.plan.followers import Follows, followers
from fzero.plan.leaf_classes import LeafClass
from fzero.shard.layouts import AxisCut, Layout
from fzero.shard.placements import Shard


def found(*leaves: tuple[str, str, tuple[int, ...]]) -> list[Follows | None]:
    """Of leaves given as (entry, path below it, shape); those of `params` are parameters."""
    classes = [LeafClass(tuple(path.split("/")), ((entry, i),)) for i, (entry, path, _) in enumerate(leaves)]
    tensors = [torch.empty(shape, device="meta") for *_, shape in leaves]
    return followers(classes, tensors, [entry == "params" for entry, *_ in leaves])


def test_a_leaf_follows_the_parameter_whose_path_ends_its_own() -> None:
    assert found(
        ("params", "a/w", (4, 6)), ("params", "w", (2, 3)), ("m", "row/a/w", (4,)), ("m", "col/a/w", (6,)),
        ("m", "row/w", (2,)), ("m", "other/v", (4,)),
    ) == [None, None, Follows(0, (0,)), Follows(0, (1,)), Follows(1, (0,)), None]  # fmt: skip


def test_the_longest_end_that_is_a_parameter_counts() -> None:
    assert found(("params", "w", (2,)), ("params", "b/w", (3, 2)), ("m", "x/b/w", (3,)))[2] == Follows(1, (0,))


def test_a_leaf_follows_the_parameter_whose_path_is_in_its_own() -> None:
    """It is not cut: a square may be of either dim. A path that ends as a parameter's is that one's."""
    assert found(
        ("params", "l/0/w", (4, 4)), ("params", "w", (4, 4)), ("m", "gram/l/0/w/0", (4, 4)),
        ("m", "gram/l/0/w/1", (4, 4)), ("m", "l/0/w/w", (4,)), ("m", "l/0/v/0", (4,)),
    ) == [None, None, Follows(0, None), Follows(0, None), Follows(1, (0,)), None]  # fmt: skip


def test_a_shape_that_is_none_of_the_parameters_tells_no_dims() -> None:
    assert found(("params", "w", (4, 6)), ("m", "x/w", (5,)), ("m", "y/w", (6, 4)))[1:] == [
        Follows(0, None), Follows(0, None)
    ]  # fmt: skip


def test_of_a_square_the_first_lacks_the_later_dims() -> None:
    square = ("params", "w", (4, 4))
    assert found(square, ("m", "row/w", (4,)), ("m", "col/w", (4,)), ("m", "more/w", (4,)))[1:] == [
        Follows(0, (0,)), Follows(0, (1,)), Follows(0, (1,))
    ]  # fmt: skip
    cube = ("params", "w", (4, 4, 5))
    assert found(cube, ("m", "x/w", (4, 5)), ("m", "y/w", (4, 5)), ("m", "z/w", (4,)))[1:] == [
        Follows(0, (0, 2)), Follows(0, (1, 2)), Follows(0, (0,))
    ]  # fmt: skip


def test_a_follower_is_cut_where_it_has_the_dim() -> None:
    lies = Layout((AxisCut("tp", 2, Shard(2)), AxisCut("mp", 2, Shard(0, groups=3))))
    assert Follows(0, (0, 2)).layout(lies) == Layout((AxisCut("tp", 2, Shard(1)), AxisCut("mp", 2, Shard(0, groups=3))))
    assert Follows(0, (1,)).layout(lies) == Layout()
    assert Follows(0, (1, 2)).layout(lies) == Layout((AxisCut("tp", 2, Shard(1)),))
    assert Follows(0, None).layout(lies) == Layout()
