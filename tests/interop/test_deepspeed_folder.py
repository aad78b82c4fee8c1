"""Checkpoints of DeepSpeed: masters and moments from its partitions, and no code of a file runs."""

import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from exchanged import Harmless, Payload, same
from torch import Tensor

import fzero
from fzero import cli
from fzero.errors import CheckpointError, CorruptError
from fzero.interop import (
    _unpickle,
    deepspeed,
    pickled,
)

SHAPES = [{"a": (5, 3), "b": (7,)}, {"c": (2, 3, 2), "d": (1,)}]
FROZEN = {"f": (5,)}


def deepspeed_files(folder: Path, stage: int, world: int) -> dict[str, Tensor]:
    """A checkpoint as DeepSpeed's rules cut it, written independently of fzero; the tensors that are in it."""
    torch.manual_seed(stage)
    sizes = {name: shape for group in SHAPES for name, shape in group.items()}
    held = {f"{top}/{name}": torch.randn(shape) for top in ("params", "mu", "nu") for name, shape in sizes.items()}
    frozen = {name: torch.randn(shape).bfloat16() for name, shape in FROZEN.items()}
    folder.mkdir()
    tag = folder / "global_step9"
    tag.mkdir()
    (folder / "latest").write_text("global_step9")

    def cut(top: str, rank: int, lean: bool) -> list[Tensor]:
        parts = []
        for group in SHAPES:
            leaves = [held[f"{top}/{name}"].flatten() for name in group]
            if stage == 3:
                padded = [torch.cat([x, torch.zeros(-len(x) % world)]).view(world, -1)[rank] for x in leaves]
                parts.append(torch.cat(padded))
            else:
                flat = torch.cat(leaves)
                padding = -len(flat) % (2 * world)
                part = torch.cat([flat, torch.zeros(padding)]).view(world, -1)[rank].clone()
                parts.append(part[: len(part) - padding] if lean and rank == world - 1 else part)
        return parts

    for rank in range(world):
        moments = zip(cut("mu", rank, False), cut("nu", rank, False), strict=True)
        adam = {i: {"step": torch.tensor(4.0), "exp_avg": m, "exp_avg_sq": v} for i, (m, v) in enumerate(moments)}
        state: dict[str, Any] = {"zero_stage": stage, "loss_scaler": None}
        if stage == 3:
            state |= {"fp32_flat_groups": cut("params", rank, False), "partition_count": world}
            state["optimizer_state_dict"] = {"state": adam, "param_groups": []}
        else:
            state |= {"single_partition_of_fp32_groups": cut("params", rank, True), "partition_count": [world] * 2}
            state["base_optimizer_state"] = {"state": adam, "param_groups": []}
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": OrderedDict(dict.fromkeys(sizes, torch.zeros(0)) | frozen),
            "param_shapes": [OrderedDict((name, torch.Size(s)) for name, s in group.items()) for group in SHAPES],
            "buffer_names": [], "shared_params": {"tied": "a"}, "global_steps": 9, "tokens": 5, "ds_version": "x",
        }  # fmt: skip
        if stage == 3:
            padded = {name: torch.cat([x, x[:0].new_zeros(-len(x) % world)]) for name, x in frozen.items()}
            model["frozen_param_shapes"] = OrderedDict((name, torch.Size(s)) for name, s in FROZEN.items())
            model["frozen_param_fragments"] = {n: x.view(world, -1)[rank].clone() for n, x in padded.items()}
            torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, tag / "mp_rank_00_model_states.pt")
    return {**held, **{f"params/{name}": x.float() for name, x in frozen.items()}}


@pytest.mark.parametrize(
    ("stage", "world"),
    [(2, 3), (3, 3), *(pytest.param(*one, marks=pytest.mark.acceptance) for one in ((1, 2), (3, 1)))],
)
@pytest.mark.sampled(1)
def test_masters_and_moments_come_from_deepspeeds_partitions(stage: int, world: int, tmp_path: Path) -> None:
    held = deepspeed_files(tmp_path / "ds", stage, world)
    assert cli.main(["import-deepspeed", str(tmp_path / "ds"), str(tmp_path / "run")]) == 0
    spec = fzero.Spec(
        loss=lambda p, b: sum(x.square().sum() for x in p.values()) + b.sum(),
        optimizer=fzero.optim.adamw(1e-2), zero=3, trainable=["a", "b", "c", "d"],
    )  # fmt: skip
    state = fzero.load(tmp_path / "run", spec)
    opt = state.opt_state
    found = {f"params/{name}": x for name, x in fzero.unshard(state.params).items()}
    found |= {f"mu/{name}": x.full() for name, x in opt.mu.items() if x is not None}
    found |= {f"nu/{name}": x.full() for name, x in opt.nu.items() if x is not None}
    assert same(found, held)
    assert (int(opt.count.full()), state.step) == (4, 9)
    manifest = fzero.checkpoint.manifest(tmp_path / "run")
    assert (manifest.extra["tokens"], manifest.extra["global_steps"]) == (5, 9)
    assert fzero.step(state, torch.zeros(1)).step == 10


