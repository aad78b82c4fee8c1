"""How long the first step takes: fresh processes, empty caches, one process alone on the machine.

fzero (capture, planning, compilation and the step itself) against `torch.compile` of the whole model with fused AdamW;
12 layers, and 48 of the same width, which should not take four times as long. The steady step is shown beside it, for
the first one contains it.

    python -m benchmarks.compile_time
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import launch, machine
from benchmarks.contenders import CONTENDERS
from benchmarks.link import loopback
from benchmarks.model import SIZES
from benchmarks.run import TIMEOUT_S, write


def first_step(contender: str, size: str, dtype: str) -> dict[str, float]:
    """{"init_s", "first_step_s", "step_s"} of a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache, loopback() as link:
        job = launch.Job(contender, size, dtype, "default", warmup=2, steps=3, world=1, cache=Path(cache))
        record = launch.run(job, link, TIMEOUT_S)[0]
    return {"init_s": record["init_s"], "first_step_s": record["first_step_s"], "step_s": median(record["step_s"])}


def compare(rows: dict[str, dict[str, dict[str, Any]]], contenders: Sequence[str], sizes: Sequence[str]) -> list[str]:
    """The two ratios that are promised: depth against depth, and fzero against torch.compile."""
    lines = []
    for name in contenders:
        if {"shallow", "deep"} <= set(sizes):
            ratio = rows["deep"][name]["first_step_s"] / rows["shallow"][name]["first_step_s"]
            lines.append(f"{CONTENDERS[name].title}: 48 layers / 12 layers {ratio:.2f}x, wanted at most 1.2x of fzero")
    for size in sizes:
        theirs = rows[size].get("floor_compiled")
        for name in contenders:
            if theirs and name.startswith("fzero"):
                ratio = rows[size][name]["first_step_s"] / theirs["first_step_s"]
                wanted = ", wanted at most 0.5x" if SIZES[size].layers == 12 else ""
                lines.append(f"{size}: {CONTENDERS[name].title} / torch.compile {ratio:.2f}x{wanted}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="shallow,deep,gpt2", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--only", default="floor_compiled,fzero3", help="contenders")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", default="compile_time", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    console = Console()
    sizes, contenders = args.size.split(","), args.only.split(",")
    found: dict[str, dict[str, list[dict[str, float]]]] = {size: {name: [] for name in contenders} for size in sizes}
    for _ in range(args.rounds):
        for size in sizes:
            for name in contenders:
                one = first_step(name, size, args.dtype)
                found[size][name].append(one)
                console.print(f"{size} {name}: first step {one['first_step_s']:.2f} s, later {one['step_s']:.3f} s")
    rows = {
        size: {
            name: {k: median(one[k] for one in runs) for k in runs[0]} | {"rounds": runs} for name, runs in by.items()
        }
        for size, by in found.items()
    }
    lines = compare(rows, contenders, sizes)
    console.print("\n".join(lines))
    record = {"machine": machine.describe(), "dtype": args.dtype, "sizes": rows, "ratios": lines}
    console.print(f"written: {write(args.out, record)}")


if __name__ == "__main__":
    main()
