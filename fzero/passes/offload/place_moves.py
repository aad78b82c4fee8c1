"""place_moves: what is held off the device is brought to each stretch of its uses, and no longer held there.

The moves of `to_spaces` go away. Each stretch of neighbouring uses gets a copy of its own (a *visit*): brought before
the first use, written back after the last where it changed. Elementwise work may run on the host instead (`update_on`):
then what is held there is used in place, and what else the work needs visits the host.

Moves of one lane run in their order, beside compute. A fetch starts `ahead` runs before its use, but behind the last
write of what it reads. Elementwise work takes little time and does not count: there a fetch starts as early as
IN_FLIGHT tiles for each of `ahead` allow, one run before its use at least. A write-back is waited for as long after its
start (one run at least), or before the next op that needs it. Moves into one buffer are waited for in their order.
The gathers of new parameters count as runs there: between them nothing runs.

    move mu -> mu.in; wait mu.in; ...; update g mu.in -> p mu.in; ...; move mu.in -> mu; wait mu      becomes
    ...; move mu -> mu.0; run ...; wait mu.0; update g mu.0 -> p mu.0; move mu.0 -> mu; ...; wait mu  or, on the host,
    ...; move g -> g.0; move p -> p.0; wait g.0; wait p.0; update g.0 mu -> p.0 mu; move p.0 -> p; wait p
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

from fzero.ir import rewrite
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program, route
from fzero.ir.records import DEVICE, DISK, HOST, Buffer, Ref
from fzero.passes.offload.to_spaces import copies_of, staging

# the order of what is inserted before one op
(SETTLED, WRITE, WRITE_ON, WRITTEN, FETCH, FETCH_ON, FETCHED) = range(7)
IN_FLIGHT = 4  # tiles that wait for their use, and that are on their way back


def place_moves(program: Program, *, on_host: bool = False, ahead: int = 1, tile_bytes: int = 16 << 20) -> Program:
    """The program with moves around the uses of what is held off the device; itself where nothing is.

    on_host: elementwise work on what is held off the device runs on the host. ahead: how many runs before its use a
    fetch starts, and behind its start a write-back is waited for. tile_bytes: of a tile of one column.
    """
    home = copies_of(program)
    if not home:
        return program
    return _Placing(program, home, on_host, ahead, IN_FLIGHT * ahead * tile_bytes).done()


@dataclass
class _Visit:
    """A stretch of uses of one value away from where it is held.

    source: what is brought and written back: a buffer, or a tile or a range of it. space: where it is used. first,
    last: the ops of its first and last use. reads, writes: whether an op needs the value, and whether one changes it.
    names: the copies on the way there, the last one for the uses. start: before which op the fetch starts.
    completed: whether a gather writes all of it. beyond: whether more than the own slice is read before that.
    """

    source: Ref
    space: str
    first: int
    last: int
    reads: bool = False
    writes: bool = False
    names: list[str] = field(default_factory=list)
    start: int = 0
    beyond: bool = False
    completed: bool = False


@dataclass(frozen=True)
class _Use:
    """One reference of op `index`. held: what it stands for, by the name of what is held. visit: None where the op
    works on that itself. writes: whether the op, or the transfer that it waits for, changes it."""

    index: int
    held: Ref
    visit: _Visit | None
    writes: bool


class _Placing:
    """One program whose moves are placed. `done` writes the fields."""

    def __init__(self, program: Program, home: Mapping[str, str], on_host: bool, ahead: int, in_flight: int) -> None:
        self.program, self.home, self.ahead, self.in_flight = program, home, ahead, in_flight
        self.ops = _without_moves(program, home)
        self.completing = _completing(self.ops)
        self.runs = [i for i, op in enumerate(self.ops) if op.computes]
        self.steps = sorted({*self.runs, *(i for i in self.completing if self.ops[i].gathers)})
        self.long = [i for i in self.runs if not self.ops[i].is_flat]
        self.host = [on_host and self._may_run_on_host(op) for op in self.ops]
        self.visits: list[_Visit] = []
        self.current: dict[str, _Visit] = {}  # by what is held, the visit in progress
        self.place: dict[tuple[int, Ref], _Use] = {}  # of each use of a visit, or of what is held off the device
        self.uses: dict[str, list[_Use]] = {}  # by what is held, all uses in order
        self.buffers = dict(program.buffers)
        self.inserted: list[tuple[int, int, int, Op]] = []

    def done(self) -> Program:
        """The program with its moves placed."""
        for index, op in enumerate(self.ops):
            self._look(index, op)
        for number, visit in enumerate(self.visits):
            self._allocate(number, visit)
        self.fetched = self._sums((v.first, v) for v in self.visits if v.reads)
        self.written = self._sums((v.last, v) for v in self.visits if v.writes)
        self._fetches()
        self._write_backs()
        edits = rewrite.Edits(buffers=self.buffers)
        for index, _, _, op in sorted(self.inserted, key=lambda row: row[:3]):
            edits.before[index].append(op)
        for index, op in enumerate(self.ops):
            edits.instead[index] = [rewrite.renamed(op, partial(self._renamed, index))]
        return edits.apply(self.program, "place_moves", self.ops)

    # --- which visits there are

    def _may_run_on_host(self, op: Op) -> bool:
        """Whether an op is elementwise work on ranges of what is held off the device."""
        refs = (*op.reads, *op.writes)
        flat = all(ref.shape is None and ref.start is not None for ref in refs if self._bucket(ref) is not None)
        return op.computes and op.is_flat and flat and any(ref.name in self.home for ref in refs)

    def _bucket(self, ref: Ref) -> str | None:
        return self.program.buffers[ref.name].bucket

    def _look(self, index: int, op: Op) -> None:
        """Finds the visits that an op's references belong to; begins those that there are not."""
        space = HOST if self.host[index] else DEVICE
        for ref in dict.fromkeys((*op.reads, *op.writes)):
            held = replace(ref, name=self.home.get(ref.name, ref.name))
            stays, visit = ref.name not in self.home, None
            elsewhere = self.program.buffers[held.name].space != space
            if elsewhere and not (stays and (op.moves or op.is_mark)):
                visit = self._visit(index, held, space, stays=stays)
                visit.last = index
                # a wait is for what the transfer before it wrote
                reads = (ref in op.reads and not op.is_wait) or held != visit.source
                visit.reads |= reads
                visit.beyond |= reads and not (held.mine or visit.completed)
                visit.completed |= op.gathers and ref in op.writes and held.start is None
                visit.writes |= ref in op.writes
            elif not stays or ref in op.writes:
                self.current.pop(held.name, None)  # a new value, which no copy has
            use = _Use(index, held, visit, ref in op.writes or op.is_wait)
            self.uses.setdefault(held.name, []).append(use)
            if visit is not None or not stays:
                self.place[index, ref] = use

    def _visit(self, index: int, held: Ref, space: str, *, stays: bool) -> _Visit:
        """The visit that a use belongs to: the one in progress, or a new one. stays: the value is held on the device
        and visits the host; then exactly what the op names is brought."""
        source = held if stays else self._brought(held)
        visit = self.current.get(held.name)
        follows = index in self.completing or self.ops[index].is_wait
        near = visit is not None and (stays or follows or self._is_near(visit.last, index, held))
        ranged = stays and self._bucket(held) is not None  # else a scalar, which stays until it changes
        if (
            visit is None
            or not near
            or (visit.source, visit.space) != (source, space)
            or (ranged and visit.last < index)
        ):
            visit = _Visit(source, space, index, index)
            self.visits.append(visit)
            self.current[held.name] = visit
        return visit

    def _brought(self, held: Ref) -> Ref:
        """What a use of a copy brings: all of the buffer, or the tile that the use is in. Tiles of an own slice of what
        lies whole on disk begin anywhere in a page: then it is all."""
        buffer = self.program.buffers[held.name]
        if held.tile is None or (buffer.space == DISK and self.program.cut(held) != buffer.sharded):
            return Ref(held.name)
        return Ref(held.name, 0, self.program.buckets[buffer.bucket or ""].length, None, held.mine, held.tile)

    def _is_near(self, last: int, index: int, held: Ref) -> bool:
        """Whether no run comes between two uses but elementwise work on one other bucket, which takes little time: as
        the gradients and the update of the layer before. What has other parts of the same would be held whole; and
        where nothing is fetched ahead, to hold a copy costs memory that a fetch does not."""
        runs = self.runs[bisect_left(self.runs, last) : bisect_left(self.runs, index)]
        if self.ahead == 0:
            return len(runs) <= 1
        own, others = {None, self._bucket(held)}, set[str | None]()
        for op in (self.ops[at] for at in runs[1:]):
            names = [self.home.get(ref.name, ref.name) for ref in (*op.reads, *op.writes)]
            others |= {self.program.buffers[name].bucket for name in names} - own
            if not op.is_flat or held.name in names or len(others) > 1:
                return False
        return True

    # --- the copies

    def _allocate(self, number: int, visit: _Visit) -> None:
        """Names the copies of a visit, and makes their buffers."""
        held = self.program.buffers[visit.source.name]
        spaces = route(self.program, held.space, visit.space)
        visit.names = [f"{held.name}.{number}{suffix}" for suffix in ((".up", "") if len(spaces) > 1 else ("",))]
        for name, space in zip(visit.names, spaces, strict=True):
            self.buffers[name] = self._copy(visit.source, name, space)

    def _copy(self, source: Ref, name: str, space: str) -> Buffer:
        """A buffer for what `source` names."""
        like = staging(self.program.buffers[source.name], name, space)
        if source.start is None:
            return like
        if like.bucket is None:
            shape = source.shape if source.shape is not None else ((source.stop or 0) - source.start,)
            return replace(like, shape=shape)
        like = replace(like, sharded=self.program.cut(source), tile=source.tile)
        return replace(like, shape=(self.program.own_length(like) // like.per,))

    def _renamed(self, index: int, ref: Ref) -> Ref:
        """The reference of a use to its copy, or to what is held where the op runs."""
        if (index, ref) not in self.place:
            return ref
        held, visit = self.place[index, ref].held, self.place[index, ref].visit
        if visit is None:
            return held
        name = visit.names[-1]
        return replace(held, name=name) if self._bucket(visit.source) is not None else Ref(name)

    # --- where the moves go

    def _sums(self, visits: Iterable[tuple[int, _Visit]]) -> list[tuple[int, int]]:
        """For each visit, in the order of these ops: (the op, the bytes of the copies up to it)."""
        total = 0
        rows = []
        for index, visit in sorted(visits, key=_first):
            total += self.buffers[visit.names[-1]].nbytes
            rows.append((index, total))
        return rows

    def _insert(self, index: int, phase: int, op: Op) -> None:
        self.inserted.append((index, phase, len(self.inserted), op))

    def _fetches(self) -> None:
        for visit in self.visits:
            visit.start = visit.first
            if not visit.reads:
                continue
            barrier, why = self._written_before(visit), rewrite.reason_for(self.ops[visit.first], self.buffers)
            hops = len(visit.names)
            starts = [max(barrier, self._early(visit.first, hops - n)) for n in range(hops)]
            visit.start, source = starts[0], self._fetched(visit)
            for n, (start, name) in enumerate(zip(starts, visit.names, strict=True)):
                if n:
                    self._insert(start, FETCH_ON, make_op("wait", [Ref(source.name)], why=why))
                into = replace(source, name=name) if source.mine else self._into(visit, name)
                self._insert(start, FETCH_ON if n else FETCH, make_op("move", [source], [into], why=why))
                source = into
            self._insert(visit.first, FETCHED, make_op("wait", [Ref(source.name)], why=why))

    def _fetched(self, visit: _Visit) -> Ref:
        """What a visit fetches: its source, or the own slice of it where a gather brings the rest. A slice of what lies
        on disk begins anywhere in a page: then it is all."""
        held = self.program.buffers[visit.source.name]
        whole = visit.source.start is None and held.bucket is not None and held.sharded is None
        if not whole or visit.beyond or not visit.completed or held.space == DISK:
            return visit.source
        return Ref(held.name, 0, self.program.buckets[held.bucket or ""].length, None, mine=True)

    def _into(self, visit: _Visit, name: str) -> Ref:
        """All of a copy, in the form that the visit's source has."""
        source = visit.source
        return (
            replace(source, name=name) if source.start is not None and self._bucket(source) is not None else Ref(name)
        )

    def _early(self, index: int, hops: int) -> int:
        """Before which op a fetch for op `index` starts that has so many hops to go."""
        runs, most = self.ahead * hops, self.in_flight * hops
        if runs == 0:
            return index
        left = self.fetched[bisect_right(self.fetched, index, key=_first) - 1][1] - most
        full = self.fetched[bisect_left(self.fetched, left, key=_second)][0] if left > 0 else 0
        return min(_back(self.steps, index, runs), max(_back(self.long, index, runs), full))

    def _late(self, index: int) -> int:
        """Before which op a write-back is waited for that starts before op `index`."""
        soon = _forward(self.steps, index, max(self.ahead, 1), len(self.ops))
        if self.ahead == 0:
            return soon
        place = bisect_left(self.written, index, key=_first)
        most = self.in_flight + (self.written[place - 1][1] if place else 0)
        full = bisect_right(self.written, most, key=_second)
        room = self.written[full][0] + 1 if full < len(self.written) else len(self.ops)
        return max(soon, min(_forward(self.long, index, self.ahead, len(self.ops)), room))

    def _written_before(self, visit: _Visit) -> int:
        """Before which op the value is there that a visit brings."""
        for use in reversed(self.uses[visit.source.name]):
            if use.index < visit.first and use.writes and use.held.overlaps(visit.source):
                return (use.index if use.visit is None else use.visit.last) + 1
        return 0

    def _needed_after(self, visit: _Visit) -> int:
        """Before which op a write-back must be done: the next that uses what it writes, there or on a visit."""
        uses = (u for u in self.uses[visit.source.name] if u.index > visit.last and u.held.overlaps(visit.source))
        first = (u.index if u.visit is None else max(u.visit.start, visit.last + 1) for u in uses)
        return min(first, default=len(self.ops))

    def _write_backs(self) -> None:
        """Writes back what visits changed, in the order of their last uses."""
        writing = sorted((v for v in self.visits if v.writes), key=lambda v: v.last)
        following: dict[str, tuple[int, int]] = {}  # by what is held: where the next starts, and is waited for
        plans = []
        for visit in reversed(writing):
            start, hops = visit.last + 1, len(visit.names)
            after, end = following.get(visit.source.name, (len(self.ops), len(self.ops)))
            limit = min(self._needed_after(visit), end)
            onward = min(_forward(self.runs, start, 1, len(self.ops)), limit, after) if hops > 1 else start
            settled = max(onward, min(self._late(onward), limit))
            following[visit.source.name] = onward, settled
            plans.append((visit, start, onward, settled))
        for visit, start, onward, settled in reversed(plans):
            why = f"keep {visit.source.name}"
            own, name = visit.source, visit.names[-1]
            if len(visit.names) > 1:
                down = f"{name}.down"
                self.buffers[down] = self._copy(visit.source, down, HOST)
                self._insert(
                    start, WRITE, make_op("move", [self._into(visit, name)], [self._into(visit, down)], why=why)
                )
                self._insert(onward, WRITE_ON, make_op("wait", [Ref(down)], why=why))
                name = down
            self._insert(onward, WRITE_ON, make_op("move", [self._into(visit, name)], [own], why=why))
            phase = SETTLED if settled > onward else WRITTEN
            self._insert(settled, phase, make_op("wait", [Ref(own.name)], why=why))


_first, _second = itemgetter(0), itemgetter(1)


def _back(runs: Sequence[int], index: int, count: int) -> int:
    """The op that is so many of `runs` before op `index`; 0 where there are fewer."""
    place = bisect_left(runs, index) - count
    return runs[place] if place >= 0 else 0


def _forward(runs: Sequence[int], index: int, count: int, end: int) -> int:
    """The op behind the next so many of `runs` from op `index` on; `end` where there are fewer."""
    place = bisect_left(runs, index) + count - 1
    return runs[place] + 1 if place < len(runs) else end


def _completing(ops: Sequence[Op]) -> set[int]:
    """The gathers that bring together an update: from a slice of a buffer into all of it, over one axis or two."""
    found: set[int] = set()
    hops: dict[str, tuple[int, str]] = {}  # by the larger slice between two axes, its gather and what that read
    for index, op in enumerate(ops):
        if op.gathers:
            first, source = hops.get(op.reads[0].name, (index, op.reads[0].name))
            hops[op.target] = index, source
            found |= {first, index} if op.target == source else set()
    return found


def _without_moves(program: Program, home: Mapping[str, str]) -> list[Op]:
    """The ops but the moves of what is held, and the waits for them."""
    ops: list[Op] = []
    moving: set[str] = set()
    for op in program.ops:
        if op.moves and (op.target in home or op.reads[0].name in home):
            moving.add(op.target)
        elif op.is_wait and op.target in moving:
            moving.discard(op.target)
        else:
            ops.append(op)
    return ops
