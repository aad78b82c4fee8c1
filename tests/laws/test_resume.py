"""Runs that go on: N + M steps are N, a save, a load under another layout, and M.

At one world size and in fp32 the bits are those of a run that was never stopped; at another world size the parameters
differ by rounding alone: the batches are the same, and so are the dropout masks, for keys belong to parts of the global
batch. Worlds run in this process, interpreted; two real ranks run over gloo.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from helpers import Outcome, gloo, relative, same_bits, values
from loading import OPTIMIZERS, STAGES, flat, read, write
from torch import Tensor

import fzero
from fzero import tree
from fzero.checkpoint.reader import Checkpoint
from fzero.runtime.interpreter import interpret
from fzero.state import storage
from fzero.training import training_of

# --- resuming ---------------------------------------------------------------------------------------------------------

ROWS = 8  # of a global batch


def dropping(params: Any, batch: Any, key: Tensor) -> Tensor:
    x, target = batch
    for i, layer in enumerate(params["layers"]):
        x = torch.tanh(x @ layer["w"] + layer["b"])
        x = fzero.random.dropout(fzero.random.fold_in(key, i), x, 0.2)
    return F.mse_loss(params["scale"] * (x @ params["out"]), target)


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    parts = [models.MLP.batch(part, step) for part in range(ROWS // models.NUM_ROWS)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


class Ranks:
    """All ranks of a world in this process: their program, and their memory from a checkpoint or a first state."""

    def __init__(self, world: int, zero: int, **options: Any) -> None:
        optimizer = options.pop("optimizer", fzero.optim.adamw(0.01, weight_decay=0.1))
        given = {"loss": dropping, "clip_norm": 0.5, "microbatches": 4 // world, "reduce": "each", **options}
        self.spec = fzero.Spec(zero=zero, optimizer=optimizer, **given)
        self.world, self.step = world, 0
        params = models.MLP.init(fzero.random.key(1))
        key = fzero.random.key(2)
        self.lowered = fzero.lower(self.spec, params, self.part(0, 0), world_size=world, key=key)
        first = training_of(self.spec).init(params, fzero.random.fold_in(key, -2))
        paths, leaves, self.treedef = tree.flatten(first)
        self.paths = paths
        leaves = [x if isinstance(x, Tensor) else torch.tensor(x) for x in leaves]
        self.memory = [storage.shards(self.lowered.plan, leaves, rank) for rank in range(world)]

    def part(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        size = ROWS // self.world
        x, y = global_batch(step)
        return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]

    def steps(self, count: int) -> Ranks:
        program, plan = self.lowered.program, self.lowered.plan
        names = [name for name, b in program.buffers.items() if b.kind == "batch"]
        for _ in range(count):
            given = [dict(zip(names, self.part(rank, self.step), strict=True)) for rank in range(self.world)]
            memory = [{**self.memory[rank], **given[rank]} for rank in range(self.world)]
            with torch.no_grad():
                ranks = interpret(dict.fromkeys(range(self.world), program), memory)
            self.memory = [{name: rank.memory[name] for name in plan.buffers} for rank in ranks]
            self.step += 1
        return self

    def save(self, run: Path) -> Path:
        return write(run, self.lowered.plan, self.memory, self.treedef, self.step)

    def load(self, directory: Path) -> Ranks:
        self.memory = read(directory, self.lowered.plan)
        self.step = Checkpoint(directory).step
        return self

    @property
    def leaves(self) -> dict[str, Tensor]:
        plan = self.lowered.plan
        return {leaf.path: storage.join(plan, leaf, self.memory) for leaf in plan.leaves}

    @property
    def flat_params(self) -> Tensor:
        return torch.cat([x.reshape(-1) for path, x in self.leaves.items() if path.startswith("params/")])


def resumed(one: tuple[int, int], two: tuple[int, int], run: Path, **options: Any) -> tuple[Ranks, Ranks]:
    """(three and three steps under `one`; three of them, a save, a load under `two`, and the other three)."""
    whole = Ranks(*one, **options).steps(3)
    saved = whole.save(run)
    return whole.steps(3), Ranks(*two, **options).load(saved).steps(3)


@pytest.mark.parametrize(("one", "two"), [(0, 3), (3, 1), (2, 0), (3, 3)])
@pytest.mark.sampled(1)
def test_a_run_that_was_stopped_ends_bit_for_bit_at_any_stage(one: int, two: int, tmp_path: Path) -> None:
    whole, again = resumed((2, one), (2, two), tmp_path)
    assert again.step == whole.step == 6
    assert [p for p, x in whole.leaves.items() if not same_bits(x, again.leaves[p])] == []


@pytest.mark.parametrize(("one", "two"), [((1, 3), (2, 3)), ((2, 3), (1, 0)), ((4, 1), (2, 2))])
@pytest.mark.sampled(1)
def test_a_run_goes_on_at_another_world_size(one: tuple[int, int], two: tuple[int, int], tmp_path: Path) -> None:
    whole, again = resumed(one, two, tmp_path)
    assert relative(again.flat_params, whole.flat_params) < 1e-6
    assert same_bits(whole.leaves["key"], again.leaves["key"])
    other = Ranks(*two).load(tmp_path / "step-00000003")
    other.step += 1  # another batch: the bound above would see it
    assert relative(other.steps(3).flat_params, whole.flat_params) > 1e-4


@pytest.mark.acceptance
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8", "muon"])
def test_every_stage_resumes_every_other(optimizer: str, tmp_path: Path) -> None:
    """At one world size bit for bit; clipping's norm is added in another order where matrices are packed (Muon)."""
    options = {"optimizer": OPTIMIZERS[optimizer], **({"clip_norm": None} if optimizer == "muon" else {})}
    for world in (1, 2, 4):
        for one in STAGES:
            for two in STAGES:
                whole, again = resumed((world, one), (world, two), tmp_path / f"{world}{one}{two}", **options)
                assert [p for p, x in whole.leaves.items() if not same_bits(x, again.leaves[p])] == []


