"""sharded_leaves: rules that cut dims of leaves, and those that place nothing or cut what must be whole."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fzero
from fzero import P, tree
from fzero.ir.mesh import Mesh
from fzero.plan.layout import layout
from fzero.plan.state_plan import Leaf

MESH = Mesh((("dp", 1), ("tp", 2)))


def leaves(state: Any, shard: Mapping[str, P]) -> dict[str, Leaf]:
    paths, values, _ = tree.flatten(state)
    return {leaf.path: leaf for leaf in layout(paths, values, mesh=MESH, shard=shard).leaves}


def state(**params: torch.Tensor) -> dict[str, Any]:
    return {"params": params, "opt_state": {"mu": params, "count": torch.zeros((), dtype=torch.int64)}}


def test_moments_lie_as_their_parameter() -> None:
    found = leaves(state(w=torch.ones(4, 6), b=torch.ones(4)), {"w": P(None, "tp")})
    assert found["params/w"].local_shape == found["opt_state/mu/w"].local_shape == (4, 3)
    assert found["params/b"].local_shape == (4,)


def test_the_first_rule_that_matches_decides() -> None:
    found = leaves(state(w=torch.ones(4, 6), v=torch.ones(4, 6)), {"w": P(), "**": P("tp", None)})
    assert found["params/w"].local_shape == (4, 6)
    assert found["params/v"].local_shape == (2, 6)
    assert leaves(state(w=torch.ones(4, 6), v=torch.ones(4, 6)), {"w": P(), "*": P("tp", None)}) == found


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"x": P("tp")}, r"the rule 'x' matches no leaf"),
        ({"w": P("tp", None), "**/w": P(None, "tp")}, r"'\*\*/w' places no leaf: 'w' comes before it"),
        ({"n": P("tp")}, r"the rule 'n' is to cut params/n, of shape \(2,\) and torch.int64"),
    ],
)
def test_a_rule_that_places_nothing_is_refused(shard: dict[str, P], message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        leaves(state(w=torch.ones(4, 6), n=torch.ones(2, dtype=torch.int64)), shard)


def test_leaves_that_mirror_one_another_may_have_a_rule_each_of_the_same_p() -> None:
    two = {"critic": {"w": torch.ones(4, 6)}, "maker": {"w": torch.ones(4, 6)}}
    found = leaves(two, {"critic/w": P(None, "tp"), "maker/w": P(None, "tp")})
    assert found["critic/w"].local_shape == found["maker/w"].local_shape == (4, 3)
    with pytest.raises(fzero.SpecError, match=r"'maker/w' places no leaf.* give both the same P"):
        leaves(two, {"critic/w": P(None, "tp"), "maker/w": P("tp", None)})


def test_a_rule_that_cuts_nothing_may_name_a_whole_leaf() -> None:
    assert leaves(state(w=torch.ones(4), n=torch.ones(2, dtype=torch.int64)), {"n": P()})["params/n"].slot is None


def test_moments_in_blocks_are_not_cut() -> None:
    mu = {"codes": {"w": torch.ones(64, 2, dtype=torch.int8)}, "scales": {"w": torch.ones(2)}}
    with pytest.raises(fzero.SpecError, match="moments in blocks of 64 elements"):
        leaves({"params": {"w": torch.ones(64, 2)}, "opt_state": {"mu": mu}}, {"w": P("tp", None)})


def factored(**rules: P) -> dict[str, Leaf]:
    """A matrix, the rows and columns of its second moment, as Adafactor has them, and one that stays whole."""
    opt = {"row": {"w": torch.ones(4)}, "col": {"w": torch.ones(6)}}
    names = {"row_w": "opt_state/row/w", "col_w": "opt_state/col/w"}
    shard = {names.get(name, name): dims for name, dims in rules.items()}
    return leaves({"opt_state": opt, "params": {"a": torch.ones(4), "w": torch.ones(4, 6)}}, shard)


def test_what_follows_a_leaf_lies_as_the_dims_that_it_has() -> None:
    """Also where it comes before it in the tree."""
    found = factored(w=P(None, "tp"))
    shapes = {path: leaf.local_shape for path, leaf in found.items()}
    assert shapes == {"opt_state/col/w": (3,), "opt_state/row/w": (4,), "params/a": (4,), "params/w": (4, 3)}
    shapes = {path: leaf.local_shape for path, leaf in factored(w=P("tp", None)).items()}
    assert shapes["opt_state/row/w"] == (2,)
    assert shapes["opt_state/col/w"] == (6,)


def test_what_follows_a_leaf_may_have_a_rule_of_its_own() -> None:
    found = factored(row_w=P("tp"), w=P(None, "tp"))
    assert found["opt_state/row/w"].local_shape == (2,)
    assert found["opt_state/col/w"].local_shape == (3,)
    assert found["params/w"].local_shape == (4, 3)


def test_a_matrix_that_is_stepped_whole_is_not_cut() -> None:
    made = {"params": {"w": torch.ones(64, 2)}, "opt_state": {"matrices": {"w": torch.ones(64, 2)}}}
    with pytest.raises(fzero.SpecError, match=r"params/w is stepped as a whole matrix \(opt_state/matrices\)"):
        leaves(made, {"w": P("tp", None)})
    assert leaves(made, {"w": P()})["params/w"].local_shape == (64, 2)


def test_the_shape_that_a_rule_cuts_is_that_of_the_parameter() -> None:
    with pytest.raises(fzero.SpecError, match=r"w.*5"):
        leaves(state(w=torch.ones(5, 6)), {"w": P("tp", None)})


@pytest.mark.parametrize("rule", ["**", "**/n", "params/n", "n"])
def test_a_rule_without_axes_for_a_leaf_that_is_never_cut_is_right(rule: str) -> None:
    """And one for all leaves need not place any."""
    values = state(w=torch.ones(4), n=torch.ones(2, dtype=torch.int64))
    assert leaves(values, {"w": P("tp"), rule: P()})["params/w"].local_shape == (2,)
