"""lockstep: a graph that `fzero.shard` wrote, run for all ranks in one process, node by node."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cases
import torch
from torch import Tensor, fx

import fzero
from fzero import tree
from fzero.ir import fx_nodes, segments
from fzero.shard import ops
from fzero.shard.placements import Partial, Placement, Replicated, join, split
from fzero.shard.propagate import propagate
from fzero.shard.split_bias import split_bias
from fzero.shard.write_local_graph import Sharded

REGION = torch.ops.fzero.region.default
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Captured:
    """The joint graph of a loss, its inputs, the paths of the leaves among them, and of each gradient its leaf."""

    gm: fx.GraphModule
    inputs: list[Tensor]
    paths: list[str | None]
    grad_of: dict[int, str]

    def reference(self) -> list[Tensor]:
        """The outputs of the graph as it was captured."""
        return [x.clone() for x in self.gm(*self.inputs)]


def captured(loss: Loss, params: Any, batch: Any) -> Captured:
    """The joint graph of a loss."""
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    graph, _ = cases.captured(spec, params, batch)
    node = next(n for n in graph.gm.graph.nodes if n.target is REGION)
    region = graph.regions[0]
    outer = fx_nodes.placeholders(graph.gm.graph)
    leaves = {f"params/{p}": x for p, x in zip(*tree.flatten(params)[:2], strict=True)}
    given = [x for x in tree.flatten(batch)[1] if isinstance(x, Tensor)]
    values: list[Any] = [leaves.get(path) for path in graph.state_paths]
    names: list[str | None] = [path.removeprefix("params/") for path in graph.state_paths]
    values += [*given, *graph.constants.values()]
    names += [None] * (len(values) - len(names))
    of = dict(zip(outer, zip(values, names, strict=True), strict=True))
    found = [of[x] for x in node.args[0]]
    paths = [name for _, name in found]
    gm = fx.GraphModule(torch.nn.Module(), segments.copied(region.gm.graph))
    return Captured(gm, [x for x, _ in found], paths, {1 + k: str(paths[i]) for k, i in enumerate(region.grad_of)})


def sharded(case: Captured, rules: Mapping[str, Placement], n: int) -> Sharded:
    """The graph of one rank, leaves placed by the first rule that matches their path."""
    return with_whole(case, rules, n)[1]


def with_whole(case: Captured, rules: Mapping[str, Placement], n: int) -> tuple[fx.GraphModule, Sharded]:
    """The graph with biases apart, which the graph of one rank is to compute, and that graph."""

    def place(path: str | None) -> Placement:
        return next((p for rule, p in rules.items() if path and fnmatch.fnmatchcase(path, rule)), Replicated())

    gm = fx.GraphModule(torch.nn.Module(), segments.copied(case.gm.graph))
    placed = [place(path) for path in case.paths]
    count = len(fx_nodes.outputs(gm.graph))
    split_bias(gm, placed)
    segments.merge_equal(gm)
    wanted = [place(case.grad_of.get(i)) for i in range(count)]
    return gm, propagate(gm, placed, wanted, n, "tp", leaves=[path is not None for path in case.paths])


def run(made: Sharded, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, joined from all ranks'. Raises AssertionError where ranks differ in a replicated one."""
    env = evaluated(made, inputs)
    for node in made.gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            expected = node.meta["val"]
            if isinstance(expected, Tensor):
                assert env[node][0].shape == expected.shape, (node, env[node][0].shape, expected.shape)
    results = []
    for x, placement in zip(fx_nodes.outputs(made.gm.graph), made.outputs, strict=True):
        parts = env[x]
        if isinstance(placement, Replicated):
            assert all(torch.equal(parts[0], part) for part in parts), x
        results.append(join(parts, placement))
    return results


def evaluated(
    made: Sharded, inputs: list[Tensor], known: Mapping[fx.Node, list[Any]] | None = None
) -> dict[fx.Node, list[Any]]:
    """Every value on all ranks. known: values that need not be computed."""
    env: dict[fx.Node, list[Any]] = dict(known or {})
    feed = iter([*(split(x, p, made.n) for x, p in zip(inputs, made.inputs, strict=True)),
                 [torch.tensor(rank) for rank in range(made.n)]])  # fmt: skip
    for node in made.gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node in env:
            continue
        elif node.target in ops.TRANSFERS:
            env[node] = _transfer(node, env[node.args[0]])
        elif node.op == "call_function":
            calls = [fx.node.map_arg((node.args, node.kwargs), lambda x, r=r: env[x][r]) for r in range(made.n)]
            env[node] = [node.target(*args, **kwargs) for args, kwargs in calls]
    return env


def _transfer(node: fx.Node, parts: list[Tensor]) -> list[Tensor]:
    n = len(parts)
    if node.target is ops.ALL_REDUCE:
        return [join(parts, Partial(str(node.args[3])))] * n
    shape: Any = node.args[3]
    if node.target is ops.REDUCE_SCATTER:
        return [part.view(shape) for part in join(parts, Partial()).view(-1).chunk(n)]
    if node.target is ops.ALL_GATHER:
        return [torch.cat([part.view(-1) for part in parts]).view(shape)] * n
    rows = [part.view(-1).chunk(n) for part in parts]
    return [torch.cat([row[rank] for row in rows]).view(shape) for rank in range(n)]
