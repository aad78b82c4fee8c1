"""other_ranks: errors of codes for another world: what is owed is kept, and what is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run
from loading import Quick, write
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.checkpoint.load import Filling
from fzero.checkpoint.reader import Checkpoint
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.state import storage
from fzero.training import training_of

CPU = torch.device("cpu")
SIZE = 4 * 64 + 64  # of "w" and "b" in whole blocks


def params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(4, 60, generator=g), "b": torch.randn(60, generator=g)}


def loss(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


SPEC = fzero.Spec(loss=loss, optimizer=optim.onebit_adam(1e-2, 1), zero=1)


def saved(folder: Path, world: int, spec: fzero.Spec = SPEC, first: Any = None) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of so many ranks after some steps, and the leaves in it."""
    first = params() if first is None else first
    done = run(spec, first, batch, world=world, steps=3)
    state = training_of(spec).init(first) if spec.optimizer is not None else first
    treedef = tree.flatten(state)[2]
    return write(folder, done.lowered.plan, done.memory, treedef), done.final


def loaded(
    folder: Path, world: int, spreads: bool, spec: fzero.Spec = SPEC, first: Any = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The leaves of so many ranks that have loaded it, and their paths."""
    mesh = mesh_of(spec, world)
    recipe = recipe_for(spec, params() if first is None else first, None, CPU, mesh.data_ranks)
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh)
    ranks = []
    for rank in range(world):
        memory = storage.allocate(plan, storage.block_of("cpu"), rank)
        Filling(Checkpoint(folder, Quick()), recipe, world, True, spreads).place(plan, rank, memory)
        ranks.append(memory)
    leaves = {leaf.path: storage.join(plan, leaf, ranks) for leaf in plan.leaves}
    return leaves, recipe.paths


def owed(leaves: dict[str, Tensor]) -> Tensor:
    """By element, what the next mean of all ranks gets of the errors."""
    worker, server = leaves["opt_state/error/worker"], leaves["opt_state/error/server"]
    return worker.double().mean(0) + server.double().flatten()[: worker.shape[1]]


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2), (2, 1), (4, 2)])
def test_what_is_owed_is_kept(old: int, new: int, tmp_path: Path) -> None:
    folder, before = saved(tmp_path / "run", old)
    after, _ = loaded(folder, new, spreads=True)
    assert after["opt_state/error/worker"].shape == (new, SIZE)
    assert torch.allclose(owed(after), owed(before), atol=1e-6)
    assert owed(before).abs().max() > 1e-3, "something is owed"
    assert all(torch.equal(row, after["opt_state/error/worker"][0]) for row in after["opt_state/error/worker"])
    for name in before:
        if "error" not in name:
            assert torch.equal(after[name], before[name]), name


def test_equal_worlds_keep_their_bits(tmp_path: Path) -> None:
    folder, before = saved(tmp_path / "run", 2)
    after, paths = loaded(folder, 2, spreads=True)
    assert all(torch.equal(after[name], before[name]) for name in paths)


def test_the_default_refuses_by_name(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "run", 2)
    with pytest.raises(fzero.MismatchError) as error:
        loaded(folder, 3, spreads=False)
    said = str(error.value)
    assert "state['opt_state/error/worker'] is [2, 320] (one per rank) there, [3, 320]" in said, said
    assert "has no meaning for other ranks; load it on 2, or give fzero.load(per_rank='mean')" in said
    assert "state['opt_state/error/server'] is [2, 192] (one per rank) there, [3, 128]" in said


def test_what_has_no_mean_is_refused_all_the_same(tmp_path: Path) -> None:
    def step(state: Any, x: Tensor) -> Any:
        return {"params": {"w": state["params"]["w"] * 0.5}, "seen": state["seen"] + 1}, {}

    spec = fzero.Spec(step=step)
    first = {"params": {"w": torch.ones(64)}, "seen": fzero.per_rank(torch.tensor(0))}
    folder, _ = saved(tmp_path / "run", 2, spec, first)
    with pytest.raises(fzero.MismatchError, match="for other ranks; load it on 2\n"):
        loaded(folder, 3, True, spec, first)


def test_load_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(fzero.SpecError, match=r"load\(per_rank='sum'\): needed 'refuse' or 'mean'"):
        fzero.load(tmp_path, SPEC, per_rank="sum")
    state = fzero.step(fzero.init(params(), SPEC), batch(0, 0))
    fzero.save(state, tmp_path)
    with pytest.raises(fzero.SpecError, match="give it a spec and params instead of the state"):
        fzero.load(tmp_path, like=state, per_rank="mean")
    assert fzero.load(tmp_path, SPEC, like=params(), per_rank="mean").step == 1
