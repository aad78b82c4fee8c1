"""sharding_problem: what a chooser is asked of a graph, and how its answer reads."""

from __future__ import annotations

import operator

import pytest
import torch
from by_hand import Draft, problem_of

from fzero.errors import SpecError
from fzero.shard.moves import NEVER
from fzero.shard.ops import CONSTRAIN
from fzero.shard.placements import Partial, Replicated, Shard
from fzero.shard.rules import Strategy
from fzero.shard.sharding_problem import ChosenStrategy, leaf_values

aten = torch.ops.aten
R = Replicated()


def test_leaves_are_views_and_casts_of_one_leaf() -> None:
    draft = Draft()
    leaf, other = draft.input(4, 6), draft.input(4, 6)
    cast = draft.call(aten._to_copy.default, leaf)
    turned = draft.call(aten.t.default, cast)
    doubled = draft.call(aten.mul.Tensor, leaf, 2.0)
    seen = draft.call(aten.t.default, doubled)
    pieces = draft.call(aten.split.Tensor, leaf, 2)
    piece = draft.graph.call_function(operator.getitem, (pieces, 0))
    piece.meta["val"] = pieces.meta["val"][0]
    gm = draft.returning(turned, seen, piece, draft.call(aten.t.default, other))
    own = leaf_values(gm.graph, {leaf})
    assert {leaf, cast, turned} <= own
    assert not own & {doubled, seen, other, piece}
    problem = problem_of(gm, [R, R], [R] * 4, leaves=[0], names={leaf: "params/w"})
    assert problem.leaf_of(turned) is leaf
    assert (problem.name_of(turned), problem.name_of(other)) == ("params/w", other.name)


def test_for_which_calls_a_strategy_is_chosen() -> None:
    draft = Draft()
    x = draft.input(4, 6)
    placed, elsewhere = (draft.call(CONSTRAIN, x, axis, 0, 1) for axis in ("tp", "mp"))
    pair = draft.call(aten.max.dim, x, 1)
    most = draft.graph.call_function(operator.getitem, (pair, 0))
    most.meta["val"] = pair.meta["val"][0]
    problem = problem_of(draft.returning(placed, elsewhere, most), [R], [R] * 3)
    assert list(problem.calls()) == [placed, elsewhere, pair, most]
    assert [node for node in problem.calls() if problem.is_free(node)] == [elsewhere, pair]


def test_a_region_is_one_only_where_its_ends_are_known() -> None:
    draft = Draft()
    x = draft.input(4)
    node = draft.graph.call_function(torch.ops.fzero.region.default, ([x], 0))
    gm = draft.returning(x)
    ends = problem_of(gm, [R], [R], ends=lambda node, inputs: [])
    assert (ends.is_region(node), ends.is_region(x)) == (True, False)
    assert not problem_of(gm, [R], [R]).is_region(node)


def test_a_dim_that_the_ranks_do_not_divide_is_refused() -> None:
    draft = Draft()
    gm = draft.returning(draft.input(5, 4))
    with pytest.raises(SpecError, match="S0 on 2 ranks needs dim 0 in 2 equal parts: 5"):
        problem_of(gm, [Shard(0)], [R])
    assert problem_of(gm, [Shard(1)], [R]).n == 2


def test_a_choice_in_words() -> None:
    first, second = Strategy((R,), (R,)), Strategy((Shard(0),), (Partial(),))
    assert str(ChosenStrategy(first, 2048.0)) == "R -> R  2,048 bytes"
    assert str(ChosenStrategy(first, 0.0, second, 1e6)) == "R -> R  0 bytes; next S0 -> P  1,000,000 bytes"
    assert str(ChosenStrategy(first, 0.0, second, NEVER)) == "R -> R  0 bytes; next S0 -> P  never"
    assert ChosenStrategy(first, 0.0, second).runner_up_cost == NEVER
    assert not ChosenStrategy(first).unknown
