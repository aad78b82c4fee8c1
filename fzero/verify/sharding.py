"""sharding: the graph of one rank is typed by the rules, and must compute the captured graph.

Every value of the local graph is a part of a global one: its *type* is (the global value, its placement). The writer of
a local graph claims a type for each value (`fzero.shard.claims`). Here no claim is believed:

- a call is a call of the global op under one of the strategies that the rules allow for the types of its operands,
  with the arguments that the rule says;
- a transfer, and the copies and views around it, bring the elements that both placements say (`element_ways`);
- a local form is the form of the rules;
- the results are what was captured, where the plan says.

So a sum that is missing or taken twice, a product of two addends, a value taken for whole that is none, and parts that
are joined along another dim are all refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensor, OpOverload
from fzero.errors import VerifyError
from fzero.ir import fx_nodes, fx_values
from fzero.shard.claims import Claim, claim_of, constrains, constraint
from fzero.shard.factors import Call
from fzero.shard.local_forms import traced
from fzero.shard.ops import ALL_REDUCE
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules import Strategy, Unknown, localised, strategies
from fzero.verify.element_ways import ElementWays, refusal, refuse

aten = torch.ops.aten
REDUCE = torch.ops.fzero.reduce.default
R = Replicated()
Inner = Callable[[fx.Node], tuple[Sequence[Placement], Sequence[Placement], bool]]


@dataclass(frozen=True)
class _Type:
    """What a local value is: a global value, and how it lies. of: None for the rank."""

    of: fx.Node | None
    placement: Placement


def check_sharding(
    whole: fx.GraphModule,
    local: fx.GraphModule,
    inputs: Sequence[Placement],
    outputs: Sequence[Placement],
    n: int,
    axis: str,
    inner: Inner | None = None,
) -> None:
    """Raises VerifyError unless `local`, run by n ranks, computes `whole`.

    inputs, outputs: how the values lie. Further placeholders of `local` are the rank. inner: of a node that stands for
    a graph of its own, how its inputs and outputs lie, and whether it takes the rank as one more input.
    """
    _Typing(whole, n, axis, inner).run(local, inputs, outputs)


class _Typing:
    """The walk over a local graph. `types` is what is proven of its values; only `run` and its helpers write it."""

    def __init__(self, whole: fx.GraphModule, n: int, axis: str, inner: Inner | None) -> None:
        self.whole, self.n, self.axis, self.inner = whole, n, axis, inner
        self.names = {node.name: node for node in whole.graph.nodes}
        self.types: dict[fx.Node, _Type] = {}
        self.ways = ElementWays(n, axis, self._is_rank)
        self.several: dict[fx.Node, tuple[fx.Node, tuple[Placement, ...]]] = {}  # calls with several results

    def run(self, local: fx.GraphModule, inputs: Sequence[Placement], outputs: Sequence[Placement]) -> None:
        globals_in = fx_nodes.placeholders(self.whole.graph)
        holders = fx_nodes.placeholders(local.graph)
        for node, x, placement in zip(holders, globals_in, inputs, strict=False):
            self._shaped(node, x, placement)
            self.types[node] = _Type(x, placement)
        for node in holders[len(globals_in) :]:
            self.types[node] = _Type(None, R)
        for node in local.graph.nodes:
            if node.op == "call_function":
                self._proven(node)
        wanted, results = fx_nodes.outputs(self.whole.graph), fx_nodes.outputs(local.graph)
        if len(results) != len(wanted):
            refuse(fx_nodes.output(local.graph), f"has {len(results)} values, the captured step {len(wanted)}")
        for node, x, placement in zip(results, wanted, outputs, strict=True):
            if isinstance(x, fx.Node):
                found = self.types.get(node)
                if found is None or found.of is not x or found.placement != placement:
                    refuse(node, f"is to be {x.name} as {placement}, and is {self._shown(node)}")

    # --- one node

    def _proven(self, node: fx.Node) -> None:
        """Proves the claim of a node. One that makes no sense (no such dim, no such result) is refused as well."""
        try:
            self._node(node)
        except VerifyError:
            raise
        except Exception as error:
            what = f"cannot be what is claimed, {claim_of(node)}: {type(error).__name__}: {error}"
            raise refusal(node, what) from error

    def _node(self, node: fx.Node) -> None:
        """Proves the claim of a node; a node without one is on the way to another that has."""
        if node.target is torch.ops.fzero.axis_index.default and node.args[0] == self.axis:
            self.types[node] = _Type(None, R)
            return
        if node.target is operator.getitem:
            self._picked(node)
            return
        claim = claim_of(node)
        if claim is None and isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            refuse(node, "writes into a value, and nothing is said of it")
        if claim is None or claim.kind == "move":
            self._sized(node)
        if claim is None:
            return
        x = self.names.get(claim.of)
        if x is None:
            refuse(node, f"is said to be {claim.of}, which is not in the captured step")
        proof: dict[str, Callable[[fx.Node, fx.Node, Claim], tuple[Placement, ...]]] = {
            "call": self._call, "move": self._moved, "form": self._form, "addend": self._addend, "region": self._region,
        }  # fmt: skip
        found = proof[claim.kind](node, x, claim)
        if isinstance(x.meta["val"], torch.Tensor):
            self._shaped(node, x, found[0])
            self.types[node] = _Type(x, found[0])
        else:
            self.several[node] = (x, found)

    def _picked(self, node: fx.Node) -> None:
        """One result of a call with several."""
        source, index = fx_nodes.operand(node), int(str(node.args[1]))
        if source not in self.several:
            return
        x, placements = self.several[source]
        position = [i for i, v in enumerate(x.meta["val"]) if isinstance(v, torch.Tensor)].index(index)
        pick = next((u for u in x.users if u.target is operator.getitem and u.args[1] == index), None)
        if pick is not None:
            self._shaped(node, pick, placements[position])
            self.types[node] = _Type(pick, placements[position])

    def _call(self, node: fx.Node, x: fx.Node, claim: Claim) -> tuple[Placement, ...]:
        """A call of the global op under a strategy that the rules allow."""
        operands = self._operands(node)
        given = self._given(node, x, operands)
        if constrains(x, self.axis):
            if node.target is not aten.alias.default or given != (constraint(x),):
                refuse(node, f"is to be {x.name} as {constraint(x)}, where the user wants it")
            return given
        allowed = [s for s in self._strategies(x, given, claim) if s.inputs == given and not s.local]
        if not allowed:
            lies = ", ".join(f"{a.name} {p}" for a, p in zip(Call.of(x).operands, given, strict=True))
            refuse(node, f"no rule lets {x.target} work on {lies}")
        for strategy in allowed:
            if strategy.outputs == claim.placements and self._same_call(node, x, strategy):
                return strategy.outputs
        refuse(node, f"is no part of {x.name} = {x.format_node()} on operands {', '.join(map(str, given))}")

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        found: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), found.append)
        return found

    def _given(self, node: fx.Node, x: fx.Node, operands: Sequence[fx.Node]) -> tuple[Placement, ...]:
        """The placements of a call's operands, which are the parts of those of the global call."""
        wanted = Call.of(x).operands
        types = [self._type(a) for a in operands]
        if len(types) != len(wanted):
            refuse(node, f"takes {len(types)} tensors, {x.name} takes {len(wanted)}")
        for a, found, want in zip(operands, types, wanted, strict=True):
            if found is None or found.of is not want:
                refuse(node, f"reads {self._shown(a)} where {x.name} reads {want.name}")
        return tuple(t.placement for t in types if t is not None)

    def _type(self, node: fx.Node) -> _Type | None:
        """The type of a value; a copy has that of what it copies."""
        while node not in self.types and node.target is aten.clone.default:
            node = fx_nodes.operand(node)
        return self.types.get(node)

    def _strategies(self, x: fx.Node, given: Sequence[Placement], claim: Claim) -> Sequence[Strategy]:
        """What the rules allow in the groups in which the operands lie; without the claim, in divisors of these too.

        A dim of several factors is in as many groups as the outer ones have elements, times those that were asked for.
        """
        call = Call.of(x)
        groups = {1} | {p.groups for p in given if isinstance(p, Shard)}
        try:
            found = strategies(x, self.n, sorted(groups))
            if any((s.inputs, s.outputs) == (given, claim.placements) for s in found):
                return found
            return strategies(x, self.n, sorted({d for g in groups for d in range(1, g + 1) if g % d == 0}))
        except Unknown:
            return [Strategy((R,) * len(call.operands), (R,) * len(call.results))]

    def _same_call(self, node: fx.Node, x: fx.Node, strategy: Strategy) -> bool:
        whole = all(isinstance(p, Replicated) for p in (*strategy.inputs, *strategy.outputs))
        wanted = (x.args, x.kwargs) if whole else localised(x, strategy, self.n)
        return node.target is x.target and _plain((node.args, node.kwargs)) == _plain(wanted)

    def _form(self, node: fx.Node, x: fx.Node, claim: Claim) -> tuple[Placement, ...]:
        """A result of a local form: the nodes that lead to it are those of the form."""
        call = fx_nodes.operand(x) if x.target is operator.getitem else x
        given = self._given(node, call, claim.given)
        rank = next(a for a in self.types if self.types[a].of is None)
        for strategy in self._strategies(call, given, claim):
            if (strategy.inputs, strategy.local, strategy.outputs) != (given, claim.form, claim.placements):
                continue
            args, kwargs = _on(claim.given, localised(call, strategy, self.n))
            _, results, same = traced(claim.form, args, kwargs, rank, self.n, self.axis)
            if _equal(results[claim.result], node, same):
                return (strategy.outputs[claim.result],)
        refuse(node, f"is no local form {claim.form!r} of {x.name} on {', '.join(map(str, given))}")

    def _addend(self, node: fx.Node, x: fx.Node, claim: Claim) -> tuple[Placement, ...]:
        """A number that all ranks have, kept by the first alone: with zeros of the others it is a sum."""
        value, mask, zero = node.args
        found = self._type(value) if isinstance(value, fx.Node) else None
        first = isinstance(mask, fx.Node) and mask.target is aten.ne.Scalar and mask.args[1] == 0
        rank = self.types.get(fx_nodes.operand(mask)) if isinstance(mask, fx.Node) and first else None
        if node.target is not aten.masked_fill.Scalar or zero != 0 or not rank or rank.of is not None:
            refuse(node, f"is to be {x.name} on the first rank, and zero on the others")
        if found != _Type(x, R):
            refuse(node, f"takes {self._shown(value)} for all of {x.name}")
        return (Partial(),)

    def _region(self, node: fx.Node, x: fx.Node, claim: Claim) -> tuple[Placement, ...]:
        """A node that stands for a graph of its own, which is checked by itself."""
        assert self.inner is not None
        inputs, outputs, reads_rank = self.inner(x)
        operands = self._operands(node)
        wanted: list[fx.Node] = list(x.args[0])  # type: ignore[arg-type]
        if len(operands) < len(wanted):
            refuse(node, f"reads {len(operands)} values, and {x.name} reads {len(wanted)}")
        for a, want, placement in zip(operands, wanted, inputs, strict=False):
            if self._type(a) != _Type(want, placement):
                refuse(node, f"reads {self._shown(a)} where it needs {want.name} as {placement}")
        rest = operands[len(wanted) :]
        if len(rest) != reads_rank or any(self.types.get(a) != _Type(None, R) for a in rest):
            refuse(node, f"reads {len(rest)} values beside those of {x.name}, and the rank {int(reads_rank)} times")
        if node.args[1:] != x.args[1:]:
            refuse(node, f"is not {x.format_node()}")
        return tuple(outputs)

    def _moved(self, node: fx.Node, x: fx.Node, claim: Claim) -> tuple[Placement, ...]:
        """A value brought to another placement."""
        (source,), (want,) = claim.given, claim.placements
        found = self.types.get(source)
        if found is None or found.of is not x:
            refuse(node, f"moves {self._shown(source)} as {x.name}")
        self.ways.check(node, x, source, found.placement, want)
        return (want,)

    def _is_rank(self, node: Any) -> bool:
        found = self.types.get(node)
        return found is not None and found.of is None

    # --- words

    def _shaped(self, node: fx.Node, x: fx.Node, placement: Placement) -> None:
        value, whole = node.meta["val"], x.meta["val"]
        if tuple(value.shape) != local_shape(whole.shape, placement, self.n) or value.dtype is not whole.dtype:
            refuse(node, f"has shape {list(value.shape)}: {x.name} as {placement} has another")

    def _sized(self, node: fx.Node) -> None:
        """A node that no rule speaks of has the shape that its arguments give: ways of elements go by it."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
        known = fx_values.tensors(node.meta["val"])
        mode = next((x.fake_mode for x in known if isinstance(x, FakeTensor)), None)
        with mode or nullcontext():  # what it makes needs no memory, and no device
            values = fx_values.tensors(node.target(*args, **kwargs))  # type: ignore[operator]
        for value, held in zip(values, known, strict=True):
            if value.shape != held.shape or value.dtype is not held.dtype:
                refuse(node, f"has shape {list(held.shape)}; by its arguments it has {list(value.shape)}")

    def _shown(self, node: Any) -> str:
        found = self._type(node) if isinstance(node, fx.Node) else None
        if found is None:
            return f"{node}, of which nothing is proven"
        return f"{found.of.name if found.of is not None else 'the rank'} as {found.placement}"


def _plain(value: Any) -> Any:
    """Arguments with every node as a mark, so that two calls on different nodes compare."""
    marked = fx.node.map_arg(value, lambda _: "a tensor")
    return fx.node.map_aggregate(marked, lambda a: tuple(a) if isinstance(a, (list, torch.Size)) else a)


def _on(given: Sequence[fx.Node], call: Any) -> Any:
    """Arguments with these nodes for the tensors in it, in order."""
    order = iter(given)
    return fx.node.map_arg(call, lambda _: next(order))


def _equal(a: Any, b: Any, same: dict[fx.Node, fx.Node]) -> bool:
    """Whether node `a` of one graph is node `b` of another, given what placeholders of the first are."""
    if a in same:
        return same[a] is b
    if not isinstance(b, fx.Node) or a.op != "call_function":
        return False
    mine, theirs = _flattened(a), _flattened(b)
    if _said(a) != _said(b) or len(mine) != len(theirs):
        return False
    if all(_equal(x, y, same) for x, y in zip(mine, theirs, strict=True)):
        same[a] = b
        return True
    return False


def _said(node: fx.Node) -> Any:
    """An op and its arguments. Behind the losses a sum over the axis is the op by which a user's step says it."""
    args = node.args
    if node.target is ALL_REDUCE:
        return ALL_REDUCE, args[1], args[3]
    if node.target is REDUCE:
        return ALL_REDUCE, args[2], args[1]
    return node.target, _plain((args, node.kwargs))


def _flattened(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found
