"""`make bench-pipelining`: pipelines beside torch.distributed.pipelining; benchmarks/results/pipelining.json.

Both run 1F1B over the same GPT, microbatches and AdamW, one thread a rank. Every rank holds all contenders and runs
them in turn, a few steps each. Then each runs in processes of its own, where a thread reads the proportional memory
(Pss). Losses that differ by more than TOLERANCE stop the run.

On the 1 Gbit/s link fzero runs twice: with its program, and with every receive moved to right before its wait.

    python -m benchmarks.pipelining                          # 2 and 4 ranks on loopback, 2 ranks at 1 Gbit/s
    python -m benchmarks.pipelining --quick                  # whether this file works
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, summary
from benchmarks.launch import beside_others, run_ranks, variables_of
from benchmarks.link import LINKS, Link, free_port
from benchmarks.pipelining_worker import CONTENDERS, SIZES
from benchmarks.run import RESULTS, write

TOLERANCE = 1e-5
TIMEOUT_S = 600.0
BESIDE = ("torch", "fzero_p2p", "fzero_auto")
ON_LINK = ("torch", "fzero_p2p", "fzero_late")
MEMORY = ("pss_peak_steps_bytes", "pss_peak_bytes")
SHOWN = ("the most Pss of steps", "the most Pss with the start")
RATIOS = (("fzero_p2p", "torch"), ("fzero_auto", "torch"), ("fzero_p2p", "fzero_late"))  # ours, theirs


@dataclass(frozen=True)
class Case:
    """What is run: ranks, the wire between them, the model and who runs it."""

    world: int
    link: str
    size: str
    names: tuple[str, ...]


CASES = (
    Case(2, "loopback", "pipe", BESIDE),
    Case(4, "loopback", "pipe", BESIDE),
    Case(2, "1gbit", "wire", ON_LINK),
)
QUICK = (Case(2, "loopback", "tiny", BESIDE),)
LARGE = (Case(2, "loopback", "large", BESIDE), Case(4, "loopback", "large", BESIDE))


@dataclass(frozen=True)
class Plan:
    """How often: rounds of `warmup` untimed and `steps` timed steps."""

    cases: tuple[Case, ...]
    rounds: int
    warmup: int
    steps: int


Records = list[dict[str, Any]]  # by rank: the records by contender
Run = Callable[[Sequence[str], int], Records]  # contenders and rounds; of 0 rounds the memory of the one contender


def starter(case: Case, plan: Plan, link: Link) -> Run:
    """A function that runs contenders of a case in new processes."""

    def started(names: Sequence[str], rounds: int) -> Records:
        command = [sys.executable, "-m", "benchmarks.pipelining_worker", "--contenders", ",".join(names)]
        command += ["--size", case.size, "--warmup", str(plan.warmup), "--steps", str(plan.steps)]
        command += ["--rounds", str(rounds)]
        port = free_port()
        environments = [variables_of(case.world, link, rank, port) for rank in range(case.world)]
        return beside_others(lambda: run_ranks(", ".join(names), command, environments, link, TIMEOUT_S))

    return started


def run_case(case: Case, plan: Plan, run: Run) -> dict[str, Any]:
    """The figures of a case. Raises SystemExit where losses differ."""
    timed = run(case.names, plan.rounds)
    measured = {name: run([name], 0) for name in case.names} if case.link == "loopback" else {}
    curves = {name: [losses(timed, name)] for name in case.names}
    for name, records in measured.items():
        curves[name].append(losses(records, name))
    gaps = compared(curves)
    found = {name: figures(name, timed, measured.get(name)) for name in case.names}
    return {
        **asdict(case),
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "steps": plan.steps,
        "model": asdict(SIZES[case.size]) | {"parameters": SIZES[case.size].num_parameters},
        "others_cores": timed[0]["others_cores"],
        "gaps": gaps,
        "contenders": found,
        "ratios": ratios(found),
        "records": {"timed": timed, "memory": measured},
    }


def seconds(records: Records, name: str) -> list[float]:
    """The median step of each round; a step counts for its slowest rank."""
    rounds = zip(*(record[name]["step_s_rounds"] for record in records), strict=True)
    return [median(map(max, zip(*ranks, strict=True))) for ranks in rounds]


def losses(records: Records, name: str) -> list[float]:
    """The loss of each step, as the last rank knows it: in torch.distributed.pipelining no other does."""
    found: list[float] = records[-1][name]["losses"]
    return found


def compared(curves: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """How far each contender's losses are from the first one's. Raises SystemExit beyond TOLERANCE."""
    reference = next(iter(curves.values()))[0]
    gaps = {name: max(summary.gap(one, reference[: len(one)]) for one in found) for name, found in curves.items()}
    off = {name: far for name, far in gaps.items() if not far <= TOLERANCE}
    if off:
        raise SystemExit(f"losses differ by more than {TOLERANCE}; nothing is reported: {off}")
    return gaps


def figures(name: str, timed: Records, measured: Records | None) -> dict[str, Any]:
    """One contender's: the median of the rounds' medians for times, every rank's peak for memory."""
    medians = seconds(timed, name)
    found: dict[str, Any] = {
        "title": CONTENDERS[name].title,
        "step_s": median(medians),
        "step_s_rounds": medians,
        "first_step_s": max(record[name]["first_step_s"] for record in timed),
    }
    for key in MEMORY if measured else ():
        found[key] = [record[name][key] for record in measured or ()]
    return found


