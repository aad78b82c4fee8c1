"""`make bench-tensor`: tensor parallelism beside torch's DTensor and FSDP2; benchmarks/results/tensor.json.

All train one Llama of transformers, as it is, on the mesh {"dp": 2, "tp": 2}: four ranks over gloo, one thread each.
torch's side has torchtitan's plan. Every rank holds all contenders of a case and runs them in turn, a few steps each.
Then each runs in processes of its own: once while a thread reads the proportional memory (Pss), once for the seconds
of a first step and those after it. Losses of the first CLOSE steps that differ by more than TOLERANCE stop the run;
they are then in tensor_CASE_differs.json. Later ones drift apart, as those of torch's own two plans do: Adam's first
steps make much of rounding. How far is in the record.

    python -m benchmarks.tensor                              # weights in parts; and residuals along the tokens too
    python -m benchmarks.tensor --quick                      # whether this file works
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, summary
from benchmarks.launch import beside_others, run_ranks, variables_of
from benchmarks.link import Link, free_port, loopback
from benchmarks.pipelining import MEMORY, Records, recorded, seconds
from benchmarks.run import write
from benchmarks.tensor_worker import CONTENDERS, MESH, SIZES, num_parameters

TOLERANCE, CLOSE = 1e-4, 10
TIMEOUT_S = 900.0
WORLD = MESH["dp"] * MESH["tp"]
CASES = {
    "plain": ("torch", "fzero_p2p", "fzero_auto"),
    "sequence": ("torch_sp", "fzero_sp_p2p", "fzero_sp_auto"),
}
WANTED = {"step_s": 1 / 1.3, MEMORY[0]: 0.8, MEMORY[1]: 0.8, "total_s": 1.0}  # of ours over theirs, at most


@dataclass(frozen=True)
class Plan:
    """How often: rounds of `warmup` untimed and `steps` timed steps; `more` steps after a first one."""

    cases: tuple[str, ...]
    size: str
    rounds: int
    warmup: int
    steps: int
    more: int


Run = Callable[[str, Sequence[str]], Records]  # what to run and of whom; by rank: the records by contender


def starter(plan: Plan, link: Link) -> Run:
    """A function that runs contenders in new processes."""

    def started(what: str, names: Sequence[str]) -> Records:
        command = [sys.executable, "-m", "benchmarks.tensor_worker", "--contenders", ",".join(names)]
        command += ["--size", plan.size, "--what", what, "--warmup", str(plan.warmup), "--rounds", str(plan.rounds)]
        command += ["--steps", str(plan.more if what == "start" else plan.steps)]
        port = free_port()
        environments = [variables_of(WORLD, link, rank, port) for rank in range(WORLD)]
        return beside_others(lambda: run_ranks(", ".join(names), command, environments, link, TIMEOUT_S))

    return started


def run_case(case: str, plan: Plan, run: Run, say: Callable[[str], None]) -> dict[str, Any]:
    """The figures of a case. Raises SystemExit where losses differ."""
    names = CASES[case]
    loads = {"before": os.getloadavg()[0]}
    timed = run("rounds", names)
    say(f"{case}: steps are timed")
    measured = {name: run("memory", [name]) for name in names}
    say(f"{case}: memory is read")
    started = {name: run("start", [name]) for name in names}
    loads["after"] = os.getloadavg()[0]
    of = {name: {"rounds": timed, "memory": measured[name], "start": started[name]} for name in names}
    curves = {name: [losses(records, name) for records in of[name].values()] for name in names}
    try:
        gaps = compared(curves)
    except SystemExit as error:
        path = write(f"tensor_{case}_differs", {"case": case, "size": plan.size, "losses": curves, "records": of})
        raise SystemExit(f"{error}\nall losses: {path}") from None
    found = {name: figures(name, of[name]) for name in names}
    return {
        "case": case,
        "size": plan.size,
        "mesh": MESH,
        "model": asdict(SIZES[plan.size]) | {"parameters": num_parameters(SIZES[plan.size])},
        **{name: getattr(plan, name) for name in ("rounds", "warmup", "steps", "more")},
        "load": loads,
        "others_cores": max(one[0]["others_cores"] for records in of.values() for one in records.values()),
        "gaps": gaps,
        "contenders": found,
        "ratios": ratios(found),
        "records": of,
    }


def losses(records: Records, name: str) -> list[float]:
    """The loss of each step over the whole batch: the mean of the ranks', which know their own part's or the whole."""
    return [sum(some) / len(some) for some in zip(*(record[name]["losses"] for record in records), strict=True)]


def compared(curves: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """How far each contender's losses are from the first one's, in all steps. Raises SystemExit beyond TOLERANCE within
    the first CLOSE."""
    reference = max(next(iter(curves.values())), key=len)

    def gaps(steps: int) -> dict[str, float]:
        return {
            name: max(summary.gap(one[:steps][: len(reference)], reference[:steps][: len(one)]) for one in found)
            for name, found in curves.items()
        }

    off = {name: far for name, far in gaps(CLOSE).items() if not far <= TOLERANCE}
    if off:
        raise SystemExit(f"losses differ by more than {TOLERANCE}; nothing is reported: {off}")
    return gaps(len(reference))


def figures(name: str, of: Mapping[str, Records]) -> dict[str, Any]:
    """One contender's: the median of the rounds' medians for times, every rank's peak for memory."""
    medians = seconds(of["rounds"], name)
    start = [record[name] for record in of["start"]]
    after = sum(map(max, zip(*(one["step_s"] for one in start), strict=True)))
    first = max(one["first_step_s"] for one in start)
    return {
        "title": CONTENDERS[name].title,
        "step_s": median(medians),
        "step_s_rounds": medians,
        **{key: [record[name][key] for record in of["memory"]] for key in MEMORY},
        "made_s": max(one["made_s"] for one in start),
        "first_step_s": first,
        "total_s": first + after,
        "sent_bytes": {axis: max(one["sent_bytes"][axis] for one in start) for axis in MESH},
        "wire_bytes": start[0]["wire_bytes"],
    }


