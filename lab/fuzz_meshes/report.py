"""report: outcomes in a file, one JSON line per case, and their totals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.fuzz.report import lines
from lab.fuzz_meshes.case import Case
from lab.fuzz_meshes.check import Outcome

ENDS = ("equal", "refused", "unlisted", "wrong", "crashed")


@dataclass
class Report:
    """Counts of ends, of refusals and failures by reason, and of cases by what they hold. Only `add` writes them."""

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Counts one line of the file."""
        self.done.add(line["case"])
        self.ends[line["end"]] += 1
        self.seconds += line["seconds"]
        self.uses.update(line.get("uses", ()))
        if line["end"] != "equal":
            self.reasons[line["end"], line["reason"]] += 1
        if line["end"] not in ("equal", "refused"):
            self.failed.append(f"{line['case']} {line['end']}: {line['what'][:300]}")

    @property
    def good(self) -> bool:
        """Whether every case was equal, or refused with a remedy that worked."""
        return not self.failed

    def __str__(self) -> str:
        total = max(sum(self.ends.values()), 1)
        ends = ", ".join(f"{end} {self.ends[end]:,}" for end in ENDS if self.ends[end])
        texts = [f"{total:,} cases: {ends}", f"{self.seconds / total:.2f} CPU seconds a case"]
        texts.append(", ".join(f"{name} {count:,}" for name, count in sorted(self.uses.items())))
        texts += [f"{count:6,} {end}: {reason}" for (end, reason), count in self.reasons.most_common()]
        return "\n".join([*texts, *self.failed])


def line_of(case: Case, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Returns a case as a line of the file."""
    line: dict[str, Any] = {"case": case.name, "end": outcome.end, "seconds": round(seconds, 3), "uses": uses(case)}
    return line if outcome.end == "equal" else line | {"reason": outcome.reason, "what": outcome.what[:800]}


def uses(case: Case) -> list[str]:
    """What a case holds, in words: its axes, kinds of layers, optimizer, and the options that are not as always."""
    model, recipe, place = case.model, case.recipe, case.place
    words = {f"axis:{name}" for name, size in place["mesh"].items() if size > 1}
    words |= {f"layer:{x.kind}" for x in (*model.layers, *model.encoder)} | {f"optimizer:{recipe.optimizer}"}
    words |= {f"option:{name}" for name in place if name not in ("mesh", "zero")} | {f"head:{model.head}"}
    words |= {f"dtype:{recipe.dtype}"} if recipe.precision == "fp32" else {"dtype:narrow"}
    words |= {f"option:{name}" for name in recipe.clip} | ({"option:mean"} if model.mean else set())
    words |= {"option:trainable"} if recipe.trainable else set()
    words |= {"option:microbatches"} if recipe.microbatches > 1 else set()
    return sorted(
        words | ({"model:encoder"} if model.encoder else set()) | ({"model:shared"} if model.shared else set())
    )


def read(*paths: Path, commit: str = "") -> Report:
    """Returns the outcomes in files, of one commit if it is named."""
    report = Report()
    for line in lines(*paths, commit=commit):
        report.add(line)
    return report
