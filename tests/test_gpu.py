"""What needs a CUDA device (`make test-gpu`): a step there agrees with the CPU's; several devices agree with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

import fzero
from fzero.plan.measured import measured_peak

pytestmark = pytest.mark.gpu


def trained(device: str, steps: int = 5, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters after some steps of a two-layer GPT."""
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    spec = fzero.Spec(
        **{"loss": loss, "optimizer": fzero.optim.adamw(1e-3), "clip_norm": 1.0, "device": device, **options}
    )
    params = init(fzero.random.key(0))
    state = fzero.init(params, spec)
    losses = []
    for step in range(steps):
        batch = fzero.tree.map(lambda x: x.to(device), cases.tokens(4, 64, 256, step))
        state = fzero.step(state, batch)
        losses.append(float(state.metrics["loss"]))
    full = fzero.unshard(state.params)
    return losses, {path: x.cpu() for path, x in zip(*fzero.tree.flatten(full)[:2], strict=True)}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_cuda_step_agrees_with_the_cpu(microbatches: int) -> None:
    cpu, cuda = (trained(device, microbatches=microbatches) for device in ("cpu", "cuda"))
    assert cuda[0] == pytest.approx(cpu[0], rel=1e-4)
    gap = sum(float((cpu[1][p] - cuda[1][p]).double().square().sum()) for p in cpu[1])
    norm = sum(float(x.double().square().sum()) for x in cpu[1].values())
    assert (gap / norm) ** 0.5 < 1e-3


def test_a_cuda_step_repeats_bitwise() -> None:
    first, second = trained("cuda"), trained("cuda")
    assert first[0] == second[0]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "microbatches": 2}, {"precision": "bf16"}])
def test_one_cuda_graph_has_the_bits_of_single_launches(options: dict[str, Any]) -> None:
    graph, single = (trained("cuda", **{"clip_norm": None, **options, "cuda_graph": how}) for how in (True, False))
    assert graph[0] == single[0]
    assert all(torch.equal(graph[1][path], single[1][path]) for path in single[1])


def test_the_steps_after_the_first_are_one_graph() -> None:
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    state = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda"))
    batch = fzero.tree.map(lambda x: x.cuda(), cases.tokens(4, 64, 256))
    for _ in range(3):
        state = fzero.step(state, batch)
    bound = next(iter(state.runtime.bound.values()))
    assert bound.recording is not None
    assert bound.recordable


def test_the_planned_peak_holds_on_cuda() -> None:
    init, loss = cases.gpt(vocab=4096, width=256, depth=4)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda", cuda_graph=False)
    state = fzero.init(init, spec)
    batch = fzero.tree.map(lambda x: x.cuda(), cases.tokens(4, 256, 4096))
    state = fzero.step(state, batch)
    state.runtime.bound.clear()
    state.runtime.arena = state.runtime.arena.new_empty(0)  # so that the arena is allocated where it is measured
    held = sum(t.numel() * t.element_size() for t in [*state.runtime.memory.values(), *batch.values()])
    planned = state.runtime.compiled(batch).memory.peak
    _, extra = measured_peak(lambda: fzero.step(state, batch), "cuda")
    assert abs(planned - held - extra) <= 0.05 * (held + extra)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_devices_over_nccl_agree_with_each_stage(zero: int) -> None:
    worker = Path(__file__).parent / "workers" / "nccl.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(worker.parents[1]), *sys.path])}
    done = subprocess.run([*command, str(zero)], capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert row["gap"] < 1e-3, row
