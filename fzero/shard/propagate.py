"""propagate: one walk over a captured graph that places every value on a mesh axis and writes each rank's graph.

A node is computed under one of the strategies that the rules allow (`fzero.shard.rules`): the one whose operands cost
the fewest bytes to bring there. What must be moved is moved by an op of `fzero.shard.ops`, at its first reader. These
choices carry the result (each was measured on real models):

1. A leaf never moves: its product is computed where the leaf lies.
2. A sum is taken once for all its readers, at the first that needs it whole.
3. A sum not yet taken passes through views, casts, additions and numbers alone, and not where several read it.
4. A bias is added after the sum of its product (`split_bias`).
5. A gathered value is kept for all who want it.
6. A value that goes to an output is computed where the output is wanted, if that costs nothing more.

The global graph stays what a step means: every value of the local graph is a global one's part, and `Sharded` says
which. An op of which nothing is known is replicated if its operands are small, and refused otherwise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import graph_module
from fzero.errors import FzeroError
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.claims import Claim, claim
from fzero.shard.factors import Call
from fzero.shard.local_forms import traced
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules import Strategy, Unknown, localised, strategies

aten = torch.ops.aten
R = Replicated()
SMALL_BYTES = 1 << 20  # operands of an unknown op that may be replicated
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, or a part taken. nbytes: what one rank sends. value, reader: names of global nodes."""

    kind: str
    value: str
    source: Placement
    target: Placement
    nbytes: float
    phase: str
    reader: str
    line: str
    is_leaf: bool

    @property
    def why(self) -> str:
        """The value, its placements, who reads it and where, in words."""
        return f"{self.phase} {self.value} {self.source} -> {self.target} for {self.reader} {self.line}".rstrip()

    def __str__(self) -> str:
        return f"{self.kind:14} {self.nbytes:12,.0f} bytes  {self.why}"


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
    gm: fx.GraphModule, placed: Sequence[Placement], wanted: Sequence[Placement], n: int, axis: str = "tp",
    leaves: Sequence[bool] | None = None, within: Callable[[fx.Node, list[Placement]], Inner] | None = None,
    sequence: Shard | None = None,
) -> Sharded:  # fmt: skip
    """The graph of one rank.

    placed: of each placeholder. wanted: of each output. leaves: which placeholders are leaves of the state, which never
    move (None: all that are sharded). within: for a graph with nodes `fzero::region`, what is inside of one whose
    inputs lie so. The rank is then no placeholder but a node `fzero::axis_index`. sequence: where sums of values with
    that many dims, and one more, are to lie rather than whole.

    Raises ValueError where n does not divide a dim, and FzeroError for an op of which nothing is known and whose
    operands are large.
    """
    holders = fx_nodes.placeholders(gm.graph)
    fixed = list(leaves) if leaves is not None else [isinstance(p, Shard) for p in placed]
    walk = _Walk(
        n, axis, dict(zip(holders, placed, strict=True)), {h for h, own in zip(holders, fixed, strict=True) if own},
        sequence,
    )  # fmt: skip
    walk.wish(fx_nodes.outputs(gm.graph), wanted)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            walk.place(node)
    device = holders[0].meta["val"].device if holders else torch.device("cpu")
    if within is None:
        walk.rank = walk.local.placeholder(f"rank_{axis}")
    else:
        walk.rank = walk.local.call_function(torch.ops.fzero.axis_index.default, (axis, device))
    walk.rank.meta["val"] = walk.fake(lambda: torch.zeros((), dtype=torch.int64, device=device))
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target) == "fzero.region.default" and within is not None:
            walk.region(node, within)
        elif node.op == "call_function":
            walk.call(node)
    results = [
        walk.at(x, want, "the output") if isinstance(x, fx.Node) else x
        for x, want in zip(fx_nodes.outputs(gm.graph), wanted, strict=True)
    ]
    walk.local.output(results)
    return Sharded(
        graph_module(walk.local), n, axis, tuple(placed), tuple(wanted), tuple(walk.moves), tuple(walk.replicated)
    )


