"""report: outcomes in a file, one JSON line a case, and what they add up to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fzero.fuzz.case import Case
from fzero.fuzz.check import Outcome

ENDS = ("equal", "refused", "known", "wrong", "crashed")


@dataclass
class Report:
    """Counts of ends, of refusals and failures by reason, and what has been seen of aten and of the tables."""

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    aten: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        self.done.add(line["case"])
        self.ends[line["end"]] += 1
        self.seconds += line["seconds"]
        self.aten |= set(line.get("aten", ()))
        self.rows |= set(line.get("rows", ()))
        if line["end"] != "equal":
            self.reasons[line["end"], line["reason"]] += 1
        if line["end"] in ("wrong", "crashed"):
            self.failed.append(f"{line['case']} {line['end']}: {line['what'][:300]}")

    @property
    def modules(self) -> set[str]:
        return {row for row in self.rows if row.startswith(("modules/", "dropping/"))}

    @property
    def good(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        total = max(sum(self.ends.values()), 1)
        ends = ", ".join(f"{end} {self.ends[end]:,}" for end in ENDS if self.ends[end])
        lines = [f"{total:,} cases: {ends}", f"{self.seconds / total:.2f} CPU seconds a case"]
        lines.append(f"{len(self.aten)} aten ops, {len(self.modules)} modules, {len(self.rows)} rows of the tables")
        lines += [f"{count:6,} {end}: {reason}" for (end, reason), count in self.reasons.most_common()]
        return "\n".join([*lines, *self.failed])


def line_of(case: Case, outcome: Outcome, seconds: float, report: Report) -> dict[str, Any]:
    """A case as a line of the file. Ops and rows are told where the report has not seen them."""
    line: dict[str, Any] = {"case": case.name, "end": outcome.end, "seconds": round(seconds, 3)}
    if outcome.end != "equal":
        line |= {"reason": outcome.reason, "what": outcome.what[:600], "form": case.options.form}
    new = {"aten": sorted(outcome.aten - report.aten), "rows": sorted(case.uses - report.rows)}
    return line | {name: values for name, values in new.items() if values}


def read(path: Path) -> Report:
    """What a file of outcomes says; a last line that was cut off is left out."""
    report = Report()
    for line in lines(path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        report.add(line)
    return report


def lines(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        try:
            yield json.loads(text)
        except ValueError:
            continue


def append(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
