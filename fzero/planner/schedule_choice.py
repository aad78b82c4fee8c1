"""schedule_choice: the schedule of the pipeline that was found: the others are lowered, and the fastest that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fzero.planner.planned import Row
from fzero.planner.search import Search
from fzero.planner.some_layers import FirstLayers

MORE = 2  # layers
OPS = 15_000  # of the programs of all roles: of more, only the default is lowered, for each other takes as long
OTHERS = ("interleaved", "zb-h1", "zb-v")  # "gpipe" idles as "1f1b" and holds more


def fastest_schedule(done: Search, best: Row) -> Row:
    """The best row, or the same with the fastest other schedule of its pipeline. What was tried is in the search's
    rows; a schedule that does not suit the model or the microbatches is a row that says why. One that is faster and too
    large is tried with more layers recomputed, where that is open. Of programs of very many ops none is tried."""
    if "pipeline" in done.problem.given or best.candidate.ranks.roles == 1:
        return best
    layers, fastest = best.candidate.remat, best
    for name in OTHERS if done.ops(best.candidate) <= OPS else ():
        for remat in _more(layers) if "remat" not in done.problem.given else [layers]:
            row = done.row_in_full(replace(best.candidate, pipeline=name, remat=remat))
            if row.refused or row.seconds >= fastest.seconds:
                break  # more layers take longer
            if done.fits(row):
                fastest = row
                break
    return fastest


def _more(remat: Any) -> list[Any]:
    """The value of `remat`, and those that recompute more."""
    if not isinstance(remat, FirstLayers):
        return [remat] if remat == "full" else [remat, "full"]
    few = [replace(remat, count=n) for n in range(remat.count, min(remat.count + MORE, remat.depth - 1) + 1)]
    return [*few, "full"]
