"""versions: the placements under which each value of a graph exists so far, and how it comes to exist under one more.

A chooser and the writer each go through a graph with `Versions` of their own, in the same order. So a chooser prices
what the writer will find, and no node is written to know it. A value is brought to a placement in one of these ways:

| way | where |
|---|---|
| nothing | it is there; it is kept for all who want it |
| computed again | a view of a value that is whole, and a part of numbers drawn from a key |
| moved | else, from where the fewest bytes travel; a sum is taken once, then its addends are gone |
| kept by the first rank alone | a number that all ranks have, where an addend is wanted |
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fzero.errors import FzeroError, SpecError
from fzero.ir import fx_nodes
from fzero.shard.claims import constrains, constraint
from fzero.shard.factors import Call
from fzero.shard.local_graph import AROUND
from fzero.shard.moves import VIEWS, Move, by_way_of_whole, check_heads, cutting_leaf, kind_of, wire_bytes
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules import Strategy, strategies
from fzero.shard.rules.whole import UNIFORM
from fzero.shard.sharding_problem import ShardingProblem

R = Replicated()
OUTPUT = "the output"  # the reader of a value that a graph returns


@dataclass(frozen=True, slots=True)
class Step:
    """What makes a value exist under one more placement: a move, or the strategy under which it is computed again.

    None: a number that all ranks have is kept by the first alone, for this reader.
    """

    value: fx.Node
    placement: Placement
    way: Move | Strategy | None


class Versions:
    """The placements of the values of a graph up to one of its nodes. Only the methods write the fields.

    have: of each value, the first made first. outputs: of the results of each call of which one was chosen.
    drawn: random numbers, and what is made of them element by element.
    """

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.have: dict[fx.Node, dict[Placement, None]] = {x: {p: None} for x, p in problem.given.items()}
        self.outputs: dict[fx.Node, tuple[Placement, ...]] = {}
        self.drawn: set[fx.Node] = set()
        self._operands: dict[fx.Node, tuple[fx.Node, ...]] = {}

    # --- what is asked

    def allowed(self, node: fx.Node) -> tuple[Strategy, ...]:
        """The strategies of a call, in the groups in which its operands lie. Raises `Unknown`."""
        groups = {p.groups for x in self.operands(node) for p in self.have[x] if isinstance(p, Shard)}
        return strategies(node, self.problem.n, sorted({1} | groups))

    def reads(self, node: fx.Node, strategy: Strategy | None) -> list[tuple[fx.Node, Placement]]:
        """The operands of a node with the placements that it takes them in. strategy: None where none is chosen.

        Raises SpecError where the user places a value in unequal parts.
        """
        if strategy is not None:
            return list(zip(self.operands(node), strategy.inputs, strict=True))
        return [(fx_nodes.operand(node), self._constraint(node))] if constrains(node, self.problem.axis) else []

    def can_read(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether the operands can be brought where a strategy takes them.

        Addends are not made of what has none, nor left of a sum that is taken for the same call.
        """
        pairs = self.reads(node, strategy)
        taken = {x for x, want in pairs if not isinstance(want, Partial)}
        sums = [(x, want) for x, want in pairs if isinstance(want, Partial)]
        return all(self.is_number(x, want) or (want in self.have[x] and x not in taken) for x, want in sums)

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The tensors that a call or a region reads, in the order of a strategy's inputs."""
        if node not in self._operands:
            region = self.problem.is_region(node)
            self._operands[node] = tuple(node.args[0]) if region else Call.of(node).operands  # type: ignore[arg-type]
        return self._operands[node]

    def as_they_lie(self, node: fx.Node) -> Strategy:
        """The strategy of a node that stands for a graph of its own: its inputs stay where they are; sums are taken."""
        assert self.problem.ends is not None
        here = [next(iter(self.have[x])) for x in self.operands(node)]
        inputs = tuple(R if isinstance(p, Partial) else p for p in here)
        return Strategy(inputs, tuple(self.problem.ends(node, inputs)))

    def is_number(self, x: fx.Node, want: Placement) -> bool:
        """Whether a number that every rank has may be made an addend: the first rank keeps it, the others have zero."""
        return want == Partial() and R in self.have[x] and not x.meta["val"].ndim

    def seen_whole(self, x: fx.Node) -> bool:
        """Whether a value is a view of one that is there as a whole."""
        return fx_nodes.is_view(x) and R in self.have.get(fx_nodes.operand(x), {})

    def source(self, x: fx.Node, want: Placement) -> Placement:
        """The placement from which another is reached with the fewest bytes; of equals the whole, then the first."""
        value, n = x.meta["val"], self.problem.n
        return min(self.have[x], key=lambda p: (wire_bytes(p, want, value, n), p != R))

    # --- what is done

    def follow(self, node: fx.Node, strategy: Strategy | None) -> None:
        """Goes past a node: its operands are brought, and its results are there."""
        for x, want in self.reads(node, strategy):
            for _ in self.bring(x, want, node):
                pass
        self.made(node, strategy)

    def made(self, node: fx.Node, strategy: Strategy | None) -> None:
        """Notes where the results of a node lie."""
        if node.target is operator.getitem:
            self.have[node] = {self.outputs[fx_nodes.operand(node)][result_index(node)]: None}
        elif strategy is None:
            self.have[node] = {self._constraint(node): None}
        else:
            self.outputs[node] = strategy.outputs
            if isinstance(node.meta["val"], torch.Tensor):
                self.have[node] = {strategy.outputs[0]: None}
            if self._is_drawn(node):
                self.drawn.add(node)

    def bring(self, x: fx.Node, want: Placement, reader: fx.Node | None = None) -> Iterator[Step]:
        """What makes a value exist under a placement, step by step; nothing where it does. reader: None for an output.

        A step is noted when the next is asked for.

        Raises SpecError where ranks would cut heads through, and FzeroError for addends of what is none.
        """
        have = self.have[x]
        if want in have:
            return
        if isinstance(want, Partial):
            self._check_addend(x, want, reader)
            yield Step(x, want, None)
            return
        if isinstance(want, Shard) and by_way_of_whole(self.source(x, want), want):
            yield from self.bring(x, R, reader)
        strategy = self._again(x, want)
        if strategy is not None:
            for operand, placement in self.reads(x, strategy):
                yield from self.bring(operand, placement, reader)
            yield Step(x, want, strategy)
        else:
            source = self.source(x, want)
            yield Step(x, want, self._move(x, source, want, reader))
            if isinstance(source, Partial):
                del have[source]  # the sum is taken once, for all who read later
        have[want] = None

    def _again(self, x: fx.Node, want: Placement) -> Strategy | None:
        """The strategy under which a value is computed again; None where it is moved."""
        if want == R:
            return Strategy((R,), (R,)) if self._viewed(x) else None
        if x not in self.drawn or R not in self.have[x]:
            return None
        part = next((s for s in strategies(x, self.problem.n) if s.outputs == (want,)), None)
        if part is None:
            self.drawn.discard(x)
        return part

    def _viewed(self, x: fx.Node) -> bool:
        """Whether what a value views is brought, once for all views of it, rather than the value."""
        if not fx_nodes.is_view(x) or x.target is operator.getitem or len(x.all_input_nodes) != 1:
            return False
        if x in self.problem.leaves or any(isinstance(p, Partial) for p in self.have[x]):
            return False
        return self.seen_whole(x) or bool(fx_nodes.operand(x).meta["val"].nbytes <= x.meta["val"].nbytes)

    def _move(self, x: fx.Node, source: Placement, want: Placement, reader: fx.Node | None) -> Move:
        problem, about = self.problem, reader or x
        move = Move(
            kind_of(source, want), x.name, source, want, wire_bytes(source, want, x.meta["val"], problem.n),
            str(about.meta.get("phase") or "forward"), OUTPUT if reader is None else reader.name,
            str(about.meta.get("source", "")), x in problem.leaves, x.meta["val"].dtype,
        )  # fmt: skip
        if reader is not None and isinstance(source, Shard) and reader.target in VIEWS and AROUND not in reader.meta:
            cut = {leaf for leaf in problem.leaves if R not in self.have[problem.leaf_of(leaf)]}
            if (leaf := cutting_leaf(x, source, self.have, cut, problem.n)) is not None:
                check_heads(x, source, reader, move, problem.n, problem.axis, problem.name_of(leaf))
        return move

    def _check_addend(self, x: fx.Node, want: Partial, reader: fx.Node | None) -> None:
        """Raises FzeroError where a value has no addends under `want`, and is no number that all ranks have."""
        if not self.is_number(x, want):
            lies = ", ".join(map(str, self.have[x]))
            raise FzeroError(
                f"{reader or OUTPUT} is to take {x.name} as {want}, which lies as {lies}: only a number that all "
                "ranks have becomes an addend. Choose a strategy that takes it whole or in parts"
            )

    def _constraint(self, node: fx.Node) -> Placement:
        want = constraint(node)
        try:
            local_shape(node.meta["val"].shape, want, self.problem.n)
        except SpecError as error:
            raise SpecError(f"constrain {node.meta.get('source', '')}: {error}") from None
        return want

    def _is_drawn(self, node: fx.Node) -> bool:
        """Whether a value is uniform numbers of one key, or made of such alone, element by element."""
        if str(node.target) == UNIFORM:
            return Call.of(node).ndim("key") == 1
        if not fx_nodes.is_pointwise(node):
            return False
        sources = [a for a in node.all_input_nodes if a.meta["val"].ndim]
        return bool(sources) and all(a in self.drawn for a in sources)


def result_index(node: fx.Node) -> int:
    """Which of the tensors that a call returns a `getitem` takes."""
    results = fx_nodes.operand(node).meta["val"]
    return [i for i, value in enumerate(results) if isinstance(value, torch.Tensor)].index(int(str(node.args[1])))
