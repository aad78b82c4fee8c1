"""What fzero's own program of a published step is simulated to take, by the presets alone.

    python -m benchmarks.by_program rows.csv --rows 8 --seed 3

`benchmarks.calibration` puts a step together from a layer's work, as another software would run it. Here the program
is fzero's, lowered as for a plan. So only rows of a software that fuses loops and has today's attention may agree;
others are left out, and so are rows with context parallelism, fp8 or several chunks on a role. Of many microbatches two
numbers are lowered: each further one takes the difference.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import fzero
from benchmarks.calibration import preset_of
from benchmarks.published import Published, loss_of, parameters, published, rules_of
from fzero.compile.resolve import mesh_of
from fzero.hardware import load
from fzero.planner.deep import takes
from fzero.planner.problem import problem_of
from fzero.planner.programs import by_rates

MORE = 2  # microbatches beyond the roles, from which on each takes as long as the one before


def seconds(row: Published) -> float:
    """Of a step."""
    few = row.pp + MORE
    if row.microbatches <= few + 1:
        return _lowered(row, row.microbatches)
    first = _lowered(row, few)
    return first + (row.microbatches - few) * (_lowered(row, few + 1) - first)


def _lowered(row: Published, microbatches: int) -> float:
    shape = row.shape
    mesh = {axis: n for axis, n in (("pp", row.pp), ("dp", row.dp), ("tp", shape.tp)) if n > 1 or axis == "dp"}
    spec = fzero.Spec(
        loss=loss_of(shape), optimizer=fzero.optim.adamw(1e-4), mesh=mesh, zero=row.zero, precision="bf16",
        clip_norm=1.0, remat="full" if shape.recomputed else "none", microbatches=microbatches, shard=rules_of(shape),
        sequence="tp" if shape.sequence and shape.tp > 1 else None,
        reduce="end" if microbatches > 1 and row.zero < 2 else None,
    )  # fmt: skip
    tokens = torch.empty(shape.rows * microbatches * row.dp, shape.length, dtype=torch.int64, device="meta")
    params = parameters(shape, row.layers)
    problem = problem_of(spec, params, {"x": tokens, "y": tokens}, row.world, load(preset_of(row)), None)
    over = mesh_of(problem.spec)
    return takes(problem, problem.spec, over, by_rates(problem.machine, over, once=True)).seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each row's error, and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--rows", type=int, help="so many, drawn; all without it")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    console, errors = Console(width=120), []
    rows = [row for row in published(given.table) if row.cp == row.chunks == 1 and not row.fp8]
    rows = [row for row in rows if row.stack.fused and row.stack.attention == 1 and not row.stack.eager]
    random.Random(given.seed).shuffle(rows)
    for row in rows[: given.rows]:
        found = seconds(row)
        errors.append(found / row.seconds - 1)
        where = f"{row.world} x {row.device}, pp {row.pp}, tp {row.shape.tp}, {row.microbatches} microbatches"
        console.print(f"{errors[-1]:+7.1%}  {row.seconds:9.4g} s  {row.name} on {where}", highlight=False)
    mean, bias = statistics.mean(map(abs, errors)), statistics.mean(errors)
    console.print(f"mean {mean:.1%}, bias {bias:+.1%}, {len(errors)} rows", highlight=False)


if __name__ == "__main__":
    main()
