"""Ahead of time: a 124M-parameter GPT for 64 ranks, without its parameters, a device or a process group."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from helpers import gloo, values

import fzero
from fzero.ir.program import Program
from fzero.passes import PASSES, Options
from fzero.verify.rules import RULES

MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: cases.tied(50304, 768, 12),
    "gpt": lambda: cases.gpt(50304, 768, 12, 12),
}


def test_lower_of_46m_parameters_for_64_ranks_allocates_nothing() -> None:
    allocates_nothing("tied", 45.7e6)


@pytest.mark.acceptance
def test_lower_of_124m_parameters_for_64_ranks_allocates_nothing() -> None:
    allocates_nothing("gpt", 124e6)


def allocates_nothing(model: str, size: float) -> None:
    """In a process of its own, so that its peak memory can be read: far below that of the parameters alone."""
    (row,) = values(gloo(1, lowered_for_64_ranks, model))
    assert row["params"] == pytest.approx(size, rel=0.01)
    assert row["seconds"] < 300, "a hang"
    assert not row["group"]
    assert row["grown_kb"] * 1024 < 0.5 * 4 * row["params"], row
    assert row["state"] < 4 * 3 * row["params"] / 64 * 1.01


def lowered_for_64_ranks(model: str) -> dict[str, Any]:
    init, loss = MODELS[model]()
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(3e-4), zero=3, clip_norm=1.0)
    before, start = peak_kb(), time.perf_counter()
    lowered = fzero.lower(spec, init, cases.tokens(1, 256, 50304), world_size=64)
    return {
        "seconds": time.perf_counter() - start,
        "grown_kb": peak_kb() - before,
        "params": sum(math.prod(leaf.shape) for leaf in lowered.plan.leaves if leaf.path.startswith("params/")),
        "state": lowered.memory.state,
        "group": dist.is_initialized(),
    }


def peak_kb() -> int:
    """Of this process alone: getrusage would give the peak of the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_lower_reads_shapes_only() -> None:
    init, loss = cases.tied(512, 128)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3, momentum=0.9), zero=3)
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


def lines_run(work: Callable[[], Any]) -> tuple[int, Any]:
    """(how many lines of fzero's code `work()` runs, what it returns): the same on every machine, however loaded."""
    ours, count, before = str(Path(fzero.__file__).parent), 0, sys.gettrace()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename.startswith(ours) else None)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return count, result


def work_by_pass_and_rule(program: Program, options: Options) -> dict[str, int]:
    """The lines that each pass runs on what the ones before it left, and each rule of verify on the last; but for what
    is made once for each segment and kept."""
    found: dict[str, int] = {}
    for name, run, _ in PASSES:
        run(program, options)
        found[name], program = lines_run(lambda run=run, program=program: run(program, options))
    for name, rule in RULES.items():
        found[f"verify: {name}"], faults = lines_run(lambda rule=rule: list(rule(program)))
        assert not faults
    return found


LINEAR: dict[str, dict[str, Any]] = {
    "layers of a bucket each, computed again": {"zero": 3, "remat": "full", "bucket_bytes": 1 << 12},
    "layers in one bucket": {"zero": 1, "loss": cases.bf16_loss, "bucket_bytes": 1 << 30},
    "microbatches": {"zero": 3, "clip_norm": 1.0, "bucket_bytes": 1 << 12},
}


@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.sampled(2)
def test_the_work_of_passes_and_rules_is_linear(case: str, whole: bool) -> None:
    """Of three sizes, each twice the one before, the second step is twice the first, whatever all have in common. What
    looks at each op for each op makes it up to four times."""
    found = []
    for size in (2, 4, 8) if whole else (1, 2, 4):
        depth, microbatches = (1, size) if case == "microbatches" else (size, 2)
        options = {"reduce": "each", "microbatches": microbatches, **LINEAR[case]}
        program = cases.naive(params=cases.layers(8, depth), **options)
        found.append(work_by_pass_and_rule(program, Options(remat=cases.spec(**options).memory.remat_rules)))
    small, middle, large = found
    growth = {name: (large[name] - middle[name]) / max(middle[name] - small[name], 1) for name in small}
    assert all(times < 2.1 for times in growth.values()), growth
