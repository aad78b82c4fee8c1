"""What the figures are wanted to show, as one table, and the figures set beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIVEN = ("size", "dtype", "link", "malloc")


@dataclass(frozen=True)
class Ratio:
    """`figure` of ours and theirs. Speed: theirs / ours of `step_s`, at least `wanted`. Memory: ours / theirs, at most
    `wanted`. `given` limits the row to some cases. wanted None: shown, nothing promised."""

    ours: str
    theirs: str
    wanted: float | None
    figure: str = "step_s"
    given: tuple[tuple[str, str], ...] = ()

    def applies(self, case: Mapping[str, Any]) -> bool:
        return all(case[key] == value for key, value in self.given)


def _rows(case: Mapping[str, str], *rows: tuple[str, str, float | None]) -> list[Ratio]:
    return [Ratio(ours, theirs, wanted, given=tuple(case.items())) for ours, theirs, wanted in rows]


FP32 = {"size": "gpt2", "dtype": "fp32", "link": "loopback"}
STAGES = range(4)

TABLE: list[Ratio] = [
    *_rows(
        {**FP32, "malloc": "default"},
        ("fzero3", "fsdp", 1.6),
        ("fzero3_fastest", "fsdp", 2.0),
        ("fzero2", "fsdp_keep", 1.35),
        ("fzero1", "ddp_zero", 1.3),
        ("fzero0", "ddp", 1.05),
        *((f"fzero{z}", f"deepspeed{z}", 1.6) for z in STAGES),
        *((f"fzero{z}", "floor", 0.85) for z in STAGES),
    ),
    *_rows({**FP32, "malloc": "keep"}, ("fzero3", "fsdp", 1.25)),
    *_rows(
        {"size": "small", "dtype": "fp32", "link": "loopback", "malloc": "default"},
        ("fzero3", "fsdp", 1.2),
        ("fzero3", "floor", 0.95),
    ),
    *_rows({"size": "gpt2", "dtype": "bf16", "link": "loopback"}, ("fzero3", "fsdp", 1.5)),
    *_rows({"size": "gpt2", "dtype": "bf16", "link": "1gbit"}, ("fzero3", "fsdp", 1.3)),
    *(
        Ratio(ours, theirs, 0.9, figure)
        for figure in ("rss_peak_bytes", "live_peak_bytes")
        for ours, theirs in (("fzero3", "fsdp"), ("fzero2", "fsdp_keep"))
    ),
    # shown everywhere, so that a case without a promise has its comparison too
    *(
        Ratio(ours, theirs, None)
        for ours, theirs in (
            ("fzero3", "fsdp"),
            ("fzero3", "fsdp_compiled"),
            ("fzero2", "fsdp_keep"),
            ("fzero2", "fsdp_keep_compiled"),
            ("fzero1", "ddp_zero"),
            ("fzero0", "ddp"),
            *((f"fzero{z}", f"deepspeed{z}") for z in STAGES),
            *((f"fzero{z}", "floor") for z in STAGES),
        )
    ),
]


def ratios(case: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table for a case: {ours, theirs, figure, ratio, wanted, reached}. Rows whose figures were not
    measured are left out; a pair with a promise is not shown a second time without it."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in TABLE:
        ours, theirs = (figures.get(name, {}).get(row.figure) for name in (row.ours, row.theirs))
        key = (row.ours, row.theirs, row.figure)
        if not row.applies(case) or ours is None or theirs is None or key in found:
            continue
        ratio = theirs / ours if row.figure == "step_s" else ours / theirs
        more_is_better = row.figure == "step_s"
        reached = None if row.wanted is None else ratio >= row.wanted if more_is_better else ratio <= row.wanted
        found[key] = {
            "ours": row.ours,
            "theirs": row.theirs,
            "figure": row.figure,
            "ratio": ratio,
            "wanted": row.wanted,
            "reached": reached,
        }
    return list(found.values())
