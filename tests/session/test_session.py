"""What a run keeps of its programs has a bound, and a program that was dropped is made again."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import free_port

import fzero
from fzero._torch_compat import FakeTensorMode, forget_fakes
from fzero.session import session


def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return ((batch @ p["w"]).tanh() @ p["v"]).square().mean()


def out(p: Any, batch: torch.Tensor) -> Any:
    return {"out": loss(p, batch)}


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"offload": {"**": "device"}}, "a rule that takes something off the device, or no offload="),
        ({"mesh": {"tp": 2}, "shard": {"w": fzero.P(), "v": fzero.P(None, None)}}, "a rule that cuts something over"),
    ],
)
def test_rules_that_say_nothing(fields: Any, needed: str) -> None:
    with pytest.raises(fzero.SpecError, match=needed):
        fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **fields)
    fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), offload={"params/w": "cpu", "**": "device"})


def test_batches_of_many_lengths(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-2))
    params = {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}
    lengths = [1, 2, 3, 4, 5, 1, 5, 4, 2]
    plain = fzero.init(params, spec)
    for length in lengths:
        plain = fzero.step(plain, torch.ones(length, 4))
    monkeypatch.setattr(session, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(session, "MAX_FAKES", 5)
    state = fzero.init(params, spec)
    runtime: Any = state.runtime
    caplog.set_level(logging.WARNING, "fzero")
    for length in lengths:
        state = fzero.step(state, torch.ones(length, 4))
        assert len(runtime.programs) <= 3
        assert len(runtime.bound) <= 3
        assert len(FakeTensorMode.cache) <= 5
        fzero.evaluate(state, torch.ones(2, 4), out)
        assert len(runtime.programs) + len(runtime.evaluations) <= 3 + 1
        assert len(runtime.compiled_segments) <= 3
    assert "more than 3 programs: the one that was not used for the longest time is dropped" in caplog.text
    assert all(torch.equal(state.params[name].full(), plain.params[name].full()) for name in params)


def trained(number: int) -> None:
    """A step of a Spec of its own: the update is that of plain PyTorch."""
    rate, factor = 0.1 / (number + 1), 1.0 + number

    def scaled(p: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss(p, batch) * factor

    params = {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}
    spec = fzero.Spec(loss=scaled, optimizer=fzero.optim.sgd(rate), bucket_bytes=64 * (1 + number % 3))
    state = fzero.step(fzero.init(params, spec), torch.ones(3, 4))
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    torch.autograd.backward(scaled(leaves, torch.ones(3, 4)))
    optimizer = torch.optim.SGD(leaves.values(), lr=rate)
    optimizer.step()
    for name, leaf in leaves.items():
        torch.testing.assert_close(state.params[name].full(), leaf.detach(), rtol=1e-6, atol=1e-6)


def started(_: int) -> None:
    """A first state of one Spec, over and over."""
    fzero.init({"w": torch.ones(64, 64), "v": torch.ones(64, 2)}, STARTED)


STARTED = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3))


@pytest.mark.parametrize(
    ("what", "count"), [(trained, 20), pytest.param(trained, 50, marks=pytest.mark.acceptance), (started, 50)]
)
def test_many_in_one_process_leave_nothing(what: Any, count: int) -> None:
    """Fifty Specs and their steps, fifty first states of one: no object is left, of Python or of fzero."""
    warm = 8  # what is made once

    def left() -> int:
        assert len(FakeTensorMode.cache) <= session.MAX_FAKES
        forget_fakes(0)
        gc.collect()
        return len(gc.get_objects())

    for number in range(warm):
        what(number)
    before = left()
    for number in range(warm, count):
        what(number)
    assert left() - before < count, "objects are left by each"


OTHER = os.environ.get("FZERO_OTHER_PYTHON", "")


@pytest.mark.acceptance
@pytest.mark.skipif(not OTHER, reason="FZERO_OTHER_PYTHON names no Python with another torch")
def test_ranks_of_two_versions_of_torch_are_refused(tmp_path: Path) -> None:
    """Rank 1 runs that interpreter. Both name both versions, and end."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        """
import torch, fzero
spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), timeout=60.0)
print(torch.__version__, flush=True)
try:
    fzero.init({"w": torch.ones(2, 2)}, spec)
except fzero.DisagreementError as error:
    print(error)
"""
    )
    port, ranks = free_port(), []
    for rank, python in enumerate((sys.executable, OTHER)):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        env |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[2])}
        ranks.append(
            subprocess.Popen(
                [python, str(worker)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    versions = [text.splitlines()[0] for text in said]
    assert len({*versions}) == 2, said
    for text in said:
        assert all(f"torch {version}" in text for version in versions), said
        assert "Start all ranks from one environment" in text


SCALE = {"by": 1.0}


def scaled(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return loss(p, batch) * SCALE["by"]


def test_a_program_whose_reads_have_changed_goes_with_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = fzero.Spec(loss=scaled, optimizer=fzero.optim.sgd(1e-2), on_change="retrace")
    state = fzero.init({"w": torch.ones(4, 4), "v": torch.ones(4, 2)}, spec)
    runtime: Any = state.runtime
    assert runtime.arena.numel() == runtime.host_arena.numel() == 0, "nothing is held before there is a program"
    seen = []
    for value in (1.0, 2.0, 3.0):
        monkeypatch.setitem(SCALE, "by", value)
        state = fzero.step(state, torch.ones(2, 4))
        assert len(runtime.programs) == len(runtime.bound) == 1
        (lowered,) = runtime.programs.values()
        assert id(lowered) in runtime.bound
        seen.append(lowered.graph)
    assert len({*map(id, seen)}) == 3, "each was traced"
