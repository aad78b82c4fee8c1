"""From the records of single processes to the figures of a contender, and from those to the printed table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import CONTENDERS
from benchmarks.model import SIZES

Records = list[dict[str, Any]]  # one for each rank
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-3}  # of a loss, relative to the reference's
QUIET = 0.1  # cores that others may take before the table says so
MEMORY = ("rss_peak_bytes", "rss_peak_steps_bytes", "held_bytes", "live_peak_bytes")


def step_times(records: Records) -> list[float]:
    """Seconds of each timed step: the slowest rank's."""
    return [max(times) for times in zip(*(record["step_s"] for record in records), strict=True)]


def curve(records: Records) -> list[float]:
    """The loss of each step over all ranks' batches, which are equally large."""
    return [sum(losses) / len(records) for losses in zip(*(record["losses"] for record in records), strict=True)]


def gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a loss from the reference's; infinite where one is no number."""
    gaps = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def figures(name: str, size: str, rounds: Sequence[Records]) -> dict[str, Any]:
    """One contender's figures over its rounds: the median of the rounds' medians for times, the most for memory."""
    medians = [median(step_times(records)) for records in rounds]
    ranks = [record for records in rounds for record in records]
    step_s = median(medians)
    found: dict[str, Any] = {
        "title": CONTENDERS[name].title,
        "step_s": step_s,
        "step_s_rounds": medians,
        "tokens_per_s": SIZES[size].tokens * CONTENDERS[name].world / step_s,
        "first_step_s": median(max(record["first_step_s"] for record in records) for records in rounds),
        "first_step_s_cold": max(record["first_step_s"] for record in rounds[0]),
        "others_cores": max(record["others_cores"] for record in ranks),
        "minor_faults_per_step": median(record["minor_faults_per_step"] for record in ranks),
    }
    for key in MEMORY:
        values = [record[key] for record in ranks if key in record]
        if values:
            found[key] = max(values)
    return found


def print_case(console: Console, case: Mapping[str, Any]) -> None:
    """A case's figures and ratios."""
    name = f"{case['size']}, {case['dtype']}, {case['link']}, malloc {case['malloc']}"
    table = Table(title=f"{name}: median of {case['rounds']} rounds of {case['steps']} steps")
    for column in ("contender", "step s", "rounds", "tokens/s", "first step s", "RSS GB", "tensors GB", "faults/step"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for one in sorted(case["contenders"].values(), key=lambda one: one.get("step_s", float("inf"))):
        if "failed" in one:
            table.add_row(one["title"], "failed", *[""] * 6)
            continue
        spread = f"{min(one['step_s_rounds']):.3f}-{max(one['step_s_rounds']):.3f}"
        memory = [f"{one[key] / 1e9:.3f}" if key in one else "" for key in ("rss_peak_bytes", "live_peak_bytes")]
        numbers = [f"{one['step_s']:.3f}", spread, f"{one['tokens_per_s']:,.0f}", f"{one['first_step_s']:.2f}"]
        table.add_row(one["title"], *numbers, *memory, f"{one['minor_faults_per_step']:,.0f}")
    console.print(table)
    busy = {name: one["others_cores"] for name, one in case["contenders"].items() if one.get("others_cores", 0) > QUIET}
    if busy:
        shown = ", ".join(f"{name} {cores:.2f}" for name, cores in busy.items())
        console.print(f"The machine was not ours alone: other processes took, in cores: {shown}")
    console.print(gap_line(case["losses"]))
    for line in ratio_lines(case["ratios"]):
        console.print(line)


def gap_line(losses: Mapping[str, Any]) -> str:
    """How far apart the loss curves are, and how far those are that share no gradients: what the check could see."""
    gaps = losses["gaps"]
    plain = {name: far for name, far in gaps.items() if CONTENDERS[name].talks and not CONTENDERS[name].coded}
    most = max(plain.values(), default=0.0)
    seen = f"; without communication {gaps['floor']:.1g}" if "floor" in gaps else ""
    seen += "".join(f"; {name} {far:.1g}" for name, far in gaps.items() if CONTENDERS[name].coded)
    return f"Losses agree with the reference's to {most:.1g} (allowed {losses['tolerance']:.0g}{seen})"


def ratio_lines(ratios: Sequence[Mapping[str, Any]]) -> list[str]:
    """`fzero zero=3 / FSDP2, resharding: 1.23x (wanted 1.6x)`, one for each ratio."""
    what = {"step_s": "", "rss_peak_bytes": " in RSS", "live_peak_bytes": " in tensors"}
    lines = []
    for one in ratios:
        ours, theirs = CONTENDERS[one["ours"]].title, CONTENDERS[one["theirs"]].title
        bound = "at most " if one["figure"] != "step_s" else ""
        wanted = (
            "" if one["wanted"] is None else f", wanted {bound}{one['wanted']}x: {'yes' if one['reached'] else 'NO'}"
        )
        lines.append(f"{ours} / {theirs}{what[one['figure']]}: {one['ratio']:.2f}x{wanted}")
    return lines
