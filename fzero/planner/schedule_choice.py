"""schedule_choice: the schedule of the pipeline that was found: the others are lowered, and the fastest that fits."""

from __future__ import annotations

from dataclasses import replace

from fzero.planner.planned import Row
from fzero.planner.search import Search

OTHERS = ("interleaved", "zb-h1", "zb-v")  # "gpipe" idles as "1f1b" and holds more


def fastest_schedule(done: Search, best: Row) -> Row:
    """The best row, or the same with the fastest other schedule of its pipeline. What was tried is in the search's
    rows; a schedule that does not suit the model or the microbatches is a row that says why."""
    if "pipeline" in done.problem.given or best.candidate.ranks.roles == 1:
        return best
    for name in OTHERS:
        row = done.row_in_full(replace(best.candidate, pipeline=name))
        best = row if done.fits(row) and row.seconds < best.seconds else best
    return best
