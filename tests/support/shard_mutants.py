"""Local graphs broken in one place, for the checker of `fzero.verify.sharding`, and what a mutant means by running it.

`KINDS[kind](draft, rng)` breaks a draft in one place that is drawn, and says where; None if there is no such place.
The graph of all ranks is then run in lockstep: a mutant is *wrong* if it does not run, if an output changes, or if a
value is no longer what its claim says.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lockstep import evaluated
from torch import Tensor, fx

from fzero._torch_compat import graph_module
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.claims import Claim, claim, claim_of
from fzero.shard.placements import Partial, Placement, Replicated, Shard, join
from fzero.shard.write_local_graph import Sharded

aten = torch.ops.aten
R = Replicated()
VIEWS = {aten.view.default, aten._unsafe_view.default}
LAID = {*ops.TRANSFERS, *VIEWS, ops.OWN_PART, aten.permute.default}
FAR, NEAR = 1e-3, 1e-5  # of the largest: surely another value, surely the same
OTHERS: dict[Any, Any] = {
    aten.add.Tensor: aten.sub.Tensor, aten.sub.Tensor: aten.add.Tensor, aten.mul.Tensor: aten.div.Tensor,
    aten.div.Tensor: aten.mul.Tensor, aten.exp.default: aten.tanh.default, aten.amax.default: aten.amin.default,
    aten.ge.Scalar: aten.gt.Scalar, aten.lt.Scalar: aten.le.Scalar, aten.neg.default: aten.abs.default,
    aten.log.default: aten.exp.default, aten.bitwise_and.Tensor: aten.bitwise_or.Tensor,
    aten.bitwise_not.default: aten.clone.default, aten.eq.Scalar: aten.ne.Scalar, aten.ne.Scalar: aten.eq.Scalar,
    aten.silu.default: aten.gelu.default, aten.gelu.default: aten.silu.default, aten.rsqrt.default: aten.sqrt.default,
    aten.mm.default: aten.add.Tensor, aten.sum.dim_IntList: aten.mean.dim, aten.mean.dim: aten.sum.dim_IntList,
}  # fmt: skip


@dataclass
class Draft:
    """A copy of a local graph that may be broken. always: it is wrong, though running it does not show that."""

    made: Sharded
    whole: fx.GraphModule
    always: bool = False
    touched: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def of(made: Sharded, whole: fx.GraphModule) -> Draft:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in made.gm.graph.nodes:
            mine = env[node] = graph.node_copy(node, env.__getitem__)
            mine.meta = dict(node.meta)
            if (said := claim_of(node)) is not None:
                claim(mine, replace(said, given=tuple(env[x] for x in said.given)))
        return Draft(replace(made, gm=graph_module(graph)), whole)

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in self.made.gm.graph.nodes if node.op == "call_function"]

    def claimed(self, *kinds: str) -> list[tuple[fx.Node, Claim]]:
        found = [(node, claim_of(node)) for node in self.nodes]
        return [(node, said) for node, said in found if said is not None and said.kind in kinds]

    def put(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, with its fake value. Raises as the op does."""
        with self.made.gm.graph.inserting_before(before):
            node = self.made.gm.graph.call_function(target, args, kwargs)
        node.meta = {"val": _fake(node)}
        self.touched.append(node)
        return node

    def swap(self, old: fx.Node, new: fx.Node) -> None:
        """`new` for `old`, in all that come after it and in what claims say."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        for node, said in self.claimed("move", "form"):
            if old in said.given and node is not new:
                claim(node, replace(said, given=tuple(new if x is old else x for x in said.given)))
        self.touched += new.users

    def renew(self) -> None:
        """Fake values of all that lies behind what was touched, where there are any."""
        changed = set(self.touched)
        for node in self.nodes:
            if node in changed or any(x in changed for x in node.all_input_nodes):
                before = node.meta["val"]
                try:
                    node.meta["val"] = _fake(node)
                except Exception:  # it does not run
                    continue
                if _looks(before) != _looks(node.meta["val"]):
                    changed.add(node)


def _fake(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    mode = next((m for x in node.all_input_nodes if (m := getattr(x.meta["val"], "fake_mode", None))), None)
    with mode if mode is not None else torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    return tuple(_looks(x) for x in value) if isinstance(value, (tuple, list)) else value


def _alike(node: fx.Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


# --- kinds ------------------------------------------------------------------------------------------------------------

Change = Callable[[Draft, random.Random], fx.Node | None]
KINDS: dict[str, Change] = {}


def kind(change: Change) -> Change:
    KINDS[change.__name__.replace("_", " ")] = change
    return change


def drawn(rng: random.Random, found: Sequence[Any]) -> Any:
    return rng.choice(found) if found else None


def _sums(draft: Draft) -> list[fx.Node]:
    return [node for node in draft.nodes if node.target is ops.ALL_REDUCE]


def _by_move(draft: Draft, *sources: type) -> list[tuple[fx.Node, Claim]]:
    """What was moved from a placement of one of these classes."""
    found = []
    for node, said in draft.claimed("move"):
        before = claim_of(said.given[0])
        if before is not None and before.placements and isinstance(before.placements[0], sources):
            found.append((node, said))
    return found


@kind
def a_transfer_left_out(draft: Draft, rng: random.Random) -> fx.Node | None:
    node = drawn(rng, [x for x in draft.nodes if x.target in ops.TRANSFERS])
    if node is None:
        return None
    source, shape, n = fx_nodes.operand(node), list(node.meta["val"].shape), draft.made.n
    if not source.meta["val"].is_contiguous():
        source = draft.put(node, aten.clone.default, source, memory_format=torch.contiguous_format)
    flat = draft.put(node, aten.view.default, source, [-1])
    if node.target is ops.REDUCE_SCATTER:
        flat = draft.put(node, aten.slice.Tensor, flat, 0, 0, flat.meta["val"].numel() // n)
    elif node.target is ops.ALL_GATHER:
        flat = draft.put(node, aten.cat.default, [flat] * n)
    same = source.meta["val"].shape == node.meta["val"].shape
    stand = source if same and rng.random() < 0.5 else draft.put(node, aten.view.default, flat, shape)
    said = claim_of(node)
    if said is not None and stand is not source and rng.random() < 0.7:
        claim(stand, said)
    draft.swap(node, stand)
    return node


@kind
def a_transfer_taken_twice(draft: Draft, rng: random.Random) -> fx.Node | None:
    node = drawn(rng, _sums(draft))
    if node is None:
        return None
    said = claim_of(node)
    after = node.next
    again = draft.put(after, ops.ALL_REDUCE, node, *node.args[1:])
    if said is not None:
        given = said.given if rng.random() < 0.5 else (node,)
        claim(again, replace(said, given=given))
        if rng.random() < 0.5:
            node.meta["claim"] = None
    draft.swap(node, again)
    return again


@kind
def a_sum_of_what_every_rank_has(draft: Draft, rng: random.Random) -> fx.Node | None:
    whole = [(x, s) for x, s in draft.claimed("call", "move") if s.placements[0] == R and len(s.placements) == 1]
    node, said = drawn(rng, [(x, s) for x, s in whole if _alike(x) and x.meta["val"].is_floating_point()])
    again = draft.put(node.next, ops.ALL_REDUCE, node, draft.made.axis, draft.made.n, "sum")
    claim(again, Claim("move", said.of, (R,), (node,)))
    if rng.random() < 0.5:
        claim(node, replace(said, placements=(Partial(),)))
    draft.swap(node, again)
    return again


@kind
def another_placement_claimed(draft: Draft, rng: random.Random) -> fx.Node | None:
    node, said = drawn(rng, draft.claimed("call", "move", "form", "addend"))
    others: list[Placement] = [R, Partial(), Partial("max"), Shard(0), Shard(1), Shard(0, 2), Shard(2)]
    position = rng.randrange(len(said.placements))
    other = rng.choice([p for p in others if p != said.placements[position]])
    claim(node, replace(said, placements=(*said.placements[:position], other, *said.placements[position + 1 :])))
    return node


@kind
def an_addend_claimed_to_be_the_sum(draft: Draft, rng: random.Random) -> fx.Node | None:
    """Alone, or with its transfer removed."""
    found = drawn(rng, _by_move(draft, Partial))
    if found is None:
        return None
    moved, said = found
    (source,) = said.given
    before = claim_of(source)
    assert before is not None
    claim(source, replace(before, placements=(R, *before.placements[1:])))
    if rng.random() < 0.7:
        draft.swap(moved, source)
        moved.meta["claim"] = None
    return source


@kind
def a_product_of_addends(draft: Draft, rng: random.Random) -> fx.Node | None:
    products = {aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.div.Tensor}
    moved = {node: said.given[0] for node, said in _by_move(draft, Partial)}
    sites = [
        (node, x) for node, said in draft.claimed("call") if node.target in products and said.placements == (R,)
        for x in node.all_input_nodes if x in moved
    ]  # fmt: skip
    found = drawn(rng, sites)
    if found is None:
        return None
    node, x = found
    said = claim_of(node)
    assert said is not None
    rank = fx_nodes.placeholders(draft.made.gm.graph)[-1]
    others = [y for y in node.all_input_nodes if y is not x]
    node.replace_input_with(x, moved[x])
    for y in others:
        mask = draft.put(node, aten.ne.Scalar, rank, 0)
        first = draft.put(node, aten.masked_fill.Scalar, y, mask, 0)
        before = claim_of(y)
        if before is not None:
            claim(first, Claim("addend", before.of, (Partial(),)))
        node.replace_input_with(y, first)
    claim(node, replace(said, placements=(Partial(),)))
    draft.touched.append(node)
    total = draft.put(node.next, ops.ALL_REDUCE, node, draft.made.axis, draft.made.n, "sum")
    claim(total, Claim("move", said.of, (R,), (node,)))
    draft.swap(node, total)
    return node


def _perturbed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([v for v in (value + 1, value - 1, value * 2, value // 2, -value) if v != value] or [1])
    return value * 1.5 + 0.25


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the numbers of (args, kwargs) are."""
    if isinstance(value, (tuple, list)):
        return [p for i, x in enumerate(value) for p in _places(x, (*at, i))]
    if isinstance(value, dict):
        return [p for k, x in value.items() for p in _places(x, (*at, k))]
    return [at] if isinstance(value, (bool, int, float)) else []