@pytest.mark.acceptance
@pytest.mark.parametrize("one", [1, 2, 4])
def test_every_world_resumes_every_other(one: int, tmp_path: Path) -> None:
    for two in (1, 2, 4):
        for zero in STAGES:
            whole, again = resumed((one, zero), (two, 3 - zero), tmp_path / f"{two}{zero}")
            assert relative(again.flat_params, whole.flat_params) < 1e-6


# --- real ranks -------------------------------------------------------------------------------------------------------


def gloo_cases(run: str) -> dict[str, Any]:
    """On each of two ranks: steps, a save, loads, and a shard that is damaged for one rank alone."""
    rank = int(os.environ["RANK"])
    optimizer = fzero.optim.adamw(0.01, weight_decay=0.1)
    spec = fzero.Spec(loss=dropping, optimizer=optimizer, clip_norm=0.5, microbatches=2, reduce="each", zero=3)
    state = fzero.init(models.MLP.init, spec, key=fzero.random.key(2))

    def steps(state: fzero.State, count: int) -> fzero.State:
        for _ in range(count):
            x, y = global_batch(state.step)
            state = fzero.step(state, (x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]))
        return state

    state = steps(state, 2)
    saved = fzero.save(state, run)
    state = steps(state, 2)
    whole = {path: x.clone() for path, x in flat(state).items()}
    digest = state.program.digest
    found: dict[str, Any] = {"whole": whole}
    for zero in (3, 1):
        again = steps(fzero.load(run, replace(spec, zero=zero)), 2)
        found[f"zero={zero}"] = [p for p, x in flat(again).items() if not same_bits(x, whole[p])]
        found["digest"] = found.get("digest") or again.program.digest == digest
    again = steps(fzero.load(saved, like=again), 2)
    found["like"] = [p for p, x in flat(again).items() if not same_bits(x, whole[p])]
    torch.distributed.barrier()
    shard = saved / "shard-00001.safetensors"
    if rank == 0:
        shutil.copytree(run, Path(run) / "kept")
        data = bytearray(shard.read_bytes())
        data[-2] ^= 4
        shard.write_bytes(data)
    torch.distributed.barrier()
    for name, ask in {
        "new": lambda: fzero.load(run, spec),
        "over": lambda: fzero.load(run, like=again),
        "one mismatch": lambda: fzero.load(run, spec, like={"w": torch.ones(2)} if rank else None),
        "one without a spec": lambda: fzero.load(run, spec if rank == 0 else None),
    }.items():
        try:
            ask()
        except fzero.FzeroError as error:
            found[name] = (type(error).__name__, str(error))
    found["ended"] = again.life.ended
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    run = tmp_path_factory.mktemp("gloo")
    outcomes: list[Outcome] = gloo(2, gloo_cases, str(run))
    return run, values(outcomes)


def test_real_ranks_resume_bit_for_bit(ranks: tuple[Path, list[Any]]) -> None:
    for found in ranks[1]:
        assert found["zero=3"] == found["zero=1"] == found["like"] == []
        assert found["digest"]


def test_what_real_ranks_saved_goes_on_in_this_process(ranks: tuple[Path, list[Any]]) -> None:
    run, found = ranks
    alone = Ranks(1, 3).load(run / "kept" / "step-00000002")
    alone.steps(2)
    whole = torch.cat([found[0]["whole"][p].reshape(-1) for p in alone.leaves if p.startswith("params/")])
    assert relative(alone.flat_params, whole) < 1e-6
    assert same_bits(alone.leaves["key"], found[0]["whole"]["key"])


def test_damage_that_one_rank_meets_is_an_error_on_all(ranks: tuple[Path, list[Any]]) -> None:
    for rank, found in enumerate(ranks[1]):
        for name in ("new", "over"):
            assert found[name][0] == "CorruptError", found[name]
            assert "shard-00001.safetensors" in found[name][1]
        assert "is unusable: fzero.load failed after it began to write" in found["ended"]
        assert found["one mismatch"][0] == "MismatchError"
        assert ("rank 1 failed before" in found["one mismatch"][1]) == (rank == 0)
        assert found["one without a spec"][0] == ("SpecError" if rank else "DisagreementError")
