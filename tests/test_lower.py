"""Ahead of time: a 124M-parameter GPT for 64 ranks, without its parameters, a device or a process group."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import cases
import torch

import fzero


def test_lower_of_124m_parameters_for_64_ranks_is_quick_and_allocates_nothing() -> None:
    """In a process of its own, so that its peak memory can be read: far below the 498 MB of the parameters alone."""
    script = """
        import json, resource, sys, time
        import torch, torch.distributed as dist
        torch.set_num_threads(1)
        import cases, fzero
        init, loss = cases.gpt(50304, 768, 12, 12)
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(3e-4), zero=3, clip_norm=1.0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        lowered = fzero.lower(spec, init, cases.tokens(1, 256, 50304), world_size=64)
        seconds = time.perf_counter() - start
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        params = sum(torch.Size(l.shape).numel() for l in lowered.plan.leaves if l.path.startswith("params/"))
        print(json.dumps({"seconds": seconds, "grown_kb": grown, "params": params, "state": lowered.memory.state,
                          "group": dist.is_initialized(), "peak": lowered.memory.peak}))
    """
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=600, cwd=here, check=False,
        env={"PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert 123e6 < row["params"] < 126e6
    assert row["seconds"] < 30, row
    assert not row["group"]
    assert row["grown_kb"] * 1024 < 0.5 * 4 * row["params"], row
    assert row["state"] < 4 * 3 * row["params"] / 64 * 1.01


def test_lower_reads_shapes_only() -> None:
    init, loss = cases.gpt(depth=2)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=3)
    real = init(fzero.random.key(0))
    like = fzero.tree.map(lambda x: torch.empty_like(x, device="meta"), real)
    batch = cases.tokens(2, 32, 512)
    texts = {
        str(fzero.lower(spec, params, batch, world_size=4).program)
        for params in (real, like, init)
    }  # fmt: skip
    assert len(texts) == 1


def test_the_program_says_why_in_leaf_paths_phase_and_source_line() -> None:
    program = cases.lowered(zero=3).program
    text = str(program)
    line = cases.layers_loss.__code__.co_firstlineno + 3
    assert f"forward layers.0 (cases.py:{line})" in text
    assert "backward layers.1" in text
    assert "update layers/0/w .. layers/0/b" in text
    assert "live " in text
    assert "wire " in text