def _changed(value: Any, at: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not at:
        return change(value)
    if isinstance(value, dict):
        return {k: _changed(x, at[1:], change) if k == at[0] else x for k, x in value.items()}
    return type(value)(_changed(x, at[1:], change) if i == at[0] else x for i, x in enumerate(value))


def _argument(draft: Draft, rng: random.Random, nodes: Sequence[fx.Node]) -> fx.Node | None:
    """One number among a node's arguments becomes another; or two of a list trade places."""
    node = drawn(rng, [x for x in nodes if _places((x.args, dict(x.kwargs)))])
    if node is None:
        return None
    args: Any = (tuple(node.args), dict(node.kwargs))
    at = rng.choice(_places(args))
    lists = [i for i, x in enumerate(node.args) if isinstance(x, (list, tuple)) and len(set(map(str, x))) > 1]
    if lists and rng.random() < 0.6:
        i = rng.choice(lists)
        row: list[Any] = list(node.args[i])  # type: ignore[arg-type]
        a, b = rng.sample(range(len(row)), 2)
        row[a], row[b] = row[b], row[a]
        args = ((*node.args[:i], row, *node.args[i + 1 :]), args[1])
    else:
        args = _changed(args, at, lambda v: _perturbed(v, rng))
    node.args, node.kwargs = args
    draft.touched.append(node)
    return node


@kind
def another_layout_of_a_transfer(draft: Draft, rng: random.Random) -> fx.Node | None:
    """Dims, groups and shapes of transfers, of parts taken, and of views around them."""
    return _argument(draft, rng, [x for x in draft.nodes if _laid(x)])


def _laid(node: fx.Node) -> bool:
    said = claim_of(node)
    return node.target in LAID and (said is None or said.kind == "move")


@kind
def another_reduction(draft: Draft, rng: random.Random) -> fx.Node | None:
    node = drawn(rng, _sums(draft))
    if node is not None:
        node.update_arg(3, "sum" if node.args[3] == "max" else "max")
        draft.touched.append(node)
    return node  # type: ignore[no-any-return]


@kind
def another_axis(draft: Draft, rng: random.Random) -> fx.Node | None:
    node = drawn(rng, [x for x in draft.nodes if x.target in ops.TRANSFERS])
    if node is None:
        return None
    where, value = rng.choice([(1, "dp"), (1, "pp"), (2, 2 * draft.made.n), (2, 1)])
    node.update_arg(where, value)
    draft.always = True
    return node  # type: ignore[no-any-return]


@kind
def two_operands_trade_places(draft: Draft, rng: random.Random) -> fx.Node | None:
    sites = []
    either = {aten.add.Tensor, aten.mul.Tensor} if rng.random() < 0.9 else set()  # in which places say nothing
    for node in draft.nodes:
        if node.target in either:
            continue
        found = [x for x in node.args if isinstance(x, fx.Node)]
        sites += [(node, a, b) for a in found for b in found if a is not b and _alike(a) and _alike(a) == _alike(b)]
    if not sites:
        return None
    node, a, b = rng.choice(sites)
    node.args = tuple({a: b, b: a}.get(x, x) if isinstance(x, fx.Node) else x for x in node.args)
    draft.touched.append(node)
    return node


@kind
def another_value_read(draft: Draft, rng: random.Random) -> fx.Node | None:
    """One of the same shape."""
    node = drawn(rng, [x for x in draft.nodes if x.all_input_nodes])
    x = rng.choice(node.all_input_nodes)
    earlier = []
    for other in draft.made.gm.graph.nodes:
        if other is node:
            break
        if other is not x and _alike(other) is not None and _alike(other) == _alike(x):
            earlier.append(other)
    if not earlier:
        return None
    node.replace_input_with(x, rng.choice(earlier))
    draft.touched.append(node)
    return node  # type: ignore[no-any-return]


@kind
def the_source_of_a_transfer_read(draft: Draft, rng: random.Random) -> fx.Node | None:
    """The value before it was moved, by one reader."""
    found = [(x, s.given[0]) for x, s in draft.claimed("move") if x.users and _alike(x) == _alike(s.given[0])]
    if not found:
        return None
    moved, source = rng.choice(found)
    user = rng.choice(list(moved.users))
    user.replace_input_with(moved, source)
    draft.touched.append(user)
    return user


@kind
def another_argument_of_a_call(draft: Draft, rng: random.Random) -> fx.Node | None:
    return _argument(draft, rng, [x for x, _ in draft.claimed("call")])


@kind
def another_op(draft: Draft, rng: random.Random) -> fx.Node | None:
    node = drawn(rng, [x for x in draft.nodes if x.target in OTHERS])
    node.target = OTHERS[node.target]
    draft.touched.append(node)
    return node  # type: ignore[no-any-return]


@kind
def an_addend_of_every_rank(draft: Draft, rng: random.Random) -> fx.Node | None:
    """What the first rank alone is to add is added by all, by the second, or by all but the first."""
    found = drawn(rng, draft.claimed("addend"))
    if found is None:
        return None
    node, said = found
    value, mask, _ = node.args
    way = rng.randrange(5)
    if way == 0:
        draft.swap(node, value)
    elif way == 1:
        copy = claim(draft.put(node, aten.clone.default, value), said)
        draft.swap(node, copy)
    elif way == 2:
        mask.update_arg(1, 1)
        draft.touched.append(mask)
    elif way == 3:
        mask.target = aten.eq.Scalar
        draft.touched.append(mask)
    else:
        node.update_arg(2, 1)
        draft.touched.append(node)
    return node  # type: ignore[no-any-return]


@kind
def another_result(draft: Draft, rng: random.Random) -> fx.Node | None:
    """Of a call, or of a form, with several."""
    found = [x for x in draft.nodes if x.target is operator.getitem]
    forms = [x for x, s in draft.claimed("form")]
    if not found and not forms:
        return None
    node = rng.choice([*found, *forms])
    if node.target is operator.getitem:
        count = len(fx_nodes.operand(node).meta["val"])
        node.update_arg(1, rng.choice([i for i in range(count + 1) if i != node.args[1]]))
        draft.touched.append(node)
    else:
        said = claim_of(node)
        assert said is not None
        claim(node, replace(said, result=1 - said.result))
    return node


@kind
def a_form_altered(draft: Draft, rng: random.Random) -> fx.Node | None:
    def within(node: fx.Node) -> bool:
        said = claim_of(node)
        return said.kind == "form" if said is not None else node.target not in LAID

    nodes = [x for x in draft.nodes if within(x) and x.target not in (operator.getitem, aten.clone.default)]
    if not nodes:
        return None
    way = rng.randrange(3)
    others = [x for x in nodes if x.target in OTHERS]
    if way == 0 and others:
        node = rng.choice(others)
        node.target = OTHERS[node.target]
        draft.touched.append(node)
        return node
    if way == 1:
        return _argument(draft, rng, nodes)
    node = rng.choice([x for x in nodes if x.all_input_nodes])
    x = rng.choice(node.all_input_nodes)
    alike = [y for y in nodes if y is not node and y is not x and _alike(y) == _alike(x)]
    earlier = [y for y in alike if y < node]
    if not earlier:
        return _argument(draft, rng, nodes)
    node.replace_input_with(x, rng.choice(earlier))
    draft.touched.append(node)
    return node


@kind
def another_name_claimed(draft: Draft, rng: random.Random) -> fx.Node | None:
    node, said = drawn(rng, draft.claimed("call", "move", "form", "addend"))
    names = {x.name: x for x in draft.whole.graph.nodes}
    others = [x.name for x in names.values() if x.name != said.of and _alike(x) == _alike(names[said.of])]
    if not others:
        return None
    claim(node, replace(said, of=rng.choice(others)))
    return node  # type: ignore[no-any-return]


@kind
def another_claim(draft: Draft, rng: random.Random) -> fx.Node | None:
    """Its kind, its form, what it is given, or its name: what may not be so, and what cannot."""
    node, said = drawn(rng, draft.claimed("call", "move", "form", "addend"))
    earlier = [x for x in draft.made.gm.graph.nodes if x < node]
    changes = [
        replace(said, kind=rng.choice(["call", "move", "form", "addend", "region"])),
        replace(said, form=rng.choice(["mean", "log_softmax", "embedding", "none", ""])),
        replace(said, given=tuple(rng.sample(earlier, min(len(earlier), rng.randrange(4))))),
        replace(said, of="nothing"),
        replace(said, placements=()),
        replace(said, placements=(*said.placements, R)),
        replace(said, result=rng.choice([-1, 1, 2, 7])),
    ]
    claim(node, rng.choice(changes))
    return node  # type: ignore[no-any-return]


@kind
def two_outputs_trade_places(draft: Draft, rng: random.Random) -> fx.Node | None:
    node = fx_nodes.output(draft.made.gm.graph)
    found: list[Any] = list(fx_nodes.outputs(draft.made.gm.graph))
    pairs = [(i, j) for i, x in enumerate(found) for j, y in enumerate(found) if x is not y and _alike(x) == _alike(y)]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    found[i], found[j] = found[j], found[i]
    node.args = (tuple(found) if rng.random() < 0.8 else tuple(found[:-1]),)
    return node


# --- what a mutant means ----------------------------------------------------------------------------------------------


class Meaning:
    """The values of a captured graph and of the graph of its ranks, with which mutants are compared."""

    def __init__(self, whole: fx.GraphModule, made: Sharded, inputs: list[Tensor]) -> None:
        self.made, self.inputs = made, inputs
        self.globals = evaluated_whole(whole, inputs)
        self.base = evaluated(made, inputs)
        self.named = {node.name: node for node in made.gm.graph.nodes}
        self.outputs = self._outputs(made, self.base)
        self.largest = max(float(x.abs().max()) for x in self.outputs if x.is_floating_point() and x.numel())
        self.known = {name for name, far in self._far(made, self.base).items() if far <= NEAR}

    def wrong(self, draft: Draft) -> str:
        """Why a mutant is wrong; "" where it is not, or only by rounding."""
        if draft.always:
            return "always"
        made = draft.made
        try:
            env = evaluated(made, self.inputs, self._kept(draft))
            outputs = self._outputs(made, env)
        except Exception as error:  # any: that it does not run is enough
            return f"does not run: {type(error).__name__}"
        for mine, other in zip(outputs, self.outputs, strict=True):
            if _gap(mine, other, 1e-5 * self.largest) > FAR:
                return "another output"
        for name, far in self._far(made, env).items():
            if name in self.known and far > FAR:
                return f"{name} is not what is claimed"
        return ""

    def _kept(self, draft: Draft) -> dict[fx.Node, list[Any]]:
        """The values that the mutant has not changed."""
        kept: dict[fx.Node, list[Any]] = {}
        touched = set(draft.touched)
        for node in draft.made.gm.graph.nodes:
            before = self.named.get(node.name)
            if before is None or node in touched or node.op == "output" or before.target is not node.target:
                continue
            if [x.name for x in node.all_input_nodes] == [x.name for x in before.all_input_nodes] and all(
                x in kept for x in node.all_input_nodes
            ):
                kept[node] = self.base[before]
        return kept

    def _outputs(self, made: Sharded, env: dict[fx.Node, list[Any]]) -> list[Tensor]:
        results = []
        for x, placement in zip(fx_nodes.outputs(made.gm.graph), made.outputs, strict=True):
            parts = env[x]
            if isinstance(placement, Replicated):
                assert all(torch.equal(parts[0], part) for part in parts), x
            results.append(join(parts, placement))
        return results

    def _far(self, made: Sharded, env: dict[fx.Node, list[Any]]) -> dict[str, float]:
        """By node, how far the value is from what is claimed."""
        found = {}
        for node in made.gm.graph.nodes:
            said = claim_of(node)
            whole = self.globals.get(said.of) if said is not None else None
            if said is None or not isinstance(whole, Tensor) or len(said.placements) != 1 or node.op == "placeholder":
                continue
            try:
                parts, placement = env[node], said.placements[0]
                gaps = [_gap(join(parts, placement), whole, 1e-6)]
                if isinstance(placement, Replicated):
                    gaps += [_gap(part, whole, 1e-6) for part in parts]
                found[node.name] = max(gaps)
            except Exception:  # no such placement of this value
                found[node.name] = float("inf")
        return found


def evaluated_whole(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Every value of a graph, by name."""
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    return {node.name: value for node, value in env.items()}


def _gap(a: Tensor, b: Tensor, least: float) -> float:
    """How far two values are, as a part of the largest of the second; infinite for another shape, and for NaN."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel() or torch.equal(a, b):
        return 0.0
    if not b.is_floating_point():
        return float("inf")
    far = float((a.double() - b.double()).nan_to_num(posinf=1e30, neginf=-1e30, nan=1e30).abs().max())
    return far / max(float(b.double().nan_to_num(posinf=0, neginf=0).abs().max()), least)
