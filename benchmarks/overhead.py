"""Microseconds of fzero's own Python per op of a program: the executor runs, what it calls does not.

The launch-bound model, rank 0 of two. The program runs once for real; then its segments are replaced by functions that
return what they returned, its transfers by nothing, and the same program runs again and again. What is left is the
executor: looking up buffers and views, allocating, calling, freeing. The loop is timed whole, the best of many runs.

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
from benchmarks.gpu import Filled, share_of
from benchmarks.model import SIZES, Batch, make_batch
from benchmarks.run import write
from fzero.runtime.handlers import Rank, steps

WANTED_US = 15.0


class Silent(Filled):
    """A comm that moves nothing."""

    def start(self, name: str, one: Any, tensors: list[torch.Tensor]) -> None:
        """Nothing travels."""


def stubbed(zero: int, size: str, dtype: str) -> tuple[Any, Callable[[], None]]:
    """(the program, a function that runs it with everything stubbed). The one place that knows the executor."""
    setup = Setup(SIZES[size], dtype)
    state = share_of(setup, zero, 2)
    runtime, batch = state.runtime, make_batch(setup.size, 0, 0)
    program = runtime.compiled(batch).program
    memory = {**runtime.memory, **_inputs(program, batch)}
    outputs: dict[str, Any] = {}

    def recorded(key: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            outputs[key] = call(*given)
            return outputs[key]

        return run

    def play(rank: Rank) -> None:
        with torch.no_grad():
            for _ in steps(rank):
                pass

    first = Rank(program, 0, runtime.comm, memory)
    first.calls = {key: recorded(key, call) for key, call in first.calls.items()}
    play(first)
    quiet: dict[str, Any] = {key: lambda *given, value=value: value for key, value in outputs.items()}

    def run() -> None:
        rank = Rank(program, 0, Silent(0, 2), memory)
        rank.calls = quiet
        play(rank)

    return program, run


def _inputs(program: Any, batch: Batch) -> dict[str, torch.Tensor]:
    names = [name for name, buffer in program.buffers.items() if buffer.kind == "batch"]
    return dict(zip(names, batch.values(), strict=True))


def measure(zero: int, size: str, dtype: str, repeats: int) -> dict[str, Any]:
    program, run = stubbed(zero, size, dtype)
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    per_op = {"best": min(seconds) / len(program.ops) * 1e6, "median": median(seconds) / len(program.ops) * 1e6}
    return {"ops": len(program.ops), "kinds": Counter(one.kind for one in program.ops), "us_per_op": per_op}


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
