"""checkpoints: a state trained on one mesh, saved, and loaded on another: every bit of every leaf, then one more step.

All ranks are in this process: `take` and `shards.write` are what a rank of `fzero.save` does, `wanted` and
`Checkpoint.fill` what one of `fzero.load` does. Leaves whose home is "nvme" lie in a file of their rank, before and
after.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.checkpoint import commit, shards
from fzero.checkpoint.load import wanted
from fzero.checkpoint.manifest import shard_name
from fzero.checkpoint.reader import Checkpoint
from fzero.checkpoint.save import take
from fzero.compile.lowered import Lowered
from fzero.disk import DiskFile
from fzero.disk.calls import Disk
from fzero.errors import FzeroError, VerifyError
from fzero.plan.state_plan import Plan
from fzero.state import storage
from fzero.state.homes import Homes, file_bytes
from lab.fuzz_meshes import optimizers, oracle, refusals, runs
from lab.fuzz_meshes.case import Case
from lab.fuzz_meshes.check import REMEDIES, Outcome, against, class_of
from lab.fuzz_meshes.draw import draw, draw_place

HOMES = ("device", "cpu", "nvme")


def draw_pair(seed: int, number: int) -> tuple[Case, Case]:
    """Two meshes, with homes and stages, for one model: the same in every run of one version. The first always has
    moments; half of the pairs have a key."""
    rng = random.Random(f"checkpoints:{seed}:{number}")
    case = draw(seed, 8 * number)
    recipe = replace(case.recipe, steps=2, bad=None, keyed=rng.random() < 0.5)
    places = [draw_place(rng, case.model, recipe) for _ in "ab"]
    cut = [place["mesh"].get(axis, 1) > 1 for place in places for axis in ("tp", "mp")]
    whole = any(cut)  # what muon and 8 bits ask of a leaf
    if recipe.optimizer in ("sgd", "scheduled") or (whole and recipe.optimizer in ("muon", "adamw8bit")):
        recipe = replace(recipe, optimizer="adamw")
    sides = []
    for side, place in zip("ab", places, strict=True):
        for name in ("offload", "nvme_path", "update_on"):
            place.pop(name, None)
        sides.append(Case(f"{seed}:{number}{side}", case.model, recipe, {**place, **_homes(rng)}))
    return sides[0], sides[1]


def _homes(rng: random.Random) -> dict[str, Any]:
    params, moments = rng.choice(HOMES), rng.choice(HOMES)
    if params == moments == "device":
        return {}
    rules = {"params/**": params, "opt_state/**": moments}
    return {"offload": rules, **({"nvme_path": "/var/tmp"} if "nvme" in rules.values() else {})}


def exchange(first: Case, second: Case, folder: Path) -> Outcome:
    """Trains a step on `first`, saves, loads on `second`, and makes one more step on each. folder: on a disk, empty.

    Ends as `check` does: what is refused is remedied, and what is not listed ends as `refused`.
    """
    try:
        (first, low), (second, two) = _lowered(first), _lowered(second)
        one = runs.World(first, low)
        one.step(0)
        with ExitStack() as files:
            before = [files.enter_context(_homed(one.plan, rank, folder)) for rank in range(first.world)]
            for homes, held in zip(before, one.held, strict=True):
                _filled(homes, held)
            saved = _saved(one, before, folder)
            after = [files.enter_context(_homed(two.plan, rank, folder)) for rank in range(second.world)]
            for rank, homes in enumerate(after):
                _loaded(two.plan, rank, homes, saved)
            other = runs.World(second, two, [{name: homes[name].clone() for name in homes} for homes in after])
        what = _differing(one.leaves(), other.leaves()) or _next(one, other)
    except VerifyError as error:
        return Outcome("crashed", class_of(error), f"{error}")
    except FzeroError as error:
        return Outcome("refused", class_of(error), f"{error}")
    except Exception as error:
        return Outcome("crashed", class_of(error), f"{type(error).__name__}: {error}")
    return Outcome("wrong", what.partition(":")[0], what) if what else Outcome("equal")


def _lowered(case: Case) -> tuple[Case, Lowered]:
    """(the case after the remedies of what it is refused for, the case lowered)."""
    for _ in range(REMEDIES):
        try:
            return case, runs.lowered(case)
        except VerifyError:
            raise
        except FzeroError as error:
            remedied = refusals.remedied(case, str(error))
            if remedied is None:
                raise
            case = remedied
    raise AssertionError(f"{REMEDIES} remedies did not help: {case}")


@contextmanager
def _homed(plan: Plan, rank: int, folder: Path) -> Iterator[Homes]:
    """A rank's new buffers, in memory and in its file."""
    size = file_bytes(plan, rank)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        file = DiskFile(own, size, timeout=60.0, owner=f"rank {rank}") if size else None
        disk = {name for name, b in plan.held_by(rank).items() if b.space == "disk"} if file else set()
        names = [name for name in plan.held_by(rank) if name not in disk]
        memory = storage.allocate(plan, storage.block_of("cpu"), rank, only=names)
        try:
            yield Homes(plan, rank, memory, file)
        finally:
            if file is not None:
                file.close()


def _filled(homes: Homes, held: Any) -> None:
    for buffers in homes.rounds():
        for name, buffer in buffers.items():
            buffer.copy_(held[name])


class _Quick(Disk):
    """Without the waits for the disk."""

    def run(self, kind: str, path: Path, call: Any) -> Any:
        return None if kind in ("sync", "sync_directory") else call()


def _saved(world: runs.World, homes: list[Homes], folder: Path) -> Path:
    """A committed checkpoint of every rank's buffers."""
    disk, run = _Quick(), folder / "run"
    treedef = tree.flatten(runs.first_tree(world.case))[2]
    taken = [take(world.plan, own, rank, treedef=treedef, step=1) for rank, own in enumerate(homes)]
    temporary = run / ".tmp-step-00000001-00000000"
    temporary.mkdir(parents=True)
    records = [shards.write(disk, temporary / shard_name(rank), part.parts) for rank, part in enumerate(taken)]
    return commit.commit(run, temporary, replace(taken[0].manifest, shards=tuple(records)), disk)


def _loaded(plan: Plan, rank: int, homes: Homes, saved: Path) -> None:
    source = Checkpoint(saved, _Quick())
    for buffers in homes.rounds():
        wants = wanted(plan, rank, buffers, set())
        source.check(wants)
        source.fill(wants)


def _differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    """The first leaf that has not the same bits; "" if all have."""
    if a.keys() != b.keys():
        return f"leaves: {sorted(a.keys() ^ b.keys())}"
    for path, x in a.items():
        if x.dtype != b[path].dtype or not torch.equal(_bits(x), _bits(b[path])):
            return f"bits: {path}: {x.flatten()[:3].tolist()}, loaded {b[path].flatten()[:3].tolist()}"
    return ""


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _next(one: runs.World, two: runs.World) -> str:
    """One more step on both sides, beside plain PyTorch, which goes on with the data ranks of each."""
    begun = one.case.data_ranks
    for name, world in (("saved", one), ("loaded", two)):
        result = runs.Result([world.step(1)], [world.leaves()])
        if world.case.recipe.dtype == "f64" and optimizers.TABLE[world.case.recipe.optimizer].exact:
            steps = oracle.train(world.case.model, world.case.recipe, [begun, world.case.data_ranks])
            if what := against(world.case, result, steps[1:]):
                return f"next step of the {name} side: {what}"
    if one.case.recipe.keyed and not torch.equal(one.leaves()["key"], two.leaves()["key"]):
        return "next step: other keys"
    return ""
