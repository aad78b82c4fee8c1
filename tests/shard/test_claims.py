"""claims: what a node of a local graph is, and where a user wants a value."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fzero.shard.claims import Claim, claim, claim_of, constrains, constraint
from fzero.shard.ops import ALL_REDUCE, CONSTRAIN
from fzero.shard.placements import Partial, Replicated, Shard


def node(target: object, *args: object) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *args))  # type: ignore[arg-type]


def test_a_claim_stays_with_its_node() -> None:
    call = node(torch.ops.aten.relu.default)
    assert claim_of(call) is None
    what = Claim("call", "relu", (Partial(),))
    assert claim(call, what) is call
    assert claim_of(call) is what
    assert (what.given, what.form, what.result) == ((), "", 0)
    call.meta["claim"] = "anything"
    assert claim_of(call) is None, "no claim of ours"


@pytest.mark.parametrize(("axis", "tp", "mp"), [("tp", True, False), ("mp", False, True), ("", True, True)])
def test_a_value_is_placed_along_an_axis_or_along_all(axis: str, tp: bool, mp: bool) -> None:
    call = node(CONSTRAIN, axis, 1, 1)
    assert (constrains(call, "tp"), constrains(call, "mp")) == (tp, mp)
    assert not constrains(node(ALL_REDUCE, axis, 2, "sum"), "tp")


def test_where_it_is_wanted() -> None:
    assert constraint(node(CONSTRAIN, "tp", -1, 1)) == Replicated()
    assert constraint(node(CONSTRAIN, "tp", 0, 1)) == Shard(0)
    assert constraint(node(CONSTRAIN, "tp", 2, 3)) == Shard(2, 3)
