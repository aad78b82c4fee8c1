"""search: proposes candidates by the sketch, and lowers, verifies and simulates the best of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fzero.compile.decide import Deciders
from fzero.compile.lowered import Lowered
from fzero.errors import FzeroError
from fzero.ir.mesh import DATA
from fzero.planner.alike import Alike
from fzero.planner.candidates import Candidate, candidates, default
from fzero.planner.deep import is_deep, probed, shallow_say
from fzero.planner.estimates import Sketch
from fzero.planner.planned import Row
from fzero.planner.problem import Problem
from fzero.planner.programs import by_rates, host_bytes, lowered_of, sparing, step_seconds

LEAST, OPS = 10, 2000  # candidates that are lowered: as many as make so many ops, and not fewer than that
A_MESH = 3  # candidates of one mesh that are lowered, at least
SLACK = 2  # a program that needs no more than this of the budget is lowered again, under the budget
NEAR = 1.15  # of the fastest, or of the budget: a candidate that is said to take more is not lowered to see
FAR = 2  # of the fastest: the same of a stage, mesh, sequence and offload that were not lowered together
HOPELESS = 2  # of the budget: where all are said to need more, none is looked for that fits
WORTH = 0.01  # of the fastest's seconds: what a candidate of a deep model is to save, to be lowered
Shape = tuple[tuple[str, int], ...]
Said = Mapping[Candidate, tuple[float, float]]  # (seconds, bytes)


@dataclass
class Search:
    """What came of the candidates of a problem. estimates: by the sketch, seconds and bytes of all. share: by it, what
    is kept of layers that are recomputed, of all that layers keep. rows: of those that were tried. programs: of those
    that were lowered in full. pressed: of these, the ones that were lowered under the budget. Only its methods write
    the fields."""

    problem: Problem
    estimates: Mapping[Candidate, tuple[float, int]]
    share: float
    rows: dict[Candidate, Row] = field(default_factory=dict)
    programs: dict[Candidate, Lowered] = field(default_factory=dict)
    pressed: set[Candidate] = field(default_factory=set)

    @cached_property
    def alike(self) -> Alike:
        """The candidates as numbers."""
        return Alike(self.estimates)

    @property
    def fitting(self) -> list[Row]:
        """The candidates that fit."""
        return [row for row in self.rows.values() if self.fits(row)]

    def fits(self, row: Row) -> bool:
        """Whether a row needs no more than there is."""
        return row.fits(self.problem.budget, self.problem.machine.host_budget)

    def best(self) -> Row | None:
        """The fastest that fits, lowered in full; None if none does."""
        while found := self.fitting:
            row = min(found, key=lambda row: row.order)
            if (whole := self.whole(row.candidate)) == row:
                return row
            self.rows[row.candidate] = whole
        return None

    def row(self, one: Candidate) -> Row:
        """What a candidate takes: by shallow programs where these say it, else lowered in full."""
        if one not in self.rows:
            self.rows[one] = self._probed(one) or self.whole(one)
        return self.rows[one]

    def row_in_full(self, one: Candidate, *, presses: bool = True) -> Row:
        """The same, lowered in full: of a candidate that shallow programs say nothing of, or that may be the answer.
        presses: as in `whole`."""
        if one not in self.rows or self.rows[one].probed:
            self.rows[one] = self.whole(one, presses=presses)
        return self.rows[one]

    def correct(self, found: Row, seconds: float) -> None:
        """What was said to take so many seconds takes those of `found`. Of a schedule that no shallow program has
        shown, others are as far off."""
        for one, row in self.rows.items():
            if row.probed and one.chunks > 1 and one.pipeline == found.candidate.pipeline and not found.refused:
                self.rows[one] = replace(row, seconds=row.seconds * found.seconds / seconds)

    def ops(self, one: Candidate) -> int:
        """The ops of the programs of all roles, of a candidate that was lowered in full; 0 of others."""
        return sum(len(program.ops) for program in self.programs[one].programs.values()) if one in self.programs else 0

    def likely(self, one: Candidate) -> tuple[float, float]:
        """(seconds, bytes) of a candidate: as it was found, else by the sketch and what was found of others."""
        row = self.rows.get(one)
        return self.corrected(one) if row is None or row.refused else (row.seconds, float(row.peak))

    def corrected(self, one: Candidate) -> tuple[float, float]:
        """The sketch's seconds and bytes, by what the candidates most like it were found to take."""
        seconds, nbytes = self.alike.corrected([*self.rows.values()])[self.alike.place[one]]
        return float(seconds), float(nbytes)

    def whole(self, one: Candidate, *, presses: bool = True) -> Row:
        """The same of a candidate that is lowered in full. presses: one that is too large is lowered again under the
        budget."""
        known = self.rows.get(one)
        if one in self.programs and known is not None:
            return known
        row: Row | None = None
        try:
            row = self._lowered(one, None)
            if presses and self.problem.budget < row.peak <= self.problem.budget * SLACK:
                row = self._lowered(one, self.problem.budget)
        except FzeroError as error:
            row = row or Row(one, math.inf, 0, 0, str(error))
        return row

    def tightest(self, one: Candidate) -> Row:
        """What a candidate needs at least: nothing is brought before it is needed."""
        return self._lowered(one, None, sparing(self.problem.machine, one.ranks))

    def _lowered(self, one: Candidate, budget: int | None, deciders: Deciders | None = None) -> Row:
        of, mesh = self.problem, one.ranks
        spec = replace(one.spec(of.spec, of.rules.shard), device_bytes=budget)
        lowered = lowered_of(of, spec, mesh, deciders or by_rates(of.machine, mesh, once=is_deep(of)))
        self.programs[one] = lowered
        if budget is not None:
            self.pressed.add(one)
        return Row(one, step_seconds(lowered, of.machine), lowered.memory.peak, host_bytes(lowered))

    def _probed(self, one: Candidate) -> Row | None:
        of, mesh = self.problem, one.ranks
        if one.pipeline != of.spec.pipeline:
            return self._interleaved(one)
        spec = replace(one.spec(of.spec, of.rules.shard), device_bytes=None)
        alone = mesh.roles == 1  # a third program of each kind takes half of a pipeline's time
        found = probed(of, spec, mesh, by_rates(of.machine, mesh, once=True), checks=alone)
        pays = alone or not self.fitting  # of a pipeline it takes as long again
        if found is not None and pays and of.budget < found.peak <= of.budget * SLACK:
            tighter = probed(of, spec, mesh, sparing(of.machine, mesh), checks=False)
            found = tighter if tighter is not None and tighter.peak <= of.budget else found
        return None if found is None else Row(one, found.seconds, found.peak, found.host, probed=True)

    def _interleaved(self, one: Candidate) -> Row | None:
        """Of a pipeline that was left open, what its default is found to take, by what the sketch says of the two: a
        role of several chunks has no shallow programs."""
        if not shallow_say(self.problem, one.ranks):
            return None
        other = replace(one, pipeline=self.problem.spec.pipeline)
        if (row := self.row(other)).refused:
            return None
        said, known = self.estimates[one], self.estimates[other]
        seconds, peak = row.seconds * said[0] / known[0], int(row.peak * said[1] / known[1])
        return replace(row, candidate=one, seconds=seconds, peak=peak, probed=True)


