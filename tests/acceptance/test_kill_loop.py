"""The kill loop at length: 200 kills in all, and torchrun itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kills import kill_loop

pytestmark = pytest.mark.acceptance
TORCHRUN_KILLS = 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_fifty_kills_change_no_bit(seed: int, tmp_path: Path) -> None:
    counts = kill_loop(tmp_path, kills=50, steps=120, seed=seed)
    print(dict(counts))
    assert counts["kills"] == 50
    assert counts["runs"] >= 2
    assert min(counts["starting"], counts["stepping"], counts["saving"]) > 0, "some phase was never hit"
    assert counts["late"] == 0, "a survivor did not end when it was told to"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["onebit", "sign"])
def test_fifty_kills_on_both_sides_of_a_switch_change_no_bit(form: str, tmp_path: Path) -> None:
    """What codes have lost on each rank is in the checkpoints, and a resume lands in the right phase."""
    counts = kill_loop(tmp_path, kills=50, steps=120, seed=5, form=form)
    print(dict(counts))
    assert counts["kills"] == 50
    assert min(counts["starting"], counts["stepping"], counts["saving"]) > 0, "some phase was never hit"
    assert counts["late"] == 0, "a survivor did not end when it was told to"


@pytest.mark.timeout(600)
def test_fifty_kills_of_offloaded_training_change_no_bit_and_leave_no_file(folder: Path) -> None:
    """All of the state lies on disk. The bits are those of a run without offload."""
    (folder / "nvme").mkdir()
    counts = kill_loop(folder, kills=50, steps=120, seed=4, nvme=folder / "nvme")
    print(dict(counts))
    assert counts["kills"] == 50
    assert min(counts["starting"], counts["stepping"], counts["saving"]) > 0, "some phase was never hit"
    assert counts["late"] == 0, "a survivor did not end when it was told to"


def test_torchrun_brings_a_killed_rank_back(tmp_path: Path) -> None:
    """`torchrun --max-restarts=2`: rank 1 kills itself twice, at other steps; nothing is lost or repeated."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tests.parent), str(tests / "support"), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ends = []
    for name, restarts in (("disturbed", TORCHRUN_KILLS), ("undisturbed", 0)):
        done = subprocess.run(
            [*command, f"--max-restarts={restarts}", str(script), str(tmp_path / name), str(restarts)],
            env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        ends.append([line for line in lines if line.startswith("ends")])
        starts = [int(line.split()[1]) for line in lines if line.startswith("starts")]
        assert len(starts) == 1 + restarts, "it was started as often as it was killed"
        assert starts == sorted(set(starts)), "and each time further on"
    assert len(ends[0]) == 1
    assert ends[0] == ends[1], "not the bits of the run that nobody disturbed"


def test_the_demo_stops_at_sigterm_and_resumes(tmp_path: Path) -> None:
    """SIGTERM to the launcher while the demo trains; `--resume` ends with the parameters of an undisturbed run."""
    script = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    def demo(out: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), "--size", "tiny", "--steps", "600", "--out", str(out), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"}, **pipes, text=True)

    stopped = demo(tmp_path / "stopped")
    assert stopped.stdout is not None
    while not (line := stopped.stdout.readline()).startswith("step "):
        assert line, stopped.communicate()
    stopped.send_signal(signal.SIGTERM)
    printed, error = stopped.communicate(timeout=600)
    assert stopped.returncode == 130
    assert "--resume goes on from the last save" in printed
    assert "all 2 ranks have ended" in error
    resumed, undisturbed = demo(tmp_path / "stopped", "--resume"), demo(tmp_path / "undisturbed")
    found = []
    for process in (resumed, undisturbed):
        printed, error = process.communicate(timeout=900)
        assert process.returncode == 0, error
        found.append([line for line in printed.splitlines() if line.startswith("digest of the parameters")])
        assert ("going on after step" in printed) == (process is resumed)
    assert found[0] == found[1]
    assert len(found[0]) == 1


JOB = """
import hashlib, os, signal, sys
from pathlib import Path
import numpy as np, torch, kills, fzero
from fzero import tree

out, times = Path(sys.argv[1]), int(sys.argv[2])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
spec = fzero.Spec(loss=kills.loss, optimizer=fzero.optim.adamw(1e-2), zero=3, clip_norm=1.0)
tokens = fzero.data.Tokens(np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint8), sequence=8)
with fzero.Checkpointer(out, every=2, keep=2) as saver:
    state = saver.resume(kills.init, spec, key=fzero.random.key(3))
    batches = tokens.batches(4, position=saver.extra.get("position", 0))
    if rank == 0:
        print("starts", state.step, flush=True)
    first = state.step
    while state.step < 60:
        state = fzero.step(state, next(batches))
        saver.after(state, {"position": batches.position})
        if rank == 1 and attempt < times and (saver.saved or 0) > first and state.step > first + 7 + attempt:
            os.kill(os.getpid(), signal.SIGKILL)
paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
if rank == 0:
    whole = b"".join(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for leaf in leaves)
    print("ends", *paths, hashlib.sha256(whole).hexdigest(), flush=True)
torch.distributed.destroy_process_group()
"""
