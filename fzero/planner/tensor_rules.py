"""tensor_rules: rules of tensor parallelism that nobody named: which dim of which leaf the ranks of a node share.

The loss's forward is captured once, with one of its equal layers. Leaves whose paths differ in numbers alone take one
rule. The graph proposes the rules (`proposed_dim`): products are cut by columns, and by rows where their sum joins what
passes beside them (Shoeybi et al., 2019, arXiv:1909.08053). Propagation then writes a rank's part of the forward with
its transfers (`fzero.shard.propagate`), and the machine's rates price it. A rule without which that takes fewer seconds
is dropped. A leaf that is several matrices (q, k and v; gate and up) is tried in groups. A leaf that stays replicated
costs the sum of its gradient: else sharing the rows, which is data parallelism, would look cheapest.

The forward does not show what a whole leaf costs the ranks of the data, which gather and reduce all of it. So if rules
were dropped from those of a deep model, shallow programs say which of the two is faster: with all of them, or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fzero import tree
from fzero.compile.ahead import lower
from fzero.cost.flops import flops
from fzero.cost.node_work import seconds, works
from fzero.cost.rates import Rates
from fzero.errors import FzeroError
from fzero.hardware import Hardware
from fzero.ir import fx_nodes, fx_values
from fzero.ir.mesh import Mesh
from fzero.planner.deep import probed
from fzero.planner.problem import NO_RULES, Problem, TensorRules
from fzero.planner.programs import by_rates
from fzero.planner.shallow import shallow
from fzero.shard.partition import Groups, P, groups
from fzero.shard.placements import Placement, Replicated, Shard
from fzero.shard.propagate import propagate
from fzero.spec import Spec

AXIS, PARAMS = "tp", "params/"
GROUPS = (2, 3)  # of a leaf that is several matrices, one after the other
TURNS = {"t", "transpose", "permute"}
PASSED = {"_to_copy", "add", "mul", "div", "clone", "native_dropout"}  # with numbers alone
SWEEPS, GAIN = 2, 0.02  # times over the leaves; the part of the forward's seconds that another rule, or none, must save
GRADIENT, STATE = 4, 16  # bytes of an element: of its gradient; of it, its gradient and two moments
SENT = {"axis_all_reduce": "all_reduce", "axis_all_gather": "all_gather", "axis_reduce_scatter": "reduce_scatter",
        "axis_all_to_all": "all_to_all"}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensor_rules(problem: Problem) -> TensorRules:
    """`Spec(shard=)` over the axis `tp`. None where the spec has some or its mesh is pinned, where one rank can hold
    the state and there is a row for each, where cutting leaves gains nothing, and where the forward cannot be read."""
    spec, machine = problem.spec, problem.machine
    if spec.shard or problem.given & {"shard", "mesh"}:
        return NO_RULES
    node = machine.levels[0].size if machine.levels else 1
    widths = [n for n in range(min(node, problem.world_size), 1, -1) if problem.world_size % n == 0]
    if not widths or spec.loss is None or callable(problem.params_like):
        return NO_RULES
    leaves = [x for x in tree.flatten(problem.params_like)[1] if isinstance(x, torch.Tensor)]
    if STATE * sum(x.numel() for x in leaves) <= problem.budget and problem.rows >= problem.world_size:
        return NO_RULES
    rows, depth = max(1, problem.rows * widths[0] // problem.world_size), problem.equal.depth if problem.equal else 1
    try:
        forward = forward_of(problem, rows)
    except FzeroError:
        return NO_RULES
    width = max(widths, key=lambda n: len(forward.proposed(n)))  # the widest of those by which most leaves are divided
    proposed = forward.proposed(width)
    rules = forward.searched(proposed, width, machine)
    if not rules:
        return NO_RULES
    every = {name: found[0] for name, found in proposed.items()} | rules
    if every != rules and _seconds(problem, every, width) < _seconds(problem, rules, width):
        rules = every
    return TensorRules(rules, depth * forward.sent(rules, width) / rows)


def _seconds(problem: Problem, rules: Mapping[str, P], width: int) -> float:
    """Of a step by these rules, its state and gradients cut for all ranks; infinite if shallow programs say none."""
    mesh = Mesh((("dp", problem.world_size // width), (AXIS, width)))
    try:
        spec = replace(
            problem.spec, mesh=dict(mesh.axes), shard=rules, zero=3, microbatches=1, remat="full", offload=None,
            nvme_path=None, sequence=None, pipeline=None, device_bytes=None, host_bytes=None, reduce=None,
            update_on=None,
        )  # fmt: skip
    except FzeroError:  # what else the spec says does not go with these
        return float("inf")
    found = probed(problem, spec, mesh, by_rates(problem.machine, mesh), checks=False)
    return float("inf") if found is None else found.seconds


def forward_of(problem: Problem, rows: int) -> Forward:
    """The captured forward, with one of equal layers and parameters in the dtype in which it computes. Raises
    FzeroError."""
    problem = problem if problem.equal is None else shallow(problem, problem.equal, 1)
    spec = problem.spec
    compute = DTYPES.get(spec.numerics.policy.compute or "")

    def cast(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty(x.shape, dtype=compute if compute and x.is_floating_point() else x.dtype, device="meta")

    def step(state: Any, batch: Any) -> Any:
        found = spec.loss(state["params"], batch)  # type: ignore[misc]
        return state, {"loss": found[0] if isinstance(found, tuple) else found}

    params = tree.map(cast, problem.params_like)
    alone = Spec(step=step, zero=0, mesh={"dp": 1}, device=spec.device)
    lowered = lower(alone, {"params": params}, problem.batch_of(rows), world_size=1)
    return Forward(lowered.graph.gm, tuple(lowered.graph.state_paths))


@dataclass(frozen=True)
class Forward:
    """A forward of a rank. paths: of its leaves, which are its first placeholders."""

    gm: fx.GraphModule
    paths: tuple[str, ...]

    def proposed(self, width: int) -> dict[str, list[P]]:
        """The rules that the graph proposes for so many ranks: by leaf, the ways to cut it."""
        leaves = {name: (leaf, proposed_dim(leaf)) for name, leaf in self._leaves().items()}
        ways = {name: list(_ways(leaf, dim, width)) for name, (leaf, dim) in leaves.items() if dim is not None}
        return {name: found for name, found in ways.items() if found}

    def searched(self, ways: Mapping[str, Sequence[P]], width: int, machine: Hardware) -> dict[str, P]:
        """The rules that are proposed, less those that save nothing."""
        rates = machine.rates(Mesh((("dp", 1), (AXIS, width))))
        rules = {name: found[0] for name, found in ways.items()}
        least = self.seconds(rules, width, rates)
        for _ in range(SWEEPS):
            before = dict(rules)
            for name, found in ways.items():
                without = {key: dims for key, dims in rules.items() if key != name}
                for tried in (without, *({**without, name: dims} for dims in found)):
                    if tried != rules and (taken := self.seconds(tried, width, rates)) < least * (1 - GAIN):
                        least, rules = taken, tried
            if rules == before:
                break
        return rules if rules and least < self.seconds({}, width, rates) else {}

    def _leaves(self) -> dict[str, fx.Node]:
        """By rule, a leaf that it is for."""
        holders = fx_nodes.placeholders(self.gm.graph)
        return {_rule(path): x for x, path in zip(holders, self.paths, strict=False) if x.users}

    def seconds(self, rules: Mapping[str, P], n: int, rates: Rates) -> float:
        """Of a rank's part of the forward; infinite where there is none."""
        try:
            graph = self._local(rules, n)
        except FzeroError:
            return float("inf")
        holders = fx_nodes.placeholders(self.gm.graph)
        whole = [x.meta["val"] for x, path in zip(holders, self.paths, strict=False) if _rule(path) not in rules]
        summed = rates.transfer("all_reduce", sum(GRADIENT * x.numel() for x in whole), AXIS, n)
        sent = sum(rates.transfer(kind, _whole(node), AXIS, n) for kind, node in _transfers(graph))
        return summed + sent + sum(seconds(work, rates) for work in works(graph) if work.kind not in SENT)

    def sent(self, rules: Mapping[str, P], n: int) -> float:
        """The bytes that the transfers of a rank's part move, as those of gathers."""
        graph = self._local(rules, n)
        return sum((1 + (kind == "all_reduce")) * _whole(node) for kind, node in _transfers(graph))

    def _local(self, rules: Mapping[str, P], n: int) -> fx.Graph:
        """A rank's part of the forward. Raises FzeroError where rules cannot be followed."""
        holders, results = fx_nodes.placeholders(self.gm.graph), fx_nodes.outputs(self.gm.graph)
        count = len(self.paths)
        given: list[Placement] = [_placement(rules.get(_rule(path), P())) for path in self.paths]
        given += [Replicated()] * (len(holders) - count)
        wanted = [*given[:count], *[Replicated()] * (len(results) - count)]
        own = [number < count for number in range(len(holders))]
        return propagate(self.gm, given, wanted, n, AXIS, own, names=self.paths).gm.graph


