"""Train a byte-level GPT as a pipeline: two roles of the model, each on two ranks that split the batch.

One command starts four local ranks on the mesh {"pp": 2, "dp": 2}. The model and the loss are those of `train_gpt.py`:
nothing in them knows of a pipeline. Before the run it prints who does what when in a step; after it the speed, and the
bytes that every rank holds.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
import ranks
import text
from fzero.pipeline import SCHEDULES, Schedule
from gpt import init_gpt, loss_fn, sizes

EXAMPLES = """
examples:
  python examples/pipeline_gpt.py                              four ranks, two roles, 1f1b
  python examples/pipeline_gpt.py --schedule zb-v              another order of work, the same numbers
  python examples/pipeline_gpt.py --pp 4 --world 4             four roles
  python examples/pipeline_gpt.py --pp 1 --world 2             no pipeline, the same numbers
  torchrun --nproc-per-node 4 examples/pipeline_gpt.py         torchrun's ranks instead of its own

results, in --out:
  timeline.svg  who does what when in a step
  rankN.log     what ranks other than 0 printed
"""

COLUMNS = 3  # of text for the forward of one chunk


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pipeline_gpt.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--world", type=int, default=4, metavar="N", help="ranks to start on this machine (4)")
    add(
        "--pp", type=int, default=2, metavar="N", help="roles that share the model; the other ranks split the batch (2)"
    )
    add("--schedule", default="1f1b", choices=SCHEDULES, help="the order of work (1f1b)")
    add("--zero", type=int, default=1, choices=range(4), help="ZeRO stage among the ranks of a role (1)")
    add("--size", default="small", choices=sizes(1), help="0.1M, 0.8M or 85M parameters (small)")
    add("--steps", type=int, default=60, metavar="N", help="optimizer steps (60)")
    add("--batch", type=int, default=16, metavar="N", help="sequences per step, over all ranks (16)")
    add("--seq", type=int, default=128, metavar="N", help="bytes per sequence (128)")
    add("--microbatches", type=int, default=4, metavar="N", help="parts of a batch that travel on their own (4)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--out", type=Path, default=Path("runs/pipeline_gpt"), metavar="DIR", help="for results (runs/pipeline_gpt)")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and the batches (0)")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if args.world % args.pp:
        parser.error(f"--pp {args.pp}: needed a divisor of --world {args.world}")
    if args.batch % (args.world // args.pp * args.microbatches):
        parts = f"{args.world // args.pp} ranks x {args.microbatches} microbatches"
        parser.error(f"--batch {args.batch} cannot be cut into {parts}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    """The whole job, as one rank does it."""
    torch.set_num_threads(1)
    mesh = {"pp": args.pp, "dp": args.world // args.pp}
    spec = fzero.Spec(
        loss=loss_fn,
        optimizer=fzero.optim.adamw(3e-3),
        mesh=mesh,
        pipeline=args.schedule,
        zero=args.zero,
        microbatches=args.microbatches,
        clip_norm=1.0,
    )
    config = sizes(args.seq)[args.size]
    corpus = text.load(args.data, args.seq)
    tokens = fzero.data.Tokens(corpus.train, sequence=args.seq, seed=args.seed)
    batches = tokens.batches(args.batch, mesh=mesh)  # ranks that differ in pp alone are given the same part

    def init(key: Tensor) -> Any:
        return init_gpt(key, config)

    state = fzero.init(init, spec, key=fzero.random.key(args.seed))
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        lowered = fzero.lower(spec, init, next(tokens.batches(args.batch, mesh=mesh)), world_size=args.world)
        print(f"text: {corpus.description}\nmesh: {mesh}")
        if lowered.schedule is not None and args.pp > 1:
            (args.out / "timeline.svg").write_text(lowered.timeline())
            print(drawn(lowered.schedule), flush=True)
    began = 0.0
    for number, batch in enumerate(itertools.islice(batches, args.steps)):
        if number == 1:
            began = time.perf_counter()  # the first step traces and lowers
        state = fzero.step(state, batch)
        loss = float(state.metrics["loss"])
        if rank == 0 and (state.step == 1 or state.step % max(1, args.steps // 10) == 0):
            print(f"step {state.step:>5}  loss {loss:.3f}", flush=True)
    seconds = time.perf_counter() - began
    held = ranks.every_rank(state.held_bytes)
    if rank == 0:
        if args.steps > 1:
            print(f"{(args.steps - 1) * args.batch * args.seq / seconds:,.0f} tokens/s")
        print(table(held, mesh["dp"]))
        if args.pp > 1:
            print(f"in {args.out}: timeline.svg")


def drawn(schedule: Schedule) -> str:
    """The timeline as text, a row for each role: F forward, B backward, or its halves I and W; microbatches by number.

    >>> print(drawn(Schedule.parse("schedule gpipe chunks 0 1\\nrole 0 F0.0 B0.0\\nrole 1 F1.0 B1.0")))
    gpipe: idle 50.0 % of the time, for backwards of twice a forward
    role 0 |F0 .........B0    |
    role 1 |...F0 B0    ......|
    """
    rows = schedule.timeline()
    shortest = min(slot.stop - slot.start for row in rows for slot in row)
    length = round(max(row[-1].stop for row in rows) / shortest) * COLUMNS
    lines = [f"{schedule.name}: idle {100 * schedule.idle_share():.1f} % of the time, for backwards of twice a forward"]
    for role, row in enumerate(rows):
        line = ""
        for slot in row:
            start, stop = (round(when / shortest) * COLUMNS for when in (slot.start, slot.stop))
            chunk = "'" if slot.action.chunk != schedule.role_of.index(role) else ""
            word = f"{slot.action.kind}{slot.action.microbatch}{chunk}"
            line = line.ljust(start, ".") + word[: stop - start].ljust(stop - start)
        lines.append(f"role {role} |{line.ljust(length, '.')}|")
    if schedule.chunks > schedule.roles:
        lines.append("(' marks the later chunks of a role)")
    return "\n".join(lines)


def table(held: Sequence[dict[str, int]], ranks_of_a_role: int) -> str:
    """The bytes that ranks hold between steps, by role and kind."""
    kinds = list(held[0])
    lines = ["held bytes".ljust(16) + "".join(kind.rjust(14) for kind in kinds)]
    for rank, row in enumerate(held):
        role, place = divmod(rank, ranks_of_a_role)
        lines.append(f"role {role}, dp {place}".ljust(16) + "".join(f"{row[kind]:>14,}" for kind in kinds))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