def search(problem: Problem, sketch: Sketch, most: int | None = None, *, hopes: bool = True) -> Search:
    """Lowers the default, and up to `most` others, the fastest by the sketch that may fit; while none fits, as many
    again, but few of those that are said not to fit (`_smallest`). What was lowered corrects the sketch of what was
    not. If there are few, all are lowered.
    most: None for as many as programs of so many ops allow. hopes: whether the least is looked for where the sketch
    says of all that they need `HOPELESS` times what there is; else the search is over then."""
    of, few = problem, most or LEAST
    most = most or max(LEAST, OPS // sketch.ops)
    own = default(of.spec, of.world_size)
    found = candidates(
        of.spec, of.given, of.world_size, of.rows, of.layers, of.machine, of.rules.shard, schedules=is_deep(of)
    )
    said = sketch.estimates([own, *found], of.rows, of.machine, of.rules.bytes_a_row)
    done = Search(of, said, sketch.share)
    hopeless = min(nbytes for _, nbytes in said.values()) > HOPELESS * of.budget
    if hopeless and not hopes:
        return done
    done.row(own)
    if len(done.estimates) <= (most if is_deep(of) else few):
        for each in done.estimates:
            done.row(each)
        return done
    a_mesh = max(A_MESH, most // max(len({one.mesh for one in done.estimates}), 1))
    unlikely: Counter[Shape] = Counter()  # candidates that were tried although they are said not to fit
    while len(done.rows) <= (most if done.fitting else 2 * most):
        if one := _next(done, a_mesh):
            done.row(one)
        elif done.fitting or unlikely.total() == LEAST * (2 - hopeless) or not (one := _smallest(done, unlikely)):
            break
        else:
            unlikely[_shape(done, one)] += not done.row(one).refused
    _refine(done, most)
    return done


def _refine(done: Search, most: int) -> None:
    """Lowers what differs from the fastest in one field alone, and may be faster, until nothing is."""
    tried: set[Candidate] = set()
    while done.fitting and len(done.rows) <= 3 * most:
        best = min(done.fitting, key=lambda row: row.order)
        if best.candidate in tried:
            return
        tried.add(best.candidate)
        near = done.alike.differs(best.candidate) == 1
        for one in sorted(itertools.compress(done.estimates, near), key=lambda c: done.estimates[c]):
            new = one not in done.rows and len(done.rows) <= 3 * most
            if new and (_may_win(done, one, _fastest(done)) if is_deep(done.problem) else _near(done, one, best)):
                done.row(one)


def _may_win(done: Search, one: Candidate, seconds: float) -> bool:
    """Whether a candidate of a deep model, which takes long to lower, may be faster than so many seconds, and is said
    to fit."""
    said, nbytes = done.corrected(one)
    return said < _worth(done, one) * seconds and nbytes <= _reach(done, one) * done.problem.budget


def _near(done: Search, one: Candidate, best: Row) -> bool:
    """Whether a candidate may be faster than the best, from which it differs in one field: by what those most like it
    were found to take, or by the best alone, for these may differ in another field."""
    by_best = done.estimates[one][0] * best.seconds / done.estimates[best.candidate][0]
    return min(done.corrected(one)[0], by_best) < NEAR * best.seconds


def _worth(done: Search, one: Candidate) -> float:
    """Of the fastest's seconds, as many as a candidate of a deep model may be said to take: fewer where shallow
    programs will not say it, for the whole takes minutes."""
    return 1 - WORTH if shallow_say(done.problem, one.ranks) else 2 - NEAR


def _reach(done: Search, one: Candidate) -> float:
    """Of the budget, as much as a candidate may be said to need: no more than there is, where to see takes minutes."""
    return NEAR if not is_deep(done.problem) or shallow_say(done.problem, one.ranks) else 1.0


def _left(done: Search) -> Said:
    """The candidates that were not tried and may pay, by what they are said to take. What does not suit a mesh, seldom
    does."""
    refused = {(row.candidate.mesh, row.candidate.sequence) for row in done.rows.values() if row.refused}
    taken = dict(zip(done.alike.place, done.alike.corrected([*done.rows.values()]).tolist(), strict=True))
    untried = [one for one in done.estimates if one not in done.rows and not _spares_for_nothing(done, one, taken)]
    suits = [one for one in untried if (one.mesh, one.sequence) not in refused]
    return {one: taken[one] for one in suits or untried}


def _spares_for_nothing(done: Search, one: Candidate, taken: Said) -> bool:
    """Whether a candidate recomputes, or holds a part of the state off the device, although the same without that fits
    with all that it wants to bring ahead, or is said to with room to spare: it saves no time."""
    if is_deep(done.problem) or (one.offload is None and one.remat == "none"):
        return False  # of a deep model few are lowered, and it matters which come first
    for other in (replace(one, offload=None), replace(one, remat="none"), replace(one, offload=None, remat="none")):
        if other == one or other not in done.estimates:
            continue
        row = done.rows.get(other)
        if row is None and taken[other][1] * NEAR <= done.problem.budget:
            return True
        if row is not None and done.fits(row) and other not in done.pressed:
            return True
    return False


def _smallest(done: Search, tried: Counter[Shape]) -> Candidate | None:
    """The smallest candidate that is left; once so many were tried, of each mesh in turn: the sketch may be wrong about
    one."""
    left, turns = _left(done), tried.total() >= LEAST
    return min(left, key=lambda one: (turns and tried[_shape(done, one)], left[one][1]), default=None)


def _next(done: Search, a_mesh: int) -> Candidate | None:
    """The fastest candidate that is left and may fit, of a mesh that few are of; None if none may."""
    left = _left(done)
    count = Counter(_shape(done, one) for one in done.rows)
    near = [one for one in left if left[one][1] <= _reach(done, one) * done.problem.budget]
    if not done.fitting:
        near = [one for one in near if left[one][1] <= done.problem.budget] or near
        if is_deep(done.problem):
            near = [one for one in near if shallow_say(done.problem, one.ranks)] or near
    few = [one for one in near if count[_shape(done, one)] < a_mesh] if done.fitting else near
    if done.fitting and is_deep(done.problem):  # what is lowered in full takes minutes: only what may win
        fastest = _fastest(done)
        few = [one for one in few if left[one][0] < _worth(done, one) * fastest]
        near = few = [one for one in few if shallow_say(done.problem, one.ranks)] or few  # it may win over the others
    elif done.fitting:
        near = few = _may_be_near(done, few, left)
    unseen = [one for one in near if not count[_shape(done, one)]]
    if unseen and done.fitting:
        few = unseen  # each mesh once, so that it is known what the sketch is worth there
    return min(few, key=lambda one: left[one], default=None)


def _may_be_near(done: Search, some: Sequence[Candidate], left: Said) -> list[Candidate]:
    """Those of some candidates that may be no slower than `NEAR` the fastest. The sketch may be wrong by more about
    what was not seen."""

    def kind(one: Candidate) -> tuple[object, ...]:
        return one.mesh, one.zero, one.sequence, one.offload

    seen, fastest = {kind(one) for one in done.rows}, _fastest(done)
    known = [one for one in some if kind(one) in seen and left[one][0] < NEAR * fastest]
    new = [one for one in some if kind(one) not in seen]  # what others were found to take may say nothing of it
    return known + [one for one in new if min(left[one][0], done.estimates[one][0]) < FAR * fastest]


def _shape(done: Search, one: Candidate) -> Shape:
    """The mesh. Of a deep pipeline, which takes long to lower, without how its data axis is split: the sketch says what
    that saves."""
    if one.ranks.roles == 1 or not is_deep(done.problem):
        return one.mesh
    return (*((axis, size) for axis, size in one.mesh if axis not in DATA), ("dp", one.ranks.data_ranks))


def _fastest(done: Search) -> float:
    """The least seconds of what fits, or nearly does where a few layers may be recomputed (`some_layers`)."""
    saves = done.problem.equal is not None and "remat" not in done.problem.given
    most = (NEAR if saves else 1) * done.problem.budget
    near = [row.seconds for row in done.rows.values() if row.peak <= most and not row.refused]
    return min(near, default=math.inf)
