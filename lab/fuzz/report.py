"""report: outcomes in a file, one JSON line per case, and their totals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from lab.fuzz.case import Case
from lab.fuzz.check import Outcome

ENDS = ("equal", "refused", "undrawn", "wrong", "crashed")


class Done(Protocol):
    """What `lost` reads of a report: the cases that have an outcome."""

    done: set[str]


@dataclass
class Report:
    """Counts of ends, of refusals and failures by reason, and the ops of aten and rows of tables seen.

    Only `add` writes the counts.
    """

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    aten: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Counts one line of the file."""
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
        """The rows of the tables of modules that were seen."""
        return {row for row in self.rows if row.startswith(("modules/", "dropping/"))}

    @property
    def good(self) -> bool:
        """Whether no case was wrong or crashed."""
        return not self.failed

    def __str__(self) -> str:
        total = max(sum(self.ends.values()), 1)
        ends = ", ".join(f"{end} {self.ends[end]:,}" for end in ENDS if self.ends[end])
        lines = [f"{total:,} cases: {ends}", f"{self.seconds / total:.2f} CPU seconds a case"]
        lines.append(f"{len(self.aten)} aten ops, {len(self.modules)} modules, {len(self.rows)} rows of the tables")
        lines += [f"{count:6,} {end}: {reason}" for (end, reason), count in self.reasons.most_common()]
        return "\n".join([*lines, *self.failed])


def line_of(case: Case, outcome: Outcome, seconds: float, report: Report) -> dict[str, Any]:
    """Returns a case as a line of the file. It lists ops and rows that the report has not seen."""
    line: dict[str, Any] = {"case": case.name, "end": outcome.end, "seconds": round(seconds, 3)}
    if outcome.end != "equal":
        line |= {"reason": outcome.reason, "what": outcome.what[:600], "form": case.options.form}
    new = {"aten": sorted(outcome.aten - report.aten), "rows": sorted(case.uses - report.rows)}
    return line | {name: values for name, values in new.items() if values}


def read(*paths: Path, commit: str = "") -> Report:
    """Returns the outcomes in files, of one commit if it is named."""
    report = Report()
    for line in lines(*paths, commit=commit):
        report.add(line)
    return report


def lines(*paths: Path, commit: str = "") -> Iterator[dict[str, Any]]:
    """The outcomes in files, as JSON; a last line that was cut off is left out, and those of another commit if one is
    named."""
    for text in (text for path in paths if path.exists() for text in path.read_text(encoding="utf-8").splitlines()):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if commit in ("", line.get("commit")):
            yield line


def append(file: TextIO | None, line: dict[str, Any], commit: str) -> None:
    """Adds a line to the file, with the commit if it is named, and flushes it; does nothing without a file."""
    if file is not None:
        line = {**line, "commit": commit} if commit else line
        file.write("\n" + json.dumps(line))  # not after it: a line that was cut off stays alone
        file.flush()


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.now")


def note(out: Path | None, text: str, commit: str) -> None:
    """Records the present action: "drawn" or "checked", and the names of cases; behind them the commit."""
    if out is not None:
        _beside(out).write_text(f"{text}\n{commit}", encoding="utf-8")


def lost(out: Path, report: Done, commit: str = "") -> tuple[list[dict[str, Any]], set[str]]:
    """Returns (the case that ended the process before, as a line; or cases of which one did, to be checked apart).

    If the case was still being drawn, eager PyTorch alone ended the process; that is no fault.
    """
    text, _, of = (_beside(out).read_text(encoding="utf-8") if _beside(out).exists() else "none").partition("\n")
    what, *names = text.split()
    names = [name for name in names if name not in report.done and of == commit]
    if len(names) != 1:
        return [], set(names)
    end = "undrawn" if what == "drawn" else "crashed"
    text = f"the process ended while the case was {what}"
    return [{"case": names[0], "end": end, "seconds": 0.0, "reason": text, "what": text}], set()
