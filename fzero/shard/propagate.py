"""propagate: one walk over a captured graph that places every value on a mesh axis and writes each rank's graph.

A node is computed under one of the strategies that the rules allow (`fzero.shard.rules`): the one whose operands cost
the fewest bytes to bring there. What must be moved is moved by an op of `fzero.shard.ops`, at its first reader. These
choices carry the result (each was measured on real models):

1. A leaf never moves: its product is computed where the leaf lies.
2. A sum is taken once for all its readers, at the first that needs it whole.
3. A sum not yet taken passes through views, casts, additions and numbers alone, and not where several read it.
4. A bias is added after the sum of its product (`split_bias`). Sums are added to one another first (`join_sums`).
5. A gathered value is kept for all who want it.
6. A value that goes to an output is computed where the output is wanted, if that costs nothing more.

The global graph stays what a step means: every value of the local graph is a global one's part, and `Sharded` says
which. An op of which nothing is known is replicated if its operands are small, and refused otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from fzero._torch_compat import graph_module
from fzero.errors import FzeroError, SpecError
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.claims import Claim, claim, constrains, constraint
from fzero.shard.factors import Call
from fzero.shard.local_graph import AROUND, LocalGraph
from fzero.shard.moves import NEVER, VIEWS, Move, by_way_of_whole, check_heads, cutting_leaf, kind_of, wire_bytes
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules import Strategy, Unknown, localised, strategies
from fzero.shard.rules.whole import UNIFORM

aten = torch.ops.aten
R = Replicated()
SMALL_BYTES = 1 << 20  # operands of an unknown op that may be replicated
OUTPUT = "the output"  # the reader of a value that a graph returns


@dataclass(frozen=True)
class Sharded:
    """A graph as each of n ranks of a mesh axis runs it.

    gm: the placeholders are the global graph's, in local shapes, then the rank on the axis (0-d int64). Views that a
    transfer went round are still there. inputs, outputs: the placements of the placeholders but the last, and of the
    outputs. moves: in order. replicated: what was computed whole because nothing is known of the op.
    """

    gm: fx.GraphModule
    n: int
    axis: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    moves: tuple[Move, ...]
    replicated: tuple[str, ...]

    @property
    def sent_bytes(self) -> float:
        """What one rank sends."""
        return sum(move.nbytes for move in self.moves)


@dataclass(frozen=True)
class Inner:
    """A graph within a graph, as a rank runs it: the placements and the values of its outputs. reads_rank: it takes the
    rank on the axis as one more input."""

    outputs: tuple[Placement, ...]
    values: tuple[torch.Tensor, ...]
    reads_rank: bool


def propagate(
    gm: fx.GraphModule, placed: Sequence[Placement], wanted: Sequence[Placement], n: int, axis: str,
    leaves: Sequence[bool] | None = None, within: Callable[[fx.Node, list[Placement]], Inner] | None = None,
    sequence: Shard | None = None, names: Sequence[str] = (),
) -> Sharded:  # fmt: skip
    """The graph of one rank.

    placed: of each placeholder. wanted: of each output. leaves: which placeholders are leaves of the state, which never
    move (None: all that are sharded). within: for a graph with nodes `fzero::region`, what is inside of one whose
    inputs lie so. The rank is then no placeholder but a node `fzero::axis_index`. sequence: where sums of values with
    that many dims, and one more, are to lie rather than whole. names: of the first placeholders, for errors.

    Raises SpecError where n does not divide a dim and where a leaf would have to move, and FzeroError for an op of
    which nothing is known and whose operands are large.
    """
    holders = fx_nodes.placeholders(gm.graph)
    fixed = list(leaves) if leaves is not None else [isinstance(p, Shard) for p in placed]
    local = LocalGraph(n, axis)
    have = {node: {p: local.placeholder(node, p)} for node, p in zip(holders, placed, strict=True)}
    device = holders[0].meta["val"].device if holders else torch.device("cpu")
    if within is None:
        local.rank = local.graph.placeholder(f"rank_{axis}")
    else:
        local.rank = local.graph.call_function(torch.ops.fzero.axis_index.default, (axis, device))
    local.rank.meta["val"] = local.fake(lambda: torch.zeros((), dtype=torch.int64, device=device))
    names_of = dict(zip(holders, names, strict=False))
    walk = _Walk(n, local, have, {h for h, own in zip(holders, fixed, strict=True) if own}, names_of, sequence)
    walk.wish(fx_nodes.outputs(gm.graph), wanted)
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target) == "fzero.region.default" and within is not None:
            walk.region(node, within)
        elif node.op == "call_function":
            walk.call(node)
    results = [
        walk.at(x, want, OUTPUT) if isinstance(x, fx.Node) else x
        for x, want in zip(fx_nodes.outputs(gm.graph), wanted, strict=True)
    ]
    local.graph.output(results)
    return Sharded(
        graph_module(local.graph), n, axis, tuple(placed), tuple(wanted), tuple(local.moves), tuple(walk.replicated)
    )


@dataclass
class _Walk:
    """The walk. have: of each global value its local versions by placement. Only its methods write the fields."""

    n: int
    local: LocalGraph
    have: dict[fx.Node, dict[Placement, fx.Node]]
    leaves: set[fx.Node]  # and views and casts of leaves
    names: Mapping[fx.Node, str]  # of leaves
    sequence: Shard | None = None
    wishes: dict[fx.Node, Placement] = field(default_factory=dict)
    replicated: list[str] = field(default_factory=list)
    results: dict[fx.Node, tuple[fx.Node | list[fx.Node], Strategy]] = field(default_factory=dict)
    given: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # of each call, its local operands
    drawn: set[fx.Node] = field(default_factory=set)  # random numbers, and what is made of them element by element

    def wish(self, outputs: Sequence[Any], wanted: Sequence[Placement]) -> None:
        """Notes where outputs are wanted, and what they are sums, casts and copies of."""
        todo = [(x, want) for x, want in zip(outputs, wanted, strict=True) if isinstance(x, fx.Node)]
        while todo:
            node, want = todo.pop()
            if node in self.wishes or not isinstance(want, Shard):
                continue
            self.wishes[node] = want
            if node.target in _SAME_SHAPE:
                shape = node.meta["val"].shape
                todo += [(a, want) for a in node.all_input_nodes if a.meta["val"].shape == shape]

    # --- choosing

    def call(self, node: fx.Node) -> None:
        """Writes one op: its operands where the chosen strategy wants them, the local call, the result's version."""
        self.local.phase = node.meta.get("phase")
        if node.target is operator.getitem:
            self._getitem(node)
            return
        if constrains(node, self.local.axis):
            self._constrain(node)
            return
        strategy = self._chosen(node)
        call = Call.of(node)
        given = [self.at(x, want, node.name, node) for x, want in zip(call.operands, strategy.inputs, strict=True)]
        if node.target in ops.TRANSFERS:
            given = [self.local.in_memory(x, node) for x in given]
        order = iter(given)
        whole = all(isinstance(p, Replicated) for p in (*strategy.inputs, *strategy.outputs))
        args, kwargs = (node.args, node.kwargs) if whole else localised(node, strategy, self.n)
        tensors = set(call.operands)
        args, kwargs = fx.node.map_arg((args, kwargs), lambda x: next(order) if x in tensors else x)
        made = self._made(node, strategy, args, kwargs)
        self.results[node], self.given[node] = (made, strategy), given
        if _is_drawn(node, self.drawn):
            self.drawn.add(node)
        if isinstance(made, fx.Node):
            kind = "form" if strategy.local else "call"
            claim(made, Claim(kind, node.name, strategy.outputs, tuple(given), strategy.local))
        if isinstance(made, fx.Node) and isinstance(node.meta["val"], torch.Tensor):
            self.have[node] = {strategy.outputs[0]: made}
        if (
            len(call.operands) == 1
            and call.operands[0] in self.leaves
            and (fx_nodes.is_view(node) or node.target in _CASTS)
        ):
            self.leaves.add(node)

    def _made(self, node: fx.Node, strategy: Strategy, args: Any, kwargs: Any) -> fx.Node | list[fx.Node]:
        """The local call of a node: its result, or the results of a form that has several."""
        if strategy.local:
            return self.local.form(node, strategy, args, kwargs)
        return self.local.node(node.target, args, kwargs, node)

    def region(self, node: fx.Node, within: Callable[[fx.Node, list[Placement]], Inner]) -> None:
        """Writes a node that stands for a graph of its own: its inputs stay where they are, but sums are taken."""
        inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        here = [next(iter(self.have[x])) for x in inputs]
        here = [R if isinstance(p, Partial) else p for p in here]
        given = [self.at(x, p, node.name, node) for x, p in zip(inputs, here, strict=True)]
        inner = within(node, here)
        args = ([*given, self.local.rank] if inner.reads_rank else given, *node.args[1:])
        target: Any = node.target
        made = self.local.graph.call_function(target, args)
        made.meta = {**node.meta, "val": list(inner.values)}
        claim(made, Claim("region", node.name, inner.outputs))
        self.results[node] = made, Strategy(tuple(here), inner.outputs)

    def _constrain(self, node: fx.Node) -> None:
        """A value that the user places. Raises SpecError where the ranks would get unequal parts."""
        want = constraint(node)
        try:
            local_shape(node.meta["val"].shape, want, self.n)
        except SpecError as error:
            raise SpecError(f"constrain {node.meta.get('source', '')}: {error}") from None
        given = self.at(fx_nodes.operand(node), want, node.name, node)
        self.have[node] = {want: claim(self.local.node(aten.alias.default, (given,), {}, node), _call(node, want))}

    def _getitem(self, node: fx.Node) -> None:
        source, index = fx_nodes.operand(node), int(str(node.args[1]))
        made, strategy = self.results[source]
        position = [i for i, v in enumerate(source.meta["val"]) if isinstance(v, torch.Tensor)].index(index)
        if isinstance(made, list):
            part = made[index]
            given = tuple(self.given[source])
            claim(part, Claim("form", node.name, strategy.outputs, given, strategy.local, position))
        else:
            part = self.local.node(operator.getitem, (made, index), {}, node)
        self.have[node] = {strategy.outputs[position]: part}

    def _chosen(self, node: fx.Node) -> Strategy:
        """The strategy that costs least; of equal ones the one that gives what is wished for, then the first."""
        operands = Call.of(node).operands
        groups = {p.groups for x in operands for p in self.have[x] if isinstance(p, Shard)}
        try:
            found = strategies(node, self.n, sorted({1} | groups))
        except Unknown as error:
            return self._whole(node, error)
        wish = self.wishes.get(node)
        now = {p for x in operands for p in self.have[x] if isinstance(p, Shard)}
        costs = []
        for number, strategy in enumerate(found):
            cost = sum(
                self._cost(node, x, want, strategy, now) for x, want in zip(operands, strategy.inputs, strict=True)
            )
            unwished = wish is not None and strategy.outputs[0] != wish
            if wish is not None:
                cost += wire_bytes(strategy.outputs[0], wish, node.meta["val"], self.n)
            idle = not any(isinstance(p, Shard) for p in strategy.inputs) and not unwished and bool(now)
            costs.append((cost, unwished, idle, number))
        best = min(costs)
        if best[0] == NEVER:
            self._refuse_leaf(node)
        return found[best[-1]]

    def _refuse_leaf(self, node: fx.Node) -> NoReturn:
        """Raises SpecError: an op could only be computed if a leaf moved."""
        x = next(x for x in Call.of(node).operands if x in self.leaves and R not in self.have[x])
        base = self._base(x)
        if node.target is ops.OWN_PART:
            reader = next(filter(None, (user.meta.get("source", "") for user in node.users)), "the step")
            raise SpecError(
                f"shard: {self.names.get(base, base.name)} lies as {next(iter(self.have[base]))} over "
                f"{self.local.axis!r}, and {reader} needs it in parts of that dim over an "
                f"axis outside of it. Cut the dim over both, the outer axis first, as P(('tp', 'mp')), over the outer "
                "one alone, or keep it whole: P() before the rule that matches it"
            )
        raise SpecError(
            f"shard: {self.names.get(base, base.name)} lies as {next(iter(self.have[base]))}, and {node.target} "
            f"{node.meta.get('source', '')} needs all of it: {x.meta['val'].nbytes:,} bytes would travel each "
            "time. Cut another dim of it, or keep it whole: P() before the rule that matches it"
        )

    def _base(self, x: fx.Node) -> fx.Node:
        """The leaf that a value is a view or a cast of."""
        while x not in self.names and x.op == "call_function":
            x = fx_nodes.operand(x)
        return x

    def _whole(self, node: fx.Node, error: Unknown) -> Strategy:
        """Everything replicated, for an op of which nothing is known. Raises FzeroError if its operands are large."""
        call = Call.of(node)
        sharded = [x for x, v in zip(call.operands, call.values, strict=True) if R not in self.have[x]]
        nbytes = sum(x.meta["val"].nbytes for x in sharded)
        if nbytes > SMALL_BYTES:
            raise FzeroError(
                f"{node.target} {node.meta.get('source', '')}: nothing is known of how it may be sharded, and its "
                f"operands are {nbytes:,} bytes, too many to gather. Say how its dims belong together: "
                f"fzero.shard.rule(torch.ops.{node.target}, 'self:ij -> ij')"
            ) from error
        if sharded:
            self.replicated.append(f"{node.target} {node.meta.get('source', '')}".rstrip())
        return Strategy((R,) * len(call.operands), (R,) * len(call.results))

    def _cost(self, node: fx.Node, x: fx.Node, want: Placement, strategy: Strategy, now: set[Shard]) -> float:
        """Bytes to bring an operand to a placement, with the penalties of the choices above."""
        versions = self.have[x]
        if isinstance(want, Partial):
            if want == Partial() and R in versions and not x.meta["val"].ndim:
                return 0.0  # a number that every rank has, added to sums: by the first rank alone
            several = len(x.users) > 1
            return NEVER if want not in versions or several or strategy.costly else 0.0
        if want in versions:
            return 0.0
        if want == R and self._seen_whole(x):
            return 0.0
        source = self._source(x, want)
        nbytes = wire_bytes(source, want, x.meta["val"], self.n)
        kind = kind_of(source, want)
        if x in self.leaves and kind != "own_part":
            return NEVER
        along = self.sequence is not None and strategy.outputs[0] == self.sequence
        if kind == "own_part" and x in self.drawn:
            return 0.0
        if kind == "own_part":
            return 0.0 if want in now or along else float(x.meta["val"].nbytes)  # nobody asked for it
        asked = want in now or self.wishes.get(x) == want or (along and want == self.sequence)
        if kind == "reduce_scatter" and not asked:
            return 3 * nbytes  # a gather will follow
        return (nbytes / self._readers(x) if kind == "all_gather" else nbytes) + 1e-3

    def _readers(self, x: fx.Node) -> int:
        """How many calls yet to be written read a value, or a view of it: they share what it is brought for."""
        while fx_nodes.is_view(x) and fx_nodes.operand(x) in self.have:
            x = fx_nodes.operand(x)
        todo, found = [x], 0
        while todo:
            for user in todo.pop().users:
                if fx_nodes.is_view(user):
                    todo.append(user)
                else:
                    found += user not in self.results
        return max(found, 1)

    def _seen_whole(self, x: fx.Node) -> bool:
        """Whether a value is a view of one that is there as a whole."""
        return fx_nodes.is_view(x) and R in self.have.get(fx_nodes.operand(x), {})

    def _source(self, x: fx.Node, want: Placement) -> Placement:
        """The version from which a placement is reached with the fewest bytes."""
        return min(self.have[x], key=lambda p: wire_bytes(p, want, x.meta["val"], self.n))

    # --- writing

    def at(self, x: fx.Node, want: Placement, reader: str, node: fx.Node | None = None) -> fx.Node:
        """The local node of a global value under a placement; moved once, for all who want it."""
        versions = self.have[x]
        if want in versions:
            return versions[want]
        if isinstance(want, Partial):
            return self.local.addend(versions[R], x)
        viewed = fx_nodes.is_view(x) and x.target is not operator.getitem and len(x.all_input_nodes) == 1
        once = viewed and (self._seen_whole(x) or fx_nodes.operand(x).meta["val"].nbytes <= x.meta["val"].nbytes)
        if want == R and once and x not in self.leaves and not any(isinstance(p, Partial) for p in versions):
            base = self.at(fx_nodes.operand(x), R, reader, node)  # brought once, for all views of it
            seen = self.local.node(x.target, (base, *x.args[1:]), x.kwargs, x)
            versions[R] = claim(seen, _call(x, R))
            return versions[R]
        if isinstance(want, Shard) and x in self.drawn and R in versions:
            versions[want] = self._drawn_part(x, want, reader, node)
            return versions[want]
        source = self._source(x, want)
        if isinstance(want, Shard) and by_way_of_whole(source, want):
            self.at(x, R, reader, node)
            return self.at(x, want, reader, node)
        about = node or x
        move = Move(
            kind_of(source, want), x.name, source, want, wire_bytes(source, want, x.meta["val"], self.n),
            str(about.meta.get("phase") or "forward"), reader, str(about.meta.get("source", "")), x in self.leaves,
            x.meta["val"].dtype,
        )  # fmt: skip
        if node is not None and isinstance(source, Shard) and node.target in VIEWS and AROUND not in node.meta:
            self._check_heads(x, source, node, move)
        moved = self.local.move(versions[source], move, x)
        if isinstance(source, Partial):
            del versions[source]  # the sum is taken once, for all who read later
        versions[want] = moved
        return moved

    def _check_heads(self, x: fx.Node, source: Shard, node: fx.Node, move: Move) -> None:
        cut = {leaf for leaf in self.leaves if R not in self.have[self._base(leaf)]}
        if (leaf := cutting_leaf(x, source, self.have, cut, self.n)) is not None:
            check_heads(x, source, node, move, self.n, self.local.axis, self.names.get(self._base(leaf), leaf.name))

    def _drawn_part(self, x: fx.Node, want: Shard, reader: str, node: fx.Node | None) -> fx.Node:
        """A part of numbers drawn from a key, or of what is made of them element by element: made again, alone."""
        strategy = next((s for s in strategies(x, self.n) if s.outputs == (want,)), None)
        if strategy is None:
            self.drawn.discard(x)
            return self.at(x, want, reader, node)
        operands = Call.of(x).operands
        given = [self.at(a, p, reader, node) for a, p in zip(operands, strategy.inputs, strict=True)]
        order = iter(given)
        args, kwargs = fx.node.map_arg(localised(x, strategy, self.n), lambda _: next(order))
        made = self._made(x, strategy, args, kwargs)
        assert isinstance(made, fx.Node)
        kind = "form" if strategy.local else "call"
        return claim(made, Claim(kind, x.name, strategy.outputs, tuple(given), strategy.local))


_CASTS = {aten._to_copy.default}
_SAME_SHAPE = {aten.add.Tensor, aten._to_copy.default, aten.clone.default, aten.mul.Tensor, aten.div.Tensor}


def _call(node: fx.Node, placement: Placement) -> Claim:
    return Claim("call", node.name, (placement,))


def _is_drawn(node: fx.Node, drawn: set[fx.Node]) -> bool:
    """Whether a value is uniform numbers of one key, or made of such alone, element by element."""
    if str(node.target) == UNIFORM:
        return Call.of(node).ndim("key") == 1
    sources = [a for a in node.all_input_nodes if a.meta["val"].ndim]
    return fx_nodes.is_pointwise(node) and bool(sources) and all(a in drawn for a in sources)
