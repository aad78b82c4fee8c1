"""The chooser alone: on small graphs the strategy of each op, its cost and the runner-up's, counted by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from by_hand import Draft, aten, problem_of
from torch import fx

from fzero.errors import FzeroError, SpecError
from fzero.shard import ops
from fzero.shard.choose_strategies import cheapest, in_order
from fzero.shard.moves import NEVER
from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.rules import Strategy
from fzero.shard.sharding_problem import ChosenStrategy, ShardingProblem
from fzero.shard.strategy_cost import SCATTERED_UNASKED, TRANSFER, UNKNOWN_BYTES, Fetch

R, P, S0, S1 = Replicated(), Partial(), Shard(0), Shard(1)


def mlp(wanted: Placement = R) -> tuple[ShardingProblem, list[fx.Node]]:
    """A product cut by columns, one cut by rows, and what must see its sum, over two ranks."""
    draft = Draft()
    x, up, down = draft.input(4, 8), draft.input(8, 16), draft.input(16, 8)
    calls = [draft.call(aten.mm.default, x, up)]
    calls += [draft.call(aten.relu.default, calls[-1])]
    calls += [draft.call(aten.mm.default, calls[-1], down)]
    calls += [draft.call(aten.relu.default, calls[-1])]
    return problem_of(draft.returning(calls[-1]), [R, S1, S0], [wanted], leaves=(1, 2)), calls


def test_columns_then_rows() -> None:
    """Products where their leaves lie, one sum of 4 x 8 numbers. To cut x by rows instead, a leaf would move."""
    problem, (mm, relu, mm_1, relu_1) = mlp()
    chosen = cheapest(problem)
    share = 4 * 8 * 4 / 2
    assert chosen[mm] == ChosenStrategy(Strategy((R, S1), (S1,)), 0.0, chosen[mm].runner_up, NEVER)
    exchanged = 4 * 16 * 4 / 2 / 2 + TRANSFER  # half of what a rank holds
    assert chosen[relu] == ChosenStrategy(Strategy((S1,), (S1,)), 0.0, Strategy((S0,), (S0,)), exchanged)
    assert chosen[mm_1].strategy == Strategy((S1, S0), (P,))
    assert chosen[mm_1].cost == 0.0
    summed, scattered = 2 * share + TRANSFER, SCATTERED_UNASKED * share
    assert chosen[relu_1] == ChosenStrategy(Strategy((R,), (R,)), summed, Strategy((S0,), (S0,)), scattered)
    assert list(chosen) == [mm, relu, mm_1, relu_1]


def test_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = mlp()
    before = str(problem.graph)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a chooser writes a node")

    monkeypatch.setattr(fx.Graph, "create_node", refuse)
    assert len(cheapest(problem)) == 4
    assert str(problem.graph) == before


def test_the_cost_is_an_argument() -> None:
    """Where parts are wanted in the end, and a scatter is priced as what it sends, the last op is computed in parts."""
    problem, calls = mlp(wanted=S0)
    assert cheapest(problem)[calls[-1]].strategy.outputs == (R,)
    seen: list[Fetch] = []

    def sent(fetch: Fetch) -> float:
        seen.append(fetch)
        return float(fetch.value.nbytes) / (1 if fetch.want == R else 4)

    chosen = cheapest(problem, sent)[calls[-1]]
    assert (chosen.strategy.outputs, chosen.cost) == ((S0,), 4 * 8 * 4 / 4)
    assert {(P, R), (P, S0), (P, S1)} <= {(fetch.source, fetch.want) for fetch in seen}
    assert all(fetch.source != fetch.want for fetch in seen), "what is there is not priced"


def test_a_wish_decides_between_equals() -> None:
    """An addition of whole values costs a rank nothing either way; it is done where the output is wanted."""
    draft = Draft()
    x, y = draft.input(4, 8), draft.input(4, 8)
    total = draft.call(aten.add.Tensor, x, y)
    gm = draft.returning(total)
    in_parts = cheapest(problem_of(gm, [S0, R], [S0]))[total]
    assert (in_parts.strategy, in_parts.cost) == (Strategy((S0, S0), (S0,)), 0.0)
    gathered = 4 * 8 * 4 / 2
    assert in_parts.runner_up_cost == pytest.approx(gathered, abs=2 * TRANSFER)
    assert cheapest(problem_of(gm, [R, R], [R]))[total].strategy == Strategy((R, R), (R,))


def test_a_gather_is_shared_by_its_readers() -> None:
    """One reader along the dim that is cut takes other parts (an exchange); three gather, the first for a third."""
    gathered, exchanged = 8 * 4 * 6 * 4 / 2, 8 * 4 * 6 * 4 / 4
    for readers, first in ((1, (S1, exchanged + TRANSFER)), (3, (R, gathered / 3 + TRANSFER))):
        draft = Draft()
        x = draft.input(8, 4, 6)
        sums = [draft.call(aten.cumsum.default, x, 0) for _ in range(readers)]
        chosen = cheapest(problem_of(draft.returning(*sums), [S0], [R] * readers))
        found = [(chosen[node].strategy.inputs[0], chosen[node].cost) for node in sums]
        assert found == [first, *[(R, 0.0)] * (readers - 1)]


def test_a_leaf_that_would_have_to_move_is_refused() -> None:
    draft = Draft()
    w = draft.input(8, 8)
    view = draft.call(aten.view.default, w, [64])
    gm = draft.returning(draft.call(aten.cumsum.default, view, 0))
    names = {w: "params/w"}
    text = r"params/w lies as S0, and aten.cumsum.default  needs all of it: 256 bytes .*time\. Keep it whole"
    with pytest.raises(SpecError, match=text):
        cheapest(problem_of(gm, [S0], [R], leaves=(0,), names=names))
    assert cheapest(problem_of(gm, [S0], [R], names=names))  # no leaf: it is gathered


def test_another_dim_is_named_where_an_op_bears_it() -> None:
    draft = Draft()
    w = draft.input(8, 8)
    gm = draft.returning(draft.call(aten.cumsum.default, w, 0))
    with pytest.raises(SpecError, match=r"Cut another dim of it, or keep it whole"):
        cheapest(problem_of(gm, [S0], [R], leaves=(0,), names={w: "params/w"}))
    assert cheapest(problem_of(gm, [S1], [S1], leaves=(0,), names={w: "params/w"}))


@pytest.mark.parametrize("size", [16, 1024])
def test_an_op_of_which_nothing_is_known(size: int) -> None:
    """Gathered up to `UNKNOWN_BYTES`, and marked; refused above."""
    draft = Draft()
    x = draft.input(size, size)
    inverse = draft.call(aten.linalg_matrix_exp.default, x)
    gm = draft.returning(inverse)
    if size * size * 4 > UNKNOWN_BYTES:
        with pytest.raises(FzeroError, match="nothing is known of how it may be sharded"):
            cheapest(problem_of(gm, [S0], [R]))
        return
    assert cheapest(problem_of(gm, [S0], [R]))[inverse] == ChosenStrategy(Strategy((R,), (R,)), unknown=True)
    assert not cheapest(problem_of(gm, [R], [R]))[inverse].unknown, "nothing had to be gathered"


def test_what_the_user_places_and_results_of_several_are_not_chosen() -> None:
    draft = Draft()
    x = draft.input(4, 8)
    placed = draft.call(ops.CONSTRAIN, x, "tp", 0, 1)
    halves = draft.call(aten.split.Tensor, placed, 4, 1)
    first = draft.call(operator.getitem, halves, 0)
    last = draft.call(aten.relu.default, first)
    chosen = cheapest(problem_of(draft.returning(last), [R], [R]))
    assert list(chosen) == [halves, last]
    assert chosen[last].strategy == Strategy((S0,), (S0,))
    with pytest.raises(SpecError, match=r"^constrain : S0 on 3 ranks"):
        cheapest(problem_of(draft.graph.owning_module, [R], [R], n=3))


def test_in_order_shows_each_choice_what_those_before_it_leave() -> None:
    problem, (mm, relu, mm_1, relu_1) = mlp()
    lie: dict[fx.Node, list[Placement]] = {}

    def pick(versions: Any, node: fx.Node) -> ChosenStrategy:
        lie[node] = list(versions.have[node.args[0]])
        whole = [s for s in versions.allowed(node) if s.inputs[0] == R and node is not mm]
        return ChosenStrategy(whole[0] if whole else Strategy((R, S1), (S1,)))

    chosen = in_order(problem, pick)
    assert [chosen[node].strategy.outputs for node in (mm, relu, mm_1, relu_1)] == [(S1,), (R,), (R,), (R,)]
    assert lie == {mm: [R], relu: [S1], mm_1: [R], relu_1: [R]}


def test_costs_are_bytes() -> None:
    """In bf16 they are half."""
    costs = []
    for dtype in (torch.float32, torch.bfloat16):
        draft = Draft()
        x, w = draft.input(4, 16, dtype=dtype), draft.input(16, 8, dtype=dtype)
        y = draft.call(aten.relu.default, draft.call(aten.mm.default, x, w))
        costs.append(cheapest(problem_of(draft.returning(y), [S1, S0], [R]))[y].cost - TRANSFER)
    assert costs == [128.0, 64.0]


@pytest.mark.parametrize(("wanted", "strategy"), [(S0, S0), (R, S0), (S1, R)], ids=str)
def test_of_equals_the_one_in_parts_and_that_an_output_wants(wanted: Placement, strategy: Placement) -> None:
    """A value is there whole and by rows, so a copy costs nothing either way: not all ranks do the same work.

    Where the output is wanted by columns, whole is nearer: a rank takes its part of it.
    """
    draft = Draft()
    x = draft.input(8, 8, 8)
    readers = [draft.call(aten.cumsum.default, x, 0) for _ in range(5)]
    copy = draft.call(aten.relu.default, x)
    chosen = cheapest(problem_of(draft.returning(*readers, copy), [S0], [*[R] * 5, wanted]))
    assert chosen[readers[0]].strategy == Strategy((R,), (R,))
    assert (chosen[copy].strategy, chosen[copy].cost) == (Strategy((strategy,), (strategy,)), 0.0)


def test_the_way_to_where_an_output_wants_it_is_priced() -> None:
    draft = Draft()
    product = draft.call(aten.mm.default, draft.input(4, 8), draft.input(8, 8))
    gm = draft.returning(product)
    scattered = 4 * 8 * 4 / 2
    for wanted, cost in ((R, 0.0), (S0, scattered)):
        chosen = cheapest(problem_of(gm, [S1, S0], [wanted]))[product]
        assert (chosen.strategy, chosen.cost) == (Strategy((S1, S0), (P,)), cost)


def test_where_a_sum_passes() -> None:
    """Through a number, for one reader; not for two, and not through a product with a vector."""
    draft = Draft()
    one, two, three, vector = (*(draft.input(4, 8) for _ in range(3)), draft.input(8))
    passed = draft.call(aten.mul.Tensor, one, 0.5)
    shared = [draft.call(aten.mul.Tensor, two, 0.5) for _ in range(2)]
    scaled = draft.call(aten.mul.Tensor, three, vector)
    results = (passed, *shared, scaled)
    chosen = cheapest(problem_of(draft.returning(*results), [P, P, P, R], [R] * 4))
    assert [chosen[node].strategy.outputs for node in results] == [(P,), (R,), (R,), (R,)]


def test_a_view_of_what_is_whole_is_whole() -> None:
    draft = Draft()
    x = draft.input(8, 8, 8)
    sums = [draft.call(aten.cumsum.default, x, 0) for _ in range(5)]
    flat = draft.call(aten.view.default, x, [512])
    last = draft.call(aten.cumsum.default, flat, 0)
    chosen = cheapest(problem_of(draft.returning(*sums, last), [S0], [R] * 6))
    assert chosen[flat].strategy == Strategy((S0,), (S0,))
    assert (chosen[last].strategy, chosen[last].cost) == (Strategy((R,), (R,)), 0.0)


def told(problem: ShardingProblem) -> list[Fetch]:
    """What a cost function is told, where gathers are dear."""
    seen: list[Fetch] = []

    def cost(fetch: Fetch) -> float:
        seen.append(fetch)
        return 1e9 if fetch.want == R else 1.0

    cheapest(problem, cost)
    return seen


def test_what_a_cost_function_is_told() -> None:
    """Wishes of outputs, the sequence, numbers that can be drawn again, and how many are yet to read."""
    draft = Draft()
    x, y = draft.input(8, 8), draft.input(8, 8)
    gm = draft.returning(draft.call(aten.add.Tensor, x, y))
    wished = [f for f in told(problem_of(gm, [P, R], [S0])) if f.source == P]
    assert {(f.want, f.wished) for f in wished} == {(R, False), (S0, True), (S1, False)}
    along = [f for f in told(problem_of(gm, [P, R], [R], sequence=S1)) if f.source == P]
    assert {(f.want, f.along) for f in along} == {(R, False), (S0, False), (S1, True)}
    draft = Draft()
    x, row = draft.input(8, 8), draft.input(8)
    gm = draft.returning(draft.call(aten.add.Tensor, x, row))
    own = [f for f in told(problem_of(gm, [P, R], [R], sequence=S1)) if f.value.ndim == 1]
    assert {(f.want, f.along) for f in own} == {(S0, True)}, "a part of it is taken there, whatever its dim"

    draft = Draft()
    key = draft.input(2, dtype=torch.int64)
    numbers = draft.call(torch.ops.fzero.uniform.default, key, [8, 8], torch.float32, 0.0, 1.0)
    drawn = told(problem_of(draft.returning(draft.call(aten.relu.default, numbers)), [R], [R]))
    assert [f.drawn for f in drawn if f.want != R] == [True] * len(drawn) != []

    draft = Draft()
    x = draft.input(8, 8, 8)
    gm = draft.returning(*(draft.call(aten.cumsum.default, x, 0) for _ in range(3)))
    assert [f.readers for f in told(problem_of(gm, [S0], [R] * 3)) if f.want == R] == [3, 2, 1]


def test_a_number_is_added_to_a_sum_by_one_rank() -> None:
    draft = Draft()
    x, number = draft.input(8), draft.input()
    total = draft.call(aten.add.Tensor, x, number)
    assert cheapest(problem_of(draft.returning(total), [P, R], [R]))[total].strategy == Strategy((P, P), (P,))
