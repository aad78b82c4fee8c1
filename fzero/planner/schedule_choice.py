"""schedule_choice: the schedule of the pipelines that were found: the others are lowered, and the fastest that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fzero.planner.candidates import stages
from fzero.planner.deep import is_deep
from fzero.planner.planned import Row
from fzero.planner.search import Search
from fzero.planner.some_layers import FirstLayers

MORE = 2  # layers
MESHES = 2  # beside that of the best row, whose pipelines are tried
OPS = 15_000  # of the programs of all roles: of more, only the default is lowered, for each other takes as long
OTHERS = ("interleaved", "zb-h1", "zb-v")  # "gpipe" idles as "1f1b" and holds more


def fastest_schedule(done: Search, best: Row) -> Row:
    """The best row, or one with the fastest other schedule of a pipeline: of its own, or of a mesh that would win over
    it if no role idled. What was tried is in the search's rows; a schedule that does not suit the model or the
    microbatches is a row that says why. One that is faster and too large is tried with more layers recomputed, where
    that is open. Of programs of very many ops none is tried."""
    if "pipeline" in done.problem.given:
        return best
    for row in [best, *_others(done, best)]:
        if row.candidate.ranks.roles > 1 and _without_idling(row) < best.seconds:
            best = _rescheduled(done, row, best)
    return _at_other_stages(done, best)


def _others(done: Search, best: Row) -> list[Row]:
    """The fastest rows of pipelines over other meshes, those that may gain the most first. Of a deep model they are
    foretold."""
    fastest: dict[tuple[tuple[str, int], ...], Row] = {}
    for row in sorted(done.fitting, key=lambda row: row.order):
        if row.candidate.mesh != best.candidate.mesh and row.candidate in done.programs:
            fastest.setdefault(row.candidate.mesh, row)
    piped = [row for row in fastest.values() if row.candidate.ranks.roles > 1 and not is_deep(done.problem)]
    return sorted(piped, key=_without_idling)[:MESHES]


def _without_idling(row: Row) -> float:
    """The seconds of a row of 1F1B less those in which a role has no microbatch."""
    full = row.candidate.microbatches
    return row.seconds * full / (full + row.candidate.ranks.roles - 1)


def _rescheduled(done: Search, row: Row, best: Row) -> Row:
    """The fastest of a row with other schedules, if it is faster than the best."""
    layers = row.candidate.remat
    for name in OTHERS if done.ops(row.candidate) <= OPS else ():
        for remat in _more(layers) if "remat" not in done.problem.given else [layers]:
            other = done.row_in_full(replace(row.candidate, pipeline=name, remat=remat))
            if other.refused or other.seconds >= best.seconds:
                break  # more layers take longer
            if done.fits(other):
                best = other
                break
    return best


def _at_other_stages(done: Search, best: Row) -> Row:
    """The fastest of a row and the same at other ZeRO stages: what a stage takes depends on when the roles idle, and
    the search saw 1F1B. Of a deep model it stays."""
    other = best.candidate.pipeline != done.problem.spec.pipeline
    if not other or "zero" in done.problem.given or is_deep(done.problem):
        return best
    rows = [best, *(done.row_in_full(replace(best.candidate, zero=zero)) for zero in stages(best.candidate.mesh))]
    return min((row for row in rows if done.fits(row)), key=lambda row: row.order)


def _more(remat: Any) -> list[Any]:
    """The value of `remat`, and those that recompute more."""
    if not isinstance(remat, FirstLayers):
        return [remat] if remat == "full" else [remat, "full"]
    few = [replace(remat, count=n) for n in range(remat.count, min(remat.count + MORE, remat.depth - 1) + 1)]
    return [*few, "full"]
