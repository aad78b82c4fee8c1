"""runs: a case through fzero: lowered, verified, and interpreted for every rank in this process, or as a rank of a real
world.

To capture a step takes longer than the rest. A captured graph says nothing of the mesh, so cases of one model share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero import tree
from fzero.capture import trace_step
from fzero.capture.graph import Graph
from fzero.compile.lowered import Lowered
from fzero.compile.state_recipe import needs_key
from fzero.runtime.interpreter import interpret
from fzero.state import storage
from fzero.training import training_of
from lab.fuzz_meshes import optimizers
from lab.fuzz_meshes.case import Case, Recipe
from lab.fuzz_meshes.model import Model

KEPT = 4


@dataclass
class Result:
    """A run: the metrics of every step, by name, and after every step the leaves of the state, by path."""

    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    leaves: list[dict[str, Tensor]] = field(default_factory=list)


class Group:
    """What cases of one model and recipe share: the loss and the optimizer, by which steps are equal."""

    def __init__(self, model: Model, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.optimizer = optimizers.TABLE[recipe.optimizer].make()

    def loss(self, params: Any, batch: Any) -> Any:
        """The loss as fzero takes it."""
        total, count = self.model.loss(params, batch)
        return total if count is None else fzero.Mean(total, count)


_groups: list[Group] = []


def group_of(case: Case) -> Group:
    """The group of a case; the last ones are kept."""
    for group in _groups:
        if group.model == case.model and group.recipe == case.recipe:
            return group
    _groups.insert(0, Group(case.model, case.recipe))
    del _groups[KEPT:]
    return _groups[0]


def spec_of(case: Case) -> fzero.Spec:
    """The case as a Spec."""
    recipe, group = case.recipe, group_of(case)
    more: dict[str, Any] = {**recipe.clip, **case.place}
    return fzero.Spec(
        loss=_loss_of(group), optimizer=group.optimizer, microbatches=recipe.microbatches, precision=recipe.precision,
        trainable=recipe.trainable, nonfinite=recipe.nonfinite, allow_unused=True, **more,
    )  # fmt: skip


@lru_cache(maxsize=KEPT)
def _loss_of(group: Group) -> Any:
    return group.loss  # a bound method is made anew by each look, and steps with equal functions are equal


def batch_of(case: Case, place: int, step: int) -> dict[str, Tensor]:
    """What a data rank is given in a step."""
    recipe = case.recipe
    rows = recipe.rows * recipe.microbatches
    return case.model.batch(place, step, rows, recipe.torch_dtype, step == recipe.bad)


def lowered(case: Case) -> Lowered:
    """The case lowered and verified."""
    with _captures():
        return fzero.lower(
            spec_of(case), params_of(case), batch_of(case, 0, 0), world_size=case.world, key=key_of(case)
        )


def params_of(case: Case) -> Any:
    """The first parameters."""
    return case.model.params(case.recipe.torch_dtype)


class World:
    """A case on all its ranks, in this process. held: by rank, the buffers of the state; `step` writes them."""

    def __init__(self, case: Case, low: Lowered, held: list[Mapping[str, Tensor]] | None = None) -> None:
        """held: None: those of the first state."""
        self.case, self.low, self.plan = case, low, low.plan
        if held is None:
            leaves = first_state(case)
            held = [storage.shards(self.plan, leaves, rank) for rank in range(case.world)]
        self.held = held

    def step(self, number: int) -> dict[str, Tensor]:
        """Interprets the step of this number, with poison; returns its metrics. Raises AssertionError where ranks
        differ in one."""
        low, plan = self.low, self.plan
        programs = {rank: low.on(rank) for rank in range(self.case.world)}
        memory = []
        for rank, program in programs.items():
            inputs = [name for name, b in program.buffers.items() if b.kind == "batch"]
            constants = [name for name, b in program.buffers.items() if b.kind == "constant"]
            fixed = dict(zip(constants, low.graph.constants.values(), strict=True))
            given = tree.flatten(batch_of(self.case, plan.mesh.data_rank(rank), number))[1]
            memory.append({**self.held[rank], **fixed, **dict(zip(inputs, given, strict=True))})
        with torch.no_grad():
            ranks = interpret(programs, memory, poison=True)
        self.held = [{name: rank.memory[name] for name in plan.held_by(rank.rank)} for rank in ranks]
        return _same([{n: rank.memory[b].clone() for n, b in programs[rank.rank].metrics.items()} for rank in ranks])

    def leaves(self) -> dict[str, Tensor]:
        """By path, the leaves of the state, whole."""
        return {leaf.path: storage.join(self.plan, leaf, self.held) for leaf in self.plan.leaves}


def interpreted(case: Case) -> Result:
    """Lowers, verifies and interprets a case."""
    world, result = World(case, lowered(case)), Result()
    for number in range(case.recipe.steps):
        result.metrics.append(world.step(number))
        result.leaves.append(world.leaves())
    return result


def _same(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of all ranks. Raises AssertionError where ranks differ."""
    for other in metrics[1:]:
        for name, value in metrics[0].items():
            assert torch.equal(value.nan_to_num(), other[name].nan_to_num()), f"ranks differ in {name}: {metrics}"
    return metrics[0]


def first_state(case: Case) -> list[Tensor]:
    """The leaves of the first state, whole."""
    leaves = tree.flatten(first_tree(case))[1]
    return [x if isinstance(x, Tensor) else torch.tensor(x) for x in leaves]


def first_tree(case: Case) -> Any:
    """The first state."""
    spec, key = spec_of(case), key_of(case)
    if key is not None or needs_key(spec):
        key = fzero.random.fold_in(fzero.random.key(0) if key is None else key, -2)
    return training_of(spec).init(params_of(case), key)


def key_of(case: Case) -> Tensor | None:
    """The key that a keyed recipe is given."""
    return fzero.random.key(3) if case.recipe.keyed else None


def trained(case: Case) -> Result:
    """Runs the steps of a case as a rank of a real world: `fzero.init` and `fzero.step`."""
    state = fzero.init(params_of(case), spec_of(case), key=key_of(case))
    mesh, rank = state.runtime.plan.mesh, state.runtime.rank
    result = Result()
    for number in range(case.recipe.steps):
        state = fzero.step(state, batch_of(case, mesh.data_rank(rank), number))
        result.metrics.append({name: x.clone() for name, x in state.metrics.items()})
        paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
        result.leaves.append(dict(zip(paths, (x.clone() for x in leaves), strict=True)))
    return result


# --- one capture for all meshes ---------------------------------------------------------------------------------------

_graphs: list[tuple[Any, str, Graph]] = []  # the last ones, each behind what it is the graph of
_capture = trace_step.capture


@contextmanager
def _captures() -> Iterator[None]:
    trace_step.capture = _kept  # type: ignore[assignment]
    try:
        yield
    finally:
        trace_step.capture = _capture


def _kept(step: Any, state: Any, batch: Any, *, fns: Any, **options: Any) -> Graph:
    training = getattr(step, "__self__", step)
    paths, leaves, treedef = tree.flatten((state, batch))
    shown = [(x.shape, x.dtype, x.stride(), x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
    asked = repr((paths, shown, treedef, options))
    for of, text, graph in _graphs:
        if of == training and text == asked:
            return graph
    _graphs.insert(0, (training, asked, _capture(step, state, batch, fns=fns, **options)))
    del _graphs[KEPT:]
    return _graphs[0][2]