def _transfers(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """The transfers, by kind of op."""
    return ((SENT[name], node) for node in graph.nodes if (name := fx_nodes.op_name(node)) in SENT)


def _whole(node: fx.Node) -> int:
    """The bytes of a transfer's larger end."""
    ends = [x.meta["val"] for x in (node, fx_nodes.operand(node))]
    return max(x.numel() * x.element_size() for x in ends)


def proposed_dim(leaf: fx.Node) -> int | None:
    """The dim of a leaf that ranks would share; None where there is none.

    A table that is looked up: its words. A matrix whose product is added to what passes beside it, as at the end of an
    attention or an MLP: the dim that the product sums over. Any other matrix of a product: the other dim.
    """
    if leaf.meta["val"].dim() != 2:
        return None
    users = list(_read_by(leaf))
    if any(fx_nodes.op_name(user) in ("embedding", "index") for user, _, _ in users):
        return 0
    for product, turned, value in users:
        if flops(product):
            summed = int(product.all_input_nodes[-1] is not value) ^ turned
            return summed if _joins(product) else 1 - summed
    return None


def _read_by(leaf: fx.Node) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """(what computes with a leaf, whether it is transposed there, the operand), past views and casts."""
    todo = [(leaf, 0)]
    while todo:
        value, turned = todo.pop()
        for user in value.users:
            name = fx_nodes.op_name(user)
            if fx_nodes.is_view(user) or name == "_to_copy":
                todo.append((user, turned ^ (name in TURNS)))
            else:
                yield user, turned, value


def _joins(product: fx.Node) -> bool:
    """Whether a product is added to another value of its size, with nothing but views, casts and scalars before."""
    todo = list(product.users)
    while todo:
        user = todo.pop()
        name, inputs = fx_nodes.op_name(user), user.all_input_nodes
        sizes = {sum(t.numel() for t in fx_values.tensors(x.meta.get("val"))) for x in inputs}
        if name == "add" and len(inputs) == 2 and len(sizes) == 1:
            return True
        biased = name == "add" and len(sizes) > 1
        if fx_nodes.is_view(user) or biased or (name in PASSED and len(inputs) == 1):
            todo += user.users
    return False


def _ways(leaf: fx.Node, dim: int, n: int) -> Iterator[P]:
    """A dim cut in one piece for n ranks, and in groups, if what it makes is taken apart into as many pieces."""
    before, size = (None,) * dim, leaf.meta["val"].shape[dim]
    if size % n == 0:
        yield P(*before, AXIS)
    products = [product for product, _, _ in _read_by(leaf) if flops(product)]
    pieces = {count for product in products for count in GROUPS if _is_split(product, count)}
    for count in sorted(pieces):
        if size % (count * n) == 0:
            yield P(*before, groups(AXIS, count))


def _is_split(product: fx.Node, count: int) -> bool:
    """Whether views of a value are so many times smaller."""
    todo, whole = list(product.users), product.meta["val"]
    while todo:
        user = todo.pop()
        if fx_nodes.is_view(user):
            values = fx_values.tensors(user.meta["val"])
            if any(x.numel() * count == whole.numel() for x in values):
                return True
            todo += user.users
    return False


def _placement(dims: P) -> Placement:
    dim = next((number for number, axes in enumerate(dims) if axes is not None), None)
    if dim is None:
        return Replicated()
    return Shard(dim, cut.count if isinstance(cut := dims[dim], Groups) else 1)


def _rule(path: str) -> str:
    """A leaf's path in the state as a rule for all layers.

    >>> _rule("params/blocks/3/qkv")
    'blocks/*/qkv'
    """
    parts = tree.parts(path.removeprefix(PARAMS))
    return "/".join("*" if part.isdigit() else part for part in parts)
