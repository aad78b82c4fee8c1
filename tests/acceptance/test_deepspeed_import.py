"""Checkpoints that DeepSpeed itself wrote on two ranks: what it held is what fzero has, and training goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exchanged import same
from safetensors.torch import load_file

import fzero
from fzero import cli
from fzero.interop import from_module

WORKER = Path(__file__).parents[1] / "support" / "workers" / "deepspeed_checkpoint.py"


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_and_moments_are_those_deepspeed_held(stage: int, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from workers import deepspeed_checkpoint as worker  # imports deepspeed

    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, str(tmp_path), str(stage), dtype], env=env, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    held = load_file(tmp_path / "held.safetensors")
    losses = held.pop("losses").tolist()

    assert cli.main(["import-deepspeed", str(tmp_path / "checkpoint"), str(tmp_path / "run")]) == 0
    _, buffers, apply = from_module(worker.model())
    adam = fzero.optim.adamw(1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    spec = fzero.Spec(loss=lambda p, b: apply(p, buffers, b), optimizer=adam, zero=3, trainable=apply.trainable)
    state = fzero.load(tmp_path / "run", spec)
    found = {f"params/{name}": state.params[name].full() for name in apply.trainable}
    found |= {f"mu/{name}": state.opt_state.mu[name].full() for name in apply.trainable}
    found |= {f"nu/{name}": state.opt_state.nu[name].full() for name in apply.trainable}
    assert same(found, held)
    assert (state.step, int(state.opt_state.count.full())) == (3, 3)
    for step, loss in zip((3, 4), losses, strict=True):
        state = fzero.step(state, torch.cat([worker.batch(rank, step) for rank in range(2)]))
        assert float(state.metrics["loss"]) == pytest.approx(loss, rel=1e-6 if dtype == "fp32" else 1e-2)
