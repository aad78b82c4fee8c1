"""`make bench`: contenders side by side, in rounds; a table, and benchmarks/results/<name>.json.

Every case is (size, dtype, link, malloc). In each round every contender runs in turn as fresh processes, so that what
the machine does meanwhile meets all of them; the order is rotated from round to round. The first round also measures
memory and settles whether the loss curves agree: where one does not, nothing is reported. See README.md beside this.

    python -m benchmarks.run                                     # small and gpt2, fp32, loopback
    python -m benchmarks.run --size gpt2 --dtype bf16 --link 1gbit --only fzero3,fsdp,floor
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import launch, machine, summary
from benchmarks.contenders import BF16, CONTENDERS
from benchmarks.launch import Job, RunError
from benchmarks.link import LINKS, Link
from benchmarks.model import SIZES
from benchmarks.ratios import ratios

RESULTS = machine.ROOT / "benchmarks" / "results"
AXES: dict[str, tuple[Iterable[str], str]] = {  # what each may be, and its default
    "size": (SIZES, "small,gpt2"),
    "dtype": (tuple(summary.TOLERANCE), "fp32"),
    "link": (LINKS, "loopback"),
    "malloc": (launch.MALLOC, "default"),
}
STEPS = {"tiny": 3, "small": 20, "gpt2": 4, "gpt2_short": 4, "medium": 3, "deep": 10, "shallow": 10}
SECONDS = {
    "tiny": 0.01,
    "small": 0.35,
    "gpt2": 5.0,
    "gpt2_short": 2.5,
    "medium": 14.0,
    "deep": 0.6,
    "shallow": 0.15,
}  # about a step, for the estimate alone
START_S = 12.0  # about a process's imports, parameters and first step
COMPILE_S = 40.0
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    size: str
    dtype: str
    link: str
    malloc: str


@dataclass(frozen=True)
class Plan:
    cases: tuple[Case, ...]
    names: tuple[str, ...]
    rounds: int
    warmup: int
    steps: int | None  # None: STEPS of the size
    retries: int = 1  # of a process during which others were busy

    def steps_of(self, case: Case) -> int:
        return self.steps or STEPS[case.size]

    def estimate_s(self) -> float:
        """Seconds, roughly: what a run of this plan took on two cores of an AMD Zen 5 server."""
        total = 0.0
        for case, name in itertools.product(self.cases, self.names):
            steps = self.rounds * (self.warmup + self.steps_of(case)) + 2
            slower = {"1gbit": 2.0, "100mbit": 9.0}.get(case.link, 1.0) if CONTENDERS[name].talks else 1.0
            starts = self.rounds * START_S + (COMPILE_S if CONTENDERS[name].compiled else 0.0)
            total += starts + steps * SECONDS[case.size] * slower
        return total


def run_case(case: Case, plan: Plan, link: Link, say: Callable[[str], None]) -> dict[str, Any]:
    """The figures of a case. Raises SystemExit where loss curves disagree."""
    warmup, steps = plan.warmup, plan.steps_of(case)

    def started(name: str, memory: bool) -> summary.Records:
        job = Job(name, case.size, case.dtype, case.malloc, warmup, steps, memory)
        found = launch.run(job, link, TIMEOUT_S)
        for _ in range(plan.retries):
            if found[0]["others_cores"] <= summary.QUIET:
                break
            say(f"  {name}: others took {found[0]['others_cores']:.2f} cores; once more")
            found = min(found, launch.run(job, link, TIMEOUT_S), key=lambda records: records[0]["others_cores"])
        return found

    say(f"{case}: the reference's losses")
    job = Job("reference", case.size, case.dtype, case.malloc, warmup, steps)
    reference = summary.curve(launch.run(job, link, TIMEOUT_S))
    records: dict[str, list[summary.Records]] = {name: [] for name in plan.names}
    failed: dict[str, str] = {}
    for number in range(plan.rounds):
        first = number % len(plan.names)
        for name in (*plan.names[first:], *plan.names[:first]):
            if name in failed:
                continue
            try:
                found = started(name, memory=number == 0)
            except RunError as error:
                failed[name] = str(error)
                say(f"  {name} failed: {error}")
                continue
            records[name].append(found)
            times = summary.step_times(found)
            say(f"  round {number + 1}: {name} {sorted(times)[len(times) // 2]:.3f} s a step")
    losses = compared(case.dtype, {name: runs for name, runs in records.items() if runs}, reference)
    figures = {name: summary.figures(name, case.size, runs) for name, runs in records.items() if runs}
    bad = {name: {"title": CONTENDERS[name].title, "failed": why} for name, why in failed.items()}
    return {
        **asdict(case),
        "rounds": plan.rounds,
        "warmup": warmup,
        "steps": steps,
        "link_bits_per_s": link.bits_per_s,
        "model": asdict(SIZES[case.size]) | {"parameters": SIZES[case.size].num_parameters},
        "losses": losses,
        "contenders": {name: bad.get(name) or figures[name] for name in plan.names},
        "ratios": ratios(asdict(case), {n: f for n, f in figures.items() if n not in bad}),
        "records": records,
    }


def compared(dtype: str, records: dict[str, list[summary.Records]], reference: Sequence[float]) -> dict[str, Any]:
    """How far each loss curve is from the reference's. Raises SystemExit where one is further than the tolerance.

    Contenders without communication are listed too: how far they are says what the check would see. So are those that
    round what travels.
    """
    tolerance = summary.TOLERANCE[dtype]
    gaps = {name: max(summary.gap(summary.curve(found), reference) for found in runs) for name, runs in records.items()}
    off = [
        name for name, far in gaps.items() if CONTENDERS[name].talks and not CONTENDERS[name].coded and far > tolerance
    ]
    if off:
        shown = "\n".join(f"{name}: {gaps[name]:.2g}, {summary.curve(records[name][0])}" for name in off)
        raise SystemExit(f"loss curves disagree by more than {tolerance} ({dtype}); nothing is reported\n{shown}")
    curves = {name: summary.curve(runs[0]) for name, runs in records.items()}
    return {"tolerance": tolerance, "reference": list(reference), "gaps": gaps, "curves": curves}


def chosen(only: str | None) -> tuple[str, ...]:
    """The contenders that --only names, by name or by the beginning of names; without it all but the reference, the
    compiled ones, those that offload and those that round what travels."""
    known = [name for name in CONTENDERS if name != "reference"]
    if only is None:
        return tuple(name for name in known if not _asked_for(name))
    found: list[str] = []
    for asked in ["" if only == "all" else part for part in only.split(",")]:
        exact = [asked] if asked in known else [name for name in known if name.startswith(asked)]
        if not exact:
            raise SystemExit(f"--only {asked}: known are {', '.join(known)}")
        found += [name for name in exact if name not in found]
    return tuple(found)


def _asked_for(name: str) -> bool:
    """Whether a contender runs only where it is asked for."""
    row = CONTENDERS[name]
    return row.compiled or row.offloads or row.coded


def parsed(argv: Sequence[str] | None = None) -> tuple[Plan, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (known, default) in AXES.items():
        parser.add_argument(f"--{name}", default=default, help=f"of {', '.join(known)}; commas between several")
    parser.add_argument("--only", help="contenders, or how their names begin; 'all' adds the compiled ones")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help=f"timed steps a round; default by size, {STEPS}")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--retries", type=int, default=1, help="of a process while others were busy; the quieter counts"
    )
    parser.add_argument("--out", default="cpu", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    axes = []
    for name, (known, _) in AXES.items():
        values = getattr(args, name).split(",")
        for value in values:
            if value not in known:
                parser.error(f"--{name} {value}: needed one of {', '.join(known)}")
        axes.append(values)
    cases = tuple(Case(*values) for values in itertools.product(*axes))
    for name in ("rounds", "warmup", "steps"):
        if (getattr(args, name) or 1) < 1:
            parser.error(f"--{name} {getattr(args, name)}: needed 1 or more")
    return Plan(cases, chosen(args.only), args.rounds, args.warmup, args.steps, args.retries), args.out


def main(argv: Sequence[str] | None = None) -> None:
    plan, out = parsed(argv)
    console = Console()
    console.width = max(console.width, 140)  # a table that is cut is of no use in a log
    missing = {name: lack for name in plan.names if (lack := CONTENDERS[name].missing())}
    for name, lack in missing.items():
        console.print(f"{name} is left out: {lack} is not installed (pip install -e '.[bench]')")
    names = tuple(name for name in plan.names if name not in missing)
    plan = replace(plan, names=names)
    console.print(f"{len(plan.cases)} cases, {len(names)} contenders: {', '.join(names)}")
    console.print(f"{plan.rounds} rounds; about {plan.estimate_s() / 60:.0f} minutes")
    began = time.monotonic()
    record: dict[str, Any] = {"machine": machine.describe(), "bf16": BF16, "cases": []}

    def say(text: str) -> None:
        console.print(f"[{(time.monotonic() - began) / 60:5.1f} min] {text}", markup=False, highlight=False)

    for case in plan.cases:
        with LINKS[case.link]() as link:
            record["cases"].append(run_case(case, plan, link, say))
        path = write(out, record)
        summary.print_case(console, record["cases"][-1])
    say(f"written: {path}")


def write(name: str, record: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
