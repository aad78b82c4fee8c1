"""The writer alone, given strategies by hand; and with any chooser: whatever the rules allow is written, and proven."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
from by_hand import Draft, aten, feed, problem_of
from helpers import run as run_program
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import run
from torch import fx
from tp_models import gpt

import fzero
from fzero import optim
from fzero.compile import step
from fzero.compile.judged import local_step
from fzero.errors import FzeroError, VerifyError
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.choose_strategies import cheapest, in_order
from fzero.shard.factors import Call
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules import Strategy, Unknown
from fzero.shard.sharding_problem import Chosen, ChosenStrategy, ShardingProblem
from fzero.shard.versions import Versions
from fzero.shard.write_local_graph import Sharded, write
from fzero.verify.sharding import check_sharding

R, P, S0, S1 = Replicated(), Partial(), Shard(0), Shard(1)


def proven(gm: fx.GraphModule, made: Sharded) -> None:
    """The judge accepts it, and n ranks compute what the graph does."""
    check_sharding(gm, made.gm, made.inputs, made.outputs, made.n, made.axis)
    inputs = feed(gm)
    for found, expected in zip(run(made, inputs), gm(*inputs), strict=True):
        assert float((found - expected).abs().max()) <= 1e-9 * max(float(expected.abs().max()), 1.0)


def product() -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    """relu(x @ w)."""
    draft = Draft()
    x, w = draft.input(4, 8, dtype=torch.float64), draft.input(8, 6, dtype=torch.float64)
    mm = draft.call(aten.mm.default, x, w)
    relu = draft.call(aten.relu.default, mm)
    return draft.returning(relu), mm, relu


BY_HAND: dict[str, tuple[Strategy, Placement, str]] = {  # how the product is computed, and relu, and the moves
    "inner": (Strategy((S1, S0), (P,)), R, "own_part all_reduce"),
    "inner, scattered": (Strategy((S1, S0), (P,)), S0, "own_part reduce_scatter all_gather"),
    "columns": (Strategy((R, S1), (S1,)), S1, "all_to_all all_gather"),
    "columns, then rows": (Strategy((R, S1), (S1,)), S0, "all_to_all all_to_all all_gather"),
    "rows": (Strategy((S0, R), (S0,)), S0, "own_part all_gather all_gather"),
    "whole": (Strategy((R, R), (R,)), R, "all_gather"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_chosen_is_written(name: str) -> None:
    """w lies by rows, x whole. The moves are those of the choices, no others, and so are the placements of calls."""
    gm, mm, relu = product()
    first, last, kinds = BY_HAND[name]
    chosen = {mm: ChosenStrategy(first), relu: ChosenStrategy(Strategy((last,), (last,)))}
    made = write(problem_of(gm, [R, S0], [R]), chosen)
    assert " ".join(move.kind for move in made.moves) == kinds
    calls = [node for node in made.gm.graph.nodes if node.target in (aten.mm.default, aten.relu.default)]
    shapes = [local_shape((4, 6), placement, 2) for placement in (first.outputs[0], last)]
    assert [tuple(node.meta["val"].shape) for node in calls] == shapes
    assert made.chosen == chosen
    proven(gm, made)


def test_a_strategy_that_the_rules_do_not_allow_is_refused_by_the_judge() -> None:
    gm, mm, relu = product()
    chosen = {mm: ChosenStrategy(Strategy((S1, S0), (R,))), relu: ChosenStrategy(Strategy((R,), (R,)))}
    made = write(problem_of(gm, [R, S0], [R]), chosen)
    with pytest.raises(VerifyError, match=r"^\[sharding\] mm"):
        check_sharding(gm, made.gm, made.inputs, made.outputs, made.n, made.axis)


def test_choices_that_nothing_can_be_written_of() -> None:
    """An op that was forgotten, and addends of a value that is whole."""
    gm, mm, relu = product()
    problem, whole = problem_of(gm, [R, R], [R]), ChosenStrategy(Strategy((R, R), (R,)))
    with pytest.raises(FzeroError, match=r"^relu_default : a chooser gave no strategy for this op"):
        write(problem, {mm: whole})
    with pytest.raises(FzeroError, match=r"^relu_default is to take mm_default as P, which lies as R"):
        write(problem, {mm: whole, relu: ChosenStrategy(Strategy((P,), (P,)))})


def test_groups_of_groups_are_known_to_the_judge() -> None:
    """Two pieces of a dim, each in two groups: the dim is in four, of which the judge knew two times four alone."""
    draft = Draft()
    x = draft.input(8, 8, dtype=torch.float64)
    pieces = draft.call(aten.split.Tensor, x, 4)
    gm = draft.returning(draft.call(operator.getitem, pieces, 0))
    chosen = {pieces: ChosenStrategy(Strategy((Shard(0, 4),), (Shard(0, 2), Shard(0, 2))))}
    proven(gm, write(problem_of(gm, [R], [R]), chosen))


# --- any chooser ------------------------------------------------------------------------------------------------------

Draw = Callable[[int], int]  # a number below another


def drawn_graph(draw: Draw) -> fx.GraphModule:
    """Some ops on two matrices, a vector and what comes of them."""
    draft = Draft()
    shapes = [(8, 8), (8, 8), (8,)]
    values = [draft.input(*shape, dtype=torch.float64) for shape in shapes]

    def of(*shape: int) -> fx.Node:
        fitting = [x for x in values if tuple(x.meta["val"].shape) == shape]
        return fitting[draw(len(fitting))] if fitting else draft.call(aten.sum.default, values[draw(len(values))])

    def picked() -> fx.Node:
        parts = draft.call(aten.split.Tensor, of(8, 8), 4, draw(2))
        both = [draft.call(operator.getitem, parts, i) for i in (1, 0)]
        return draft.call(aten.cat.default, both, draw(2)) if draw(2) else both[0]

    def pair() -> tuple[fx.Node, fx.Node]:
        return of(8, 8), (of(8, 8), of(8), of())[draw(3)]

    def seen(x: fx.Node, *shape: int) -> fx.Node:
        if not x.meta["val"].is_contiguous():
            x = draft.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return draft.call(aten.view.default, x, list(shape))

    table: list[Callable[[], fx.Node]] = [
        lambda: draft.call(aten.mm.default, of(8, 8), of(8, 8)),
        lambda: draft.call(aten.add.Tensor, *pair()),
        lambda: draft.call(aten.mul.Tensor, *pair()),
        lambda: draft.call(aten.mul.Tensor, of(8, 8), 0.5),
        lambda: draft.call(aten.relu.default, of(8, 8)),
        lambda: draft.call(aten.permute.default, of(8, 8), [1, 0]),
        lambda: seen(seen(of(8, 8), 8, 2, 4), 8, 8),
        lambda: seen(draft.call(aten.relu.default, seen(of(8, 8), 64)), 8, 8),
        lambda: draft.call(aten.sum.dim_IntList, of(8, 8), [draw(2)]),
        lambda: draft.call(aten.amax.default, of(8, 8), [draw(2)]),
        lambda: draft.call(aten.sum.default, of(8, 8)),
        lambda: draft.call(aten.add.Tensor, of(), of()),
        lambda: draft.call(aten._softmax.default, of(8, 8), draw(2), False),
        lambda: draft.call(ops.CONSTRAIN, of(8, 8), ("tp", "", "mp")[draw(3)], draw(3) - 1, 1 + draw(2)),
        picked,
    ]
    for _ in range(2 + draw(8)):
        values.append(table[draw(len(table))]())
    return draft.returning(*values[-3:])


def drawn_problem(draw: Draw) -> tuple[fx.GraphModule, ShardingProblem]:
    gm, n = drawn_graph(draw), 2

    def place(x: fx.Node) -> Placement:
        places: list[Placement] = [R, P, *(Shard(d, g) for d in range(x.meta["val"].ndim) for g in (1, 2))]
        fits = [p for p in places if not isinstance(p, Shard) or x.meta["val"].shape[p.dim] % (p.groups * n) == 0]
        return fits[draw(len(fits))]

    holders, results = fx_nodes.placeholders(gm.graph), fx_nodes.outputs(gm.graph)
    wanted = [R if isinstance(p, Partial) else p for p in map(place, results)]
    leaves = [i for i in range(len(holders)) if draw(2)]
    return gm, problem_of(gm, list(map(place, holders)), wanted, n, leaves, sequence=(None, S1)[draw(2)])


def feasible(versions: Versions, node: fx.Node) -> list[Strategy]:
    """What a call may be given where its operands lie."""
    try:
        allowed = versions.allowed(node)
    except Unknown:
        call = Call.of(node)
        return [Strategy((R,) * len(call.operands), (R,) * len(call.results))]
    return [strategy for strategy in allowed if versions.can_read(node, strategy)]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_the_cheapest_way_is_computes_the_graph(data: st.DataObject) -> None:
    """Refused it may be, as a leaf would move; but what is chosen and written is right."""
    gm, problem = drawn_problem(lambda below: data.draw(st.integers(0, below - 1)))
    try:
        chosen = cheapest(problem)
    except fzero.SpecError:
        return
    proven(gm, write(problem, chosen))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_chosen_computes_the_graph(data: st.DataObject) -> None:
    """Strategies drawn among those that the rules allow, however dear: every choice is a right one."""

    def draw(below: int) -> int:
        return int(data.draw(st.integers(0, below - 1)))

    def pick(versions: Versions, node: fx.Node) -> ChosenStrategy:
        open_to = feasible(versions, node)
        return ChosenStrategy(open_to[draw(len(open_to))])

    gm, problem = drawn_problem(draw)
    try:
        chosen = in_order(problem, pick)
    except fzero.SpecError:  # a constraint in unequal parts, heads cut through
        return
    proven(gm, write(problem, chosen))


def replicated(problem: ShardingProblem) -> Chosen:
    """A chooser made up: in regions all is computed whole, but what reads a leaf, which stays where it is."""
    if problem.ends is not None:  # the update sends nothing but small sums
        return cheapest(problem)

    def pick(versions: Versions, node: fx.Node) -> ChosenStrategy:
        def stays(strategy: Strategy) -> bool:
            pairs = versions.reads(node, strategy)
            return all(want in versions.have[x] for x, want in pairs if x in problem.leaves)

        staying = filter(stays, feasible(versions, node))
        return ChosenStrategy(min(staying, key=lambda s: sum(p != R for x, p in versions.reads(node, s))))

    return in_order(problem, pick)


def test_another_chooser_is_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step by a chooser that replicates all it may: it verifies, sends more, and ends with the right leaves."""
    model = gpt(layers=1)

    def trained(**given: object) -> tuple[dict[str, torch.Tensor], fzero.Lowered]:
        spec = fzero.Spec(loss=model.loss, optimizer=optim.sgd(0.1), **given)
        world = 2 if given else 1
        found = run_program(spec, model.params, model.batch, world=world, steps=2)
        return found.final, found.lowered

    expected, _ = trained()
    _, usual = trained(mesh={"tp": 2}, shard=model.rules)
    monkeypatch.setattr(step, "local_step", partial(local_step, choose=replicated))
    final, lowered = trained(mesh={"tp": 2}, shard=model.rules)
    assert usual.sharding is not None
    assert lowered.sharding is not None
    used, before = lowered.sharding.regions[0], usual.sharding.regions[0]
    assert used.sent_bytes > 1.5 * before.sent_bytes
    assert not any(move.is_leaf for move in used.moves if move.nbytes)
    whole = [sum(set(one.strategy.outputs) == {R} for one in each.chosen.values()) for each in (used, before)]
    assert whole[0] > whole[1]
    for path, leaf in expected.items():
        if leaf.ndim:
            assert float((final[path] - leaf).abs().max()) <= 1e-5 * float(leaf.abs().max()), path
