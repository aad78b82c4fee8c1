"""finding: what a probe of the doctor tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """The result of one probe about one thing.

    status: "ok", "warning" or "missing". needed: if true, "missing" makes fzero unusable here. fix: the remedy.
    figures: measured numbers, with units in their names.
    """

    name: str
    status: str
    text: str
    fix: str = ""
    needed: bool = False
    figures: dict[str, float] = field(default_factory=dict)


def line(finding: Finding) -> str:
    """
    >>> print(line(Finding("rich", "missing", "not installed", "pip install rich")))
    missing  rich                 not installed
                                  -> pip install rich
    """
    text = f"{finding.status:8} {finding.name:20} {finding.text}"
    return f"{text}\n{'':29} -> {finding.fix}" if finding.fix else text


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether all that fzero needs works."""
    return not any(finding.needed and finding.status == "missing" for finding in findings)


def size_text(num_bytes: int) -> str:
    """
    >>> size_text(3 << 19)
    '1.5 MiB'
    """
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MB:.1f} MiB"
