"""Microseconds of fzero's own Python per op of a program: the executor runs, what it calls does not.

The launch-bound model, rank 0 of two. The program is bound as for a real step; then every call of every op is replaced
by one that does nothing, and the same loop over them is timed. What is left is the executor: the loop, the calls, the
place in the program it keeps for errors. Binding happens once, and is shown too.

    python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.contenders import Setup
from benchmarks.gpu import share_of
from benchmarks.model import SIZES, make_batch
from benchmarks.run import write
from fzero.session.session import session_of

WANTED_US = 15.0


def stubbed(zero: int, size: str, dtype: str) -> tuple[Any, Callable[[], None], float]:
    """(the program, a function that runs it with everything stubbed, seconds that binding took). The one place that
    knows the executor."""
    setup = Setup(SIZES[size], dtype)
    state = share_of(setup, zero, 2)
    lowered = session_of(state).compiled(make_batch(setup.size, 0, 0))
    began = time.perf_counter()
    bound = session_of(state).bind(lowered)
    seconds = time.perf_counter() - began
    bound.calls = [[_nothing] * len(calls) for calls in bound.calls]
    return lowered.program, bound.issue, seconds


def _nothing() -> None:
    """Nothing is computed, and nothing travels."""


def measure(zero: int, size: str, dtype: str, repeats: int) -> dict[str, Any]:
    program, run, binding = stubbed(zero, size, dtype)
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    per_op = {"best": min(seconds) / len(program.ops) * 1e6, "median": median(seconds) / len(program.ops) * 1e6}
    return {
        "ops": len(program.ops),
        "kinds": Counter(op.kind for op in program.ops),
        "us_per_op": per_op,
        "binding_s": binding,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="deep", choices=SIZES)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", default="overhead", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    rows = {}
    for zero in range(4):
        rows[f"fzero{zero}"] = one = measure(zero, args.size, args.dtype, args.repeats)
        kinds = ", ".join(f"{count} {kind}" for kind, count in one["kinds"].items())
        us = one["us_per_op"]
        console.print(
            f"zero={zero}: {us['median']:.1f} us an op (best {us['best']:.1f}; wanted at most {WANTED_US:.0f}); "
            f"{one['ops']} ops: {kinds}",
            highlight=False,
        )
    console.print(f"written: {write(args.out, {'machine': machine.describe(), 'size': args.size, 'rows': rows})}")


if __name__ == "__main__":
    main()