@dataclass
class _Walk:
    """The walk. have: of each global value its local versions by placement. Only its methods write the fields."""

    n: int
    axis: str
    placed: Mapping[fx.Node, Placement]
    leaves: set[fx.Node]  # and views and casts of leaves
    sequence: Shard | None = None
    local: fx.Graph = field(default_factory=fx.Graph)
    have: dict[fx.Node, dict[Placement, fx.Node]] = field(default_factory=dict)
    wishes: dict[fx.Node, Placement] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    results: dict[fx.Node, tuple[fx.Node | list[fx.Node], Strategy]] = field(default_factory=dict)
    given: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # of each call, its local operands
    rank: fx.Node = field(init=False)
    mode: Any = None
    others: fx.Node | None = None  # whether this rank is another than the first
    why: str = ""  # of the transfer that is being written

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

    def fake(self, make: Callable[[], Any]) -> Any:
        """The result of a call on fake tensors."""
        with self.mode if self.mode is not None else torch.no_grad():
            return make()

    def place(self, node: fx.Node) -> None:
        """A placeholder, in its local shape."""
        value, placement = node.meta["val"], self.placed[node]
        self.mode = self.mode or getattr(value, "fake_mode", None)
        mine = self.local.placeholder(str(node.target))
        mine.meta = dict(node.meta)
        mine.meta["val"] = self.fake(lambda: _like(value, local_shape(value.shape, placement, self.n)))
        self.have[node] = {placement: mine}

    # --- choosing

    def call(self, node: fx.Node) -> None:
        """Writes one op: its operands where the chosen strategy wants them, the local call, the result's version."""
        if node.target is operator.getitem:
            self._getitem(node)
            return
        strategy = self._chosen(node)
        call = Call.of(node)
        given = [self.at(x, want, node.name, node) for x, want in zip(call.operands, strategy.inputs, strict=True)]
        order = iter(given)
        whole = all(isinstance(p, Replicated) for p in (*strategy.inputs, *strategy.outputs))
        args, kwargs = (node.args, node.kwargs) if whole else localised(node, strategy, self.n)
        tensors = set(call.operands)
        args, kwargs = fx.node.map_arg((args, kwargs), lambda x: next(order) if x in tensors else x)
        made = (
            self._form(node, strategy, args, kwargs) if strategy.local else self._node(node.target, args, kwargs, node)
        )
        self.results[node], self.given[node] = (made, strategy), given
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

    def region(self, node: fx.Node, within: Callable[[fx.Node, list[Placement]], Inner]) -> None:
        """Writes a node that stands for a graph of its own: its inputs stay where they are, but sums are taken."""
        inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        here = [next(iter(self.have[x])) for x in inputs]
        here = [R if isinstance(p, Partial) else p for p in here]
        given = [self.at(x, p, node.name, node) for x, p in zip(inputs, here, strict=True)]
        inner = within(node, here)
        args = ([*given, self.rank] if inner.reads_rank else given, *node.args[1:])
        target: Any = node.target
        made = self.local.call_function(target, args)
        made.meta = {**node.meta, "val": list(inner.values)}
        claim(made, Claim("region", node.name, inner.outputs))
        self.results[node] = made, Strategy(tuple(here), inner.outputs)

    def _getitem(self, node: fx.Node) -> None:
        source, index = fx_nodes.operand(node), int(str(node.args[1]))
        made, strategy = self.results[source]
        position = [i for i, v in enumerate(source.meta["val"]) if isinstance(v, torch.Tensor)].index(index)
        if isinstance(made, list):
            part = made[index]
            given = tuple(self.given[source])
            claim(part, Claim("form", node.name, strategy.outputs, given, strategy.local, position))
        else:
            part = self._node(operator.getitem, (made, index), {}, node)
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
            return found[0]  # a leaf moves: the caller sees it among the moves
        return found[best[-1]]

    def _whole(self, node: fx.Node, error: Unknown) -> Strategy:
        """Everything replicated, for an op of which nothing is known. Raises FzeroError if its operands are large."""
        call = Call.of(node)
        sharded = [x for x, v in zip(call.operands, call.values, strict=True) if R not in self.have[x]]
        nbytes = sum(x.meta["val"].nbytes for x in sharded)
        if nbytes > SMALL_BYTES:
            raise FzeroError(
                f"{node.target} {node.meta.get('source', '')}: nothing is known of how it may be sharded, and its "
                f"operands are {nbytes:,} bytes, too many to gather. Give a rule with fzero.shard.rule"
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
            if self.others is None:
                self.others = self._node(aten.ne.Scalar, (self.rank, 0), {}, self.rank)
            done = self._node(aten.masked_fill.Scalar, (versions[R], self.others, 0), {}, x)
            return claim(done, Claim("addend", x.name, (want,)))
        viewed = fx_nodes.is_view(x) and x.target is not operator.getitem and len(x.all_input_nodes) == 1
        if want == R and viewed and x not in self.leaves and not any(isinstance(p, Partial) for p in versions):
            base = self.at(fx_nodes.operand(x), R, reader, node)  # brought once, for all views of it
            seen = self._node(x.target, (base, *x.args[1:]), x.kwargs, x)
            versions[R] = claim(seen, Claim("call", x.name, (R,)))
            return versions[R]
        source = self._source(x, want)
        if isinstance(want, Shard) and _by_way_of_whole(source, want):
            self.at(x, R, reader, node)
            return self.at(x, want, reader, node)
        about = node or x
        move = Move(
            kind_of(source, want), x.name, source, want, wire_bytes(source, want, x.meta["val"], self.n),
            str(about.meta.get("phase") or "forward"), reader, str(about.meta.get("source", "")), x in self.leaves,
        )  # fmt: skip
        self.moves.append(move)
        self.why = move.why
        moved = self._moved(versions[source], source, want, x)
        moved = claim(moved, Claim("move", x.name, (want,), (versions[source],)))
        if isinstance(source, Partial):
            del versions[source]  # the sum is taken once, for all who read later
        versions[want] = moved
        return moved

    def _moved(self, mine: fx.Node, source: Placement, want: Placement, x: fx.Node) -> fx.Node:
        """Writes a transfer. The dims of its result lie in memory in the order that the global value has: views after
        it count on that."""
        if isinstance(source, Partial) and isinstance(want, Replicated):
            base = self._owned(mine, x)
            done = self._node(ops.ALL_REDUCE, (base, self.axis, self.n, source.how), {}, x)
            if base.meta["val"].shape != mine.meta["val"].shape:
                done = self._view(done, mine.meta["val"].shape, x)
        elif isinstance(source, Partial) and isinstance(want, Shard):
            shape = list(local_shape(mine.meta["val"].shape, want, self.n))
            done = self._node(ops.REDUCE_SCATTER, (self._parts(mine, want, x), self.axis, self.n, shape), {}, x)
        elif isinstance(source, Shard):
            if isinstance(want, Shard):
                target, given = ops.ALL_TO_ALL, self._parts(mine, want, x)
            else:
                target, given = ops.ALL_GATHER, self._owned(mine, x)
            done = self._joined(target, given, source, local_shape(mine.meta["val"].shape, want, self.n), x)
        elif isinstance(want, Shard):
            done = self._node(ops.OWN_PART, (mine, self.rank, self.n, want.dim, want.groups), {}, x)
        else:
            raise AssertionError(f"{source} is never brought to {want}")
        order = _memory_order(x.meta["val"])
        if order == sorted(order):
            return done
        back = sorted(range(len(order)), key=order.__getitem__)
        done = self._node(aten.permute.default, (done, order), {}, x)
        done = self._node(aten.clone.default, (done,), {"memory_format": torch.contiguous_format}, x)
        return self._node(aten.permute.default, (done, back), {}, x)

    def _owned(self, mine: fx.Node, x: fx.Node) -> fx.Node:
        """A contiguous value with memory of its own and the elements of `mine` in order: what a transfer reads."""
        while mine.target in _VIEWS and fx_nodes.operand(mine).meta["val"].is_contiguous():
            mine = fx_nodes.operand(mine)
        if mine.op == "call_function" and not fx_nodes.is_view(mine) and mine.meta["val"].is_contiguous():
            return mine
        return self._node(aten.clone.default, (mine,), {"memory_format": torch.contiguous_format}, x)

    def _view(self, mine: fx.Node, shape: Sequence[int], x: fx.Node) -> fx.Node:
        return self._node(aten.view.default, (mine, list(shape)), {}, x)

    def _parts(self, mine: fx.Node, want: Shard, x: fx.Node) -> fx.Node:
        """The value in the order of its parts: rank by rank, what each holds under `want`."""
        shape, dim, groups = mine.meta["val"].shape, want.dim, want.groups
        if _leads(shape, want):
            return self._owned(mine, x)
        cut = [*shape[:dim], groups, self.n, shape[dim] // (groups * self.n), *shape[dim + 1 :]]
        return self._ordered(self._view(mine, cut, x), [dim + 1, *(d for d in range(len(cut)) if d != dim + 1)], x)

    def _joined(self, target: Any, given: fx.Node, source: Shard, part: Sequence[int], x: fx.Node) -> fx.Node:
        """The result of a transfer: the parts of all ranks, each of shape `part`, joined along the dim of `source`."""
        dim, groups = source.dim, source.groups
        whole = [*part[:dim], part[dim] * self.n, *part[dim + 1 :]]
        if _leads(part, source):
            return self._node(target, (given, self.axis, self.n, whole), {}, x)
        cut = [self.n, *part[:dim], groups, part[dim] // groups, *part[dim + 1 :]]
        done = self._node(target, (given, self.axis, self.n, cut), {}, x)
        return self._view(self._ordered(done, [*range(1, dim + 2), 0, *range(dim + 2, len(cut))], x), whole, x)

    def _ordered(self, mine: fx.Node, order: Sequence[int], x: fx.Node) -> fx.Node:
        """A copy with its dims in another order."""
        moved = self._node(aten.permute.default, (mine, list(order)), {}, x)
        return self._node(aten.clone.default, (moved,), {"memory_format": torch.contiguous_format}, x)

    def _form(self, node: fx.Node, strategy: Strategy, args: Any, kwargs: Any) -> fx.Node | list[fx.Node]:
        """A local form, traced and written in the op's place: its result, or its results."""
        graph, results, env = traced(strategy.local, args, kwargs, self.rank, self.n, self.axis)
        for each in graph.nodes:
            if each.op == "call_function":
                a, k = fx.node.map_arg((each.args, each.kwargs), env.__getitem__)
                if each.target is ops.ALL_REDUCE:
                    self._inside(node, each)
                env[each] = self._node(each.target, a, k, node)
        return env[results[0]] if isinstance(node.meta["val"], torch.Tensor) else [env[x] for x in results]

    def _inside(self, node: fx.Node, transfer: fx.Node) -> None:
        """Notes a transfer within a local form."""
        value, how = transfer.meta["val"], str(transfer.args[3])
        nbytes = wire_bytes(Partial(how), R, value, self.n)
        phase, line = str(node.meta.get("phase") or "forward"), str(node.meta.get("source", ""))
        self.moves.append(Move("all_reduce", node.name, Partial(how), R, nbytes, phase, node.name, line, False))
        self.why = self.moves[-1].why

    def _node(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        """A node of the local graph, with its fake value. A view that local strides do not allow is made of a copy."""
        given = fx.node.map_arg((tuple(args), kwargs), lambda x: x.meta["val"])
        try:
            value = self.fake(lambda: target(*given[0], **given[1]))
        except (RuntimeError, ValueError):
            if target not in _VIEWS:
                raise
            first = self._node(aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format}, like)
            return self._node(target, (first, *args[1:]), kwargs, like)
        made = self.local.call_function(target, tuple(args), dict(kwargs))
        made.meta = {**like.meta, "val": value}
        if target in ops.TRANSFERS:
            made.meta["moved"] = self.why
        return made


_CASTS = {aten._to_copy.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_SAME_SHAPE = {aten.add.Tensor, aten._to_copy.default, aten.clone.default, aten.mul.Tensor, aten.div.Tensor}


def kind_of(source: Placement, want: Placement) -> str:
    """The transfer from one placement to another; "" where they are equal."""
    if source == want:
        return ""
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(want, Replicated) else "reduce_scatter"
    if isinstance(source, Replicated):
        return "own_part"
    return "all_gather" if isinstance(want, Replicated) else "all_to_all"


def _by_way_of_whole(source: Placement, want: Shard) -> bool:
    """Whether there is no transfer: a maximum has no reduce_scatter, and parts of one dim are not cut anew."""
    if isinstance(source, Partial):
        return source.how != "sum"
    return isinstance(source, Shard) and source.dim == want.dim


def wire_bytes(source: Placement, want: Placement, value: torch.Tensor, n: int) -> float:
    """What one rank sends to bring a global value from a placement to another; infinite where there is no way."""
    if isinstance(want, Partial):
        return 0.0 if source == want else NEVER
    share = (n - 1) / n * value.nbytes
    if isinstance(want, Shard) and source != want and _by_way_of_whole(source, want):
        return wire_bytes(source, R, value, n)
    return {"": 0.0, "own_part": 0.0, "all_reduce": 2 * share, "all_to_all": share / n}.get(
        kind_of(source, want), share
    )


def _leads(shape: Sequence[int], shard: Shard) -> bool:
    """Whether the parts of a value lie one after the other in memory: nothing lies outside of the dim that is cut."""
    return shard.groups == 1 and all(size == 1 for size in shape[: shard.dim])


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    strides = value.stride()
    return sorted(range(value.ndim), key=lambda d: (-strides[d], d))


def _like(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty tensor of a shape whose dims lie in memory in the order of another's."""
    order = _memory_order(value)
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.new_empty([shape[d] for d in order]).permute(back)


def split_bias(gm: fx.GraphModule, placed: Sequence[Placement]) -> None:
    """`addmm(bias, x, w)` whose sum over a sharded dim is not complete on a rank becomes `mm`, the view after it, and
    `+ bias`: the bias is added once, after the sum over ranks. In place."""
    place = dict(zip(fx_nodes.placeholders(gm.graph), placed, strict=True))
    for node in list(gm.graph.nodes):
        if node.target is not aten.addmm.default or node.kwargs:
            continue
        bias, x, w = node.args
        transposed, leaf = False, w
        while leaf.op == "call_function" and (fx_nodes.is_view(leaf) or leaf.target in _CASTS):
            transposed ^= leaf.target in (aten.t.default, aten.transpose.int, aten.permute.default)
            leaf = fx_nodes.operand(leaf)
        where = place.get(leaf)
        if not isinstance(where, Shard) or where.dim != int(transposed):
            continue
        users = list(node.users)
        view = users[0] if len(users) == 1 and users[0].target in _VIEWS else None
        last = view or node
        with gm.graph.inserting_before(last):
            product = gm.graph.call_function(aten.mm.default, (x, w))
            product.meta = dict(node.meta)
            whole = product
            if view is not None:
                whole = gm.graph.call_function(view.target, (product, *view.args[1:]))
                whole.meta = dict(view.meta)
            total = gm.graph.call_function(aten.add.Tensor, (whole, bias))
        total.meta = dict(last.meta)
        last.replace_all_uses_with(total)
        gm.graph.erase_node(last)
        if view is not None:
            gm.graph.erase_node(node)
    gm.recompile()