def test_a_deepspeed_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_files(tmp_path / "ds", 2, 2)
    tag = tmp_path / "ds" / "global_step9"
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = torch.load(file)
    torch.save({**whole, "x": Payload(tmp_path / "owned")}, file)
    torch.load(file, weights_only=False)
    (tmp_path / "owned").rmdir()  # which shows that it works
    with pytest.raises(CorruptError, match=f"{file.name}: it asks for posix.mkdir, which is not allowed"):
        deepspeed(tmp_path / "ds")
    with pytest.raises(_unpickle.UnpickleRefused, match=r"posix\.mkdir"):  # not even where the user allows it
        list(_unpickle.torch_files({"files": [str(file)], "allow": ["posix.mkdir"]}))
    assert not (tmp_path / "owned").exists()
    torch.save({**whole, "x": Harmless()}, file)
    with pytest.raises(_unpickle.UnpickleRefused, match=rf"it asks for {Harmless.__module__}\.Harmless"):
        list(_unpickle.torch_files({"files": [str(file)], "allow": []}))
    monkeypatch.setattr(pickled, "_asked", lambda request, *_: list(_unpickle.torch_files(request)))  # as a child does
    assert deepspeed(tmp_path / "ds", allow=[f"{Harmless.__module__}.Harmless"]).count == 4


def test_the_child_may_hang_or_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_files(tmp_path / "ds", 2, 1)

    def python(text: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "python").chmod(stat.S_IRWXU)

    monkeypatch.setattr(pickled.sys, "executable", str(tmp_path / "python"))
    python("exec sleep 60")
    with pytest.raises(CorruptError, match=r"did not end within 0\.2 s"):
        deepspeed(tmp_path / "ds", timeout=0.2)
    python("kill -SEGV $$")
    with pytest.raises(CorruptError, match=r"died \(exit status -11\)"):
        deepspeed(tmp_path / "ds")
    for answer in ("", "nonsense", "{}", '{"found": []}', "[1]"):
        python(f"echo '{answer}'")
        with pytest.raises(CorruptError, match="gave no answer"):
            deepspeed(tmp_path / "ds")
    (tmp_path / "python").unlink()
    with pytest.raises(CheckpointError, match="no process could be started"):
        deepspeed(tmp_path / "ds")


@pytest.mark.acceptance
def test_what_is_not_supported_is_said(tmp_path: Path) -> None:
    deepspeed_files(tmp_path / "ds", 2, 2)
    tag = tmp_path / "ds" / "global_step9"
    for name, message in (
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_01-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("zero", "universal"),
    ):
        (tag / name).touch()
        with pytest.raises(CheckpointError, match=message):
            deepspeed(tag)
        (tag / name).unlink()
    first = tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    moved = first.rename(tmp_path / "away")
    with pytest.raises(CorruptError, match=r"has no optim_states\.pt of rank 0"):
        deepspeed(tag)
    moved.rename(first)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptError, match="was written by 2 ranks, and has the optimizer states of 1"):
        deepspeed(tag)
    state = torch.load(first)
    state["optimizer_state_dict"]["partition_count"] = [1, 1]
    torch.save(state, first)
    with pytest.raises(CorruptError, match="is not a ZeRO checkpoint"):  # half of the elements are not there
        deepspeed(tag)
    with pytest.raises(CheckpointError, match=r"has no \*_optim_states\.pt"):
        deepspeed(tmp_path)
    for name in ("../..", "..", ""):
        (tmp_path / "ds" / "latest").write_text(name)
        with pytest.raises(CorruptError, match="which is no directory beside it"):
            deepspeed(tmp_path / "ds")
