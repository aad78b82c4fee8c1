"""choose_strategies: a strategy for each op of a graph, by the bytes that its operands cost. Nothing is written.

Each op is given the strategy that costs least where its operands lie by then, one op after the other (`cheapest`); the
rules say which it may have (`fzero.shard.rules`). These choices carry the result (each was measured on real models):

1. A leaf never moves: its product is computed where the leaf lies.
2. A sum is taken once for all its readers, at the first that needs it whole.
3. A sum not yet taken passes through views, casts, additions and numbers alone, and not where several read it.
4. A bias is added after the sum of its product (`split_bias`). Sums are added to one another first (`join_sums`).
5. A gathered value is kept for all who want it.
6. A value that goes to an output is computed where the output is wanted, if that costs nothing more.

An op of which nothing is known is replicated if its operands are small, and refused otherwise.

Another chooser is another function `ShardingProblem -> Chosen`, an argument of `propagate`. `in_order` helps one that
decides op by op. Whatever it says, the writer writes, and `fzero.verify.sharding` judges.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import fx

from fzero.errors import FzeroError, SpecError
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.factors import Call
from fzero.shard.moves import NEVER, kind_of, wire_bytes
from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.rules import Strategy, Unknown
from fzero.shard.sharding_problem import CASTS, ChosenStrategy, ShardingProblem
from fzero.shard.strategy_cost import UNKNOWN_BYTES, Cost, Fetch, fewest_bytes
from fzero.shard.versions import Versions

aten = torch.ops.aten
R = Replicated()
Pick = Callable[[Versions, fx.Node], ChosenStrategy]
_SAME_SHAPE = {*CASTS, aten.add.Tensor, aten.clone.default, aten.mul.Tensor, aten.div.Tensor}


def cheapest(problem: ShardingProblem, cost: Cost = fewest_bytes) -> dict[fx.Node, ChosenStrategy]:
    """For each op the strategy that costs least; of equal ones the one that gives what an output wants, then the first.

    Raises SpecError where a leaf would have to move, where ranks would cut heads through and where a constraint has
    unequal parts, and FzeroError for an op of which nothing is known and whose operands are large.
    """
    return in_order(problem, _Cheapest(problem, cost, _wishes(problem)).pick)


def in_order(problem: ShardingProblem, pick: Pick) -> dict[fx.Node, ChosenStrategy]:
    """One choice after the other, each by what exists after those before it. Regions read their inputs as they lie."""
    versions, chosen = Versions(problem), dict[fx.Node, ChosenStrategy]()
    for node in problem.calls():
        if problem.is_region(node):
            chosen[node] = ChosenStrategy(versions.as_they_lie(node))
        elif problem.is_free(node):
            chosen[node] = pick(versions, node)
        versions.follow(node, chosen[node].strategy if node in chosen else None)
    return chosen


def _wishes(problem: ShardingProblem) -> dict[fx.Node, Shard]:
    """Where outputs are wanted, and what they are sums, casts and copies of."""
    wishes: dict[fx.Node, Shard] = {}
    todo = list(zip(fx_nodes.outputs(problem.graph), problem.wanted, strict=True))
    while todo:
        node, want = todo.pop()
        if not isinstance(node, fx.Node) or node in wishes or not isinstance(want, Shard):
            continue
        wishes[node] = want
        if node.target in _SAME_SHAPE:
            shape = node.meta["val"].shape
            todo += [(a, want) for a in node.all_input_nodes if a.meta["val"].shape == shape]
    return wishes


@dataclass(frozen=True)
class _Cheapest:
    """wishes: where values are wanted in the end."""

    problem: ShardingProblem
    cost: Cost
    wishes: dict[fx.Node, Shard] = field(default_factory=dict)

    def pick(self, versions: Versions, node: fx.Node) -> ChosenStrategy:
        """The strategy of a call that costs least, and the next."""
        operands = versions.operands(node)
        try:
            allowed = versions.allowed(node)
        except Unknown as error:
            return _whole(versions, node, error)
        wish = self.wishes.get(node)
        lie = {p for x in operands for p in versions.have[x] if isinstance(p, Shard)}
        ranked = []
        for number, strategy in enumerate(allowed):
            pairs = zip(operands, strategy.inputs, strict=True)
            cost = sum(self._operand(versions, x, want, strategy, lie) for x, want in pairs)
            unwished = wish is not None and strategy.outputs[0] != wish
            if wish is not None:
                cost += wire_bytes(strategy.outputs[0], wish, node.meta["val"], self.problem.n)
            idle = not any(isinstance(p, Shard) for p in strategy.inputs) and not unwished and bool(lie)
            ranked.append((cost, unwished, idle, number))
        (least, *_, first), *others = sorted(ranked)
        if least == NEVER:
            _refuse_leaf(versions, node)
        if not others:
            return ChosenStrategy(allowed[first], least)
        return ChosenStrategy(allowed[first], least, allowed[others[0][-1]], others[0][0])

    def _operand(
        self, versions: Versions, x: fx.Node, want: Placement, strategy: Strategy, lie: Set[Placement]
    ) -> float:
        """What it costs to bring an operand to a placement. lie: where the operands of the call are in parts."""
        have, problem = versions.have[x], self.problem
        if versions.is_number(x, want):
            return 0.0
        if isinstance(want, Partial):
            return 0.0 if want in have and len(x.users) == 1 and not strategy.costly else NEVER
        if want in have or (want == R and versions.seen_whole(x)):
            return 0.0
        source = versions.source(x, want)
        kind = kind_of(source, want)
        if x in problem.leaves and kind != "own_part":
            return NEVER
        along = problem.sequence is not None and strategy.outputs[0] == problem.sequence
        return self.cost(
            Fetch(
                x.meta["val"], source, want, problem.n, want in lie, self.wishes.get(x) == want,
                along and (kind == "own_part" or want == problem.sequence), x in versions.drawn,
                _readers(versions, x) if kind == "all_gather" else 1,
            )
        )  # fmt: skip


def _readers(versions: Versions, x: fx.Node) -> int:
    """How many calls yet to come read a value, or a view of it: they share what it is brought for."""
    while fx_nodes.is_view(x) and fx_nodes.operand(x) in versions.have:
        x = fx_nodes.operand(x)
    todo, found = [x], 0
    while todo:
        for user in todo.pop().users:
            if fx_nodes.is_view(user):
                todo.append(user)
            else:
                found += user not in versions.outputs
    return max(found, 1)


def _whole(versions: Versions, node: fx.Node, error: Unknown) -> ChosenStrategy:
    """Everything replicated, for an op of which nothing is known. Raises FzeroError if its operands are large."""
    sharded = [x for x in versions.operands(node) if R not in versions.have[x]]
    nbytes = sum(x.meta["val"].nbytes for x in sharded)
    if nbytes > UNKNOWN_BYTES:
        raise FzeroError(
            f"{node.target} {node.meta.get('source', '')}: nothing is known of how it may be sharded, and its "
            f"operands are {nbytes:,} bytes, too many to gather. Say how its dims belong together: "
            f"fzero.shard.rule(torch.ops.{node.target}, 'self:ij -> ij')"
        ) from error
    call = Call.of(node)
    return ChosenStrategy(Strategy((R,) * len(call.operands), (R,) * len(call.results)), unknown=bool(sharded))


def _refuse_leaf(versions: Versions, node: fx.Node) -> NoReturn:
    """Raises SpecError: an op could only be computed if a leaf moved."""
    problem = versions.problem
    x = next(x for x in versions.operands(node) if x in problem.leaves and R not in versions.have[x])
    what = f"shard: {problem.name_of(x)} lies as {next(iter(versions.have[problem.leaf_of(x)]))}"
    if node.target is ops.OWN_PART:
        reader = next(filter(None, (user.meta.get("source", "") for user in node.users)), "the step")
        raise SpecError(
            f"{what} over {problem.axis!r}, and {reader} needs it in parts of that dim over an "
            f"axis outside of it. Cut the dim over both, the outer axis first, as P(('tp', 'mp')), over the outer "
            "one alone, or keep it whole: P() before the rule that matches it"
        )
    place = versions.operands(node).index(x)
    elsewhere = any(isinstance(strategy.inputs[place], Shard) for strategy in versions.allowed(node))
    raise SpecError(
        f"{what}, and {node.target} "
        f"{node.meta.get('source', '')} needs all of it: {x.meta['val'].nbytes:,} bytes would travel each "
        f"time. {'Cut another dim of it, or keep' if elsewhere else 'Keep'} it whole: P() before the rule that "
        "matches it"
    )