def ratios(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours over theirs, less than 1 where ours is better, and whether it is as wanted.

    Seconds: the median of the rounds' ratios. Memory: all ranks together.
    """
    (_, other), *ours = found.items()
    rows = []
    for name, one in ours:
        pairs = [a / b for a, b in zip(one["step_s_rounds"], other["step_s_rounds"], strict=True)]
        row = {"step_s": median(pairs), "total_s": one["total_s"] / other["total_s"]}
        row |= {key: sum(one[key]) / sum(other[key]) for key in MEMORY}
        reached = {key: row[key] <= wanted for key, wanted in WANTED.items()}
        rows.append({"ours": name, **row, "step_s_rounds": pairs, "reached": reached})
    return rows


def show(console: Console, case: Mapping[str, Any]) -> None:
    """A case as a table."""
    model = f"{case['size']} ({case['model']['parameters'] / 1e6:.1f}M)"
    title = f"{case['case']}, {case['mesh']}, {model}: median of {case['rounds']} rounds of {case['steps']} steps"
    table = Table(title=title)
    more = f"first + {case['more']} s"
    columns = ("contender", "step s", "rounds", "Pss of steps MB, by rank", "with start", "made s", "first s", more)
    for column in (*columns, "sent MB, dp", "tp", "wire MB"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for one in case["contenders"].values():
        spread = f"{min(one['step_s_rounds']):.3f}-{max(one['step_s_rounds']):.3f}"
        memory = [" ".join(f"{n / 1e6:.0f}" for n in one[key]) for key in MEMORY]
        times = [f"{one[key]:.1f}" for key in ("made_s", "first_step_s", "total_s")]
        sent = [f"{n / 1e6:.1f}" for n in (*one["sent_bytes"].values(), one["wire_bytes"])]
        table.add_row(one["title"], f"{one['step_s']:.3f}", spread, *memory, *times, *sent)
    console.print(table)
    console.print(f"Load before {case['load']['before']:.2f}; others took at most {case['others_cores']:.2f} cores")
    for row in case["ratios"]:
        cells = [f"{key} {row[key]:.2f} ({'reached' if row['reached'][key] else 'NOT reached'})" for key in WANTED]
        console.print(f"{row['ours']}: {', '.join(cells)}")


def parsed(argv: Sequence[str] | None = None) -> tuple[Plan, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--size", choices=SIZES, default="llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--more", type=int, default=50, help="steps after the first, for their seconds together")
    parser.add_argument("--out", default="tensor", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    for name in ("rounds", "warmup", "steps", "more"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: needed 1 or more")
    cases = tuple(CASES) if args.case is None else (args.case,)
    if args.quick:
        return Plan(cases, "tiny", 2, 1, 2, 3), args.out if args.out != "tensor" else "tensor_quick"
    return Plan(cases, args.size, args.rounds, args.warmup, args.steps, args.more), args.out


def main(argv: Sequence[str] | None = None) -> None:
    plan, out = parsed(argv)
    console = Console()
    console.width = max(console.width, 180)
    began = time.monotonic()
    cases = recorded(out)

    def say(text: str) -> None:
        console.print(f"[{(time.monotonic() - began) / 60:5.1f} min] {text}", markup=False, highlight=False)

    for case in plan.cases:
        say(f"{case}, {plan.size}: {', '.join(CASES[case])}")
        with loopback() as link:
            found = run_case(case, plan, starter(plan, link), say)
        cases = [one for one in cases if (one["case"], one["size"]) != (case, plan.size)]
        cases.append({**found, "machine": machine.describe()})
        path = write(out, {"tolerance": TOLERANCE, "wanted": WANTED, "cases": cases})
        show(console, found)
    say(f"written: {path}")


if __name__ == "__main__":
    main()