def ratios(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours over theirs, less than 1 where ours is better: seconds (the median of the rounds' ratios), and the memory of
    the rank that has most and of all ranks."""
    rows = []
    for ours, theirs in RATIOS:
        if ours in found and theirs in found:
            one, other = found[ours], found[theirs]
            pairs = [a / b for a, b in zip(one["step_s_rounds"], other["step_s_rounds"], strict=True)]
            row: dict[str, Any] = {"ours": ours, "theirs": theirs, "step_s": median(pairs), "step_s_rounds": pairs}
            for key in MEMORY if MEMORY[0] in one else ():
                row[key] = max(one[key]) / max(other[key])
                row[f"{key}_sum"] = sum(one[key]) / sum(other[key])
            rows.append(row)
    return rows


def show(console: Console, case: dict[str, Any]) -> None:
    """A case as a table."""
    model = f"{case['size']} ({case['model']['parameters'] / 1e6:.1f}M)"
    title = (
        f"{case['world']} ranks, {case['link']}, {model}: median of {case['rounds']} rounds of {case['steps']} steps"
    )
    table = Table(title=title)
    for column in ("contender", "step s", "rounds", "Pss of steps MB, by rank", "Pss with start MB, by rank"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for one in case["contenders"].values():
        spread = f"{min(one['step_s_rounds']):.4f}-{max(one['step_s_rounds']):.4f}"
        memory = [" ".join(f"{n / 1e6:.0f}" for n in one.get(key, ())) for key in MEMORY]
        table.add_row(one["title"], f"{one['step_s']:.4f}", spread, *memory)
    console.print(table)
    if case["others_cores"] > summary.QUIET:
        console.print(f"The machine was not ours alone: other processes took {case['others_cores']:.2f} cores")
    for row in case["ratios"]:
        memory_text = "".join(
            f", {row[key]:.2f} in {what}" for key, what in zip(MEMORY, SHOWN, strict=True) if key in row
        )
        console.print(f"{row['ours']} / {row['theirs']}: {row['step_s']:.2f} in seconds{memory_text}")


def parsed(argv: Sequence[str] | None = None) -> tuple[Plan, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 ranks of a tiny model, two rounds")
    parser.add_argument("--large", action="store_true", help="63M parameters: what is held, not the tracing")
    parser.add_argument("--world", help="ranks, of 2 and 4; commas between several (default: both)")
    parser.add_argument("--link", help=f"of {', '.join(LINKS)} (default: both)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", default="pipelining", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    for name in ("rounds", "warmup", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: needed 1 or more")
    if args.quick:
        return Plan(QUICK, 2, 1, 2), args.out if args.out != "pipelining" else "pipelining_quick"
    if args.large:
        return Plan(LARGE, args.rounds, args.warmup, args.steps), args.out
    worlds = {str(case.world) for case in CASES} if args.world is None else set(args.world.split(","))
    links = set(LINKS) if args.link is None else {args.link}
    cases = tuple(case for case in CASES if str(case.world) in worlds and case.link in links)
    if not cases:
        parser.error(f"--world {args.world} --link {args.link}: there is no such case")
    return Plan(cases, args.rounds, args.warmup, args.steps), args.out


def recorded(out: str) -> list[dict[str, Any]]:
    """The cases of an earlier record: one that is run again takes the place of the earlier."""
    path = RESULTS / f"{out}.json"
    return list(json.loads(path.read_text())["cases"]) if path.exists() else []


def main(argv: Sequence[str] | None = None) -> None:
    plan, out = parsed(argv)
    console = Console()
    console.width = max(console.width, 140)
    began = time.monotonic()
    cases = recorded(out)

    def say(text: str) -> None:
        console.print(f"[{(time.monotonic() - began) / 60:5.1f} min] {text}", markup=False, highlight=False)

    path: Path | None = None
    for case in plan.cases:
        say(f"{case.world} ranks, {case.link}, {case.size}: {', '.join(case.names)}")
        try:
            with LINKS[case.link]() as link:
                found = run_case(case, plan, starter(case, plan, link))
        except SystemExit as error:
            if not str(error).startswith("--link"):
                raise
            say(str(error))  # the others need no namespaces
            continue
        cases = [one for one in cases if (one["world"], one["link"], one["size"]) != (case.world, case.link, case.size)]
        cases.append({**found, "link_bits_per_s": link.bits_per_s, "machine": machine.describe()})
        path = write(out, {"tolerance": TOLERANCE, "cases": cases})
        show(console, found)
    say(f"written: {path}")


if __name__ == "__main__":
    main()
