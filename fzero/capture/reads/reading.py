"""reading: notes what the user's functions read from Python while a step is traced.

1. `frames` tells of each line that a function of the user runs, before it runs; of a line with jumps (`a and cfg.b`),
   of each instruction, so that what it leaves out is not read.
2. `bytecode` says what the line names; the names are followed to their places (`places`), whose values are noted.
3. After the trace a place is dropped if its value is the trace's own (a tensor of it; an object that it made), or if
   the traced functions write to it: a cache that they fill. A number that they read and change is refused: it would be
   counted once.
4. What is left is compared before each step (`noted.Reads`).

Of functions of installed libraries only the place of the function itself is noted, so that another function there is
seen. Lines of both are looked at for draws from a generator (`draws`).
"""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fzero.capture.provenance import defined_at
from fzero.capture.reads import host_draws, read_places
from fzero.capture.reads.bytecode import (
    RETURNED,
    TESTED,
    TRUTH,
    ConstantKey,
    Get,
    Lines,
    NameChain,
    Named,
    Step,
    Within,
    lines_of,
)
from fzero.capture.reads.cells import Cells, StandIn
from fzero.capture.reads.frames import LIBRARY, OTHER, USER, frames_for, kind_of, kind_of_code
from fzero.capture.reads.noted import Reads
from fzero.capture.reads.read_places import ATTRIBUTE, ENTRY, MISSING, ReadPlace, Spot
from fzero.errors import CaptureError

_CHANGES = {"append", "extend", "insert", "clear", "update", "setdefault", "add", "remove", "discard", "pop", "popitem"}
_CHANGES |= {"appendleft", "extendleft", "popleft", "rotate"}  # of a deque
_EXTREMES = (NameChain("max", "global"), NameChain("min", "global"))  # of what was met so far: it is no count
_Id = tuple[str, int, Any]


@dataclass
class _Written:
    """A place that the traced functions write to: its value before, and whether the line that writes it also
    reads it, as a count does (the longest sequence so far is written, too, but it is no count)."""

    before: Any
    name: str
    where: str
    from_itself: bool


@dataclass
class Reading:
    """What is read while a step is traced; a context around the trace. `fns`: the functions that the user gave.

    Only its methods write to it. `paused` is a context for work within the trace in which no user's line runs.
    """

    fns: Sequence[Callable[..., Any]]
    places: dict[_Id, ReadPlace] = field(default_factory=dict)
    written: dict[_Id, _Written] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)  # ids of containers that a method call changed
    ended: dict[int, Any] = field(default_factory=dict)  # by id, objects that were given to what may read all of them
    used: set[_Id] = field(default_factory=set)  # places that a line reads which does not write them
    codes: dict[types.CodeType, None] = field(default_factory=dict)  # of the user's functions that ran
    libraries: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # of others: code, globals
    passed: dict[int, types.CodeType] = field(default_factory=dict)  # code of no interest, by id: its hash reads all
    seen: set[tuple[types.CodeType, int, int | None]] = field(default_factory=set)  # lines, with offsets of uses
    cells: Cells = field(default_factory=Cells)
    draws: host_draws.Draws = field(default_factory=host_draws.Draws)

    def __post_init__(self) -> None:
        self.paused = frames_for(self)

    def __enter__(self) -> Reading:
        self.draws.start()
        for fn in self.fns:
            self._end(fn, defined_at(fn), "fzero", None, 0)
        self.paused.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.paused.stop()

    # --- while the trace runs

    def entered(self, frame: types.FrameType) -> bool:
        """Whether the lines of a function are of interest."""
        code = frame.f_code
        if id(code) in self.passed:
            return False
        if code in self.codes:
            return True
        if drawing := host_draws.of_the_system(frame):
            self.draws.of_system = _where(drawing)
        kind = kind_of_code(code, frame.f_globals)
        if kind == USER:
            self.codes[code] = None
            return True
        if kind == LIBRARY:
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            if kind_of(caller) != OTHER and not code.co_name.startswith("__"):
                self.libraries[code] = frame.f_globals
            return bool(_draw_lines(code))
        if not host_draws.may_ask_the_system(code) and code.co_filename != "<string>":
            self.passed[id(code)] = code
        return False

    def line(self, frame: types.FrameType) -> None:
        """Notes what the line names that a function is about to run."""
        code, number = frame.f_code, frame.f_lineno
        self.draws.settle(frame)
        if code in self.codes or number in _draw_lines(code):
            self._uses(frame, number, None)

    def by_instruction(self, code: types.CodeType) -> bool:
        """Whether a line of a function of the user may leave a part of it out."""
        return code in self.codes and bool(lines_of(code).offsets)

    def instruction(self, frame: types.FrameType, offset: int) -> None:
        """Notes what a part of a line names that was not left out."""
        if (number := lines_of(frame.f_code).offsets.get(offset)) is not None:
            self._uses(frame, number, offset)

    def _uses(self, frame: types.FrameType, number: int, at: int | None) -> None:
        lines, where, users = lines_of(frame.f_code), _where(frame), frame.f_code in self.codes
        first = (frame.f_code, number, at) not in self.seen
        self.seen.add((frame.f_code, number, at))
        generators = self._read(lines, number, frame, where, first, {at})
        if users and first:
            self._writes(lines, number, frame, where, at)
        self.draws.expect(frame, where, generators)

    def left(self, frame: types.FrameType) -> None:
        """After the last line of a function; what a line has made itself (`c = config(); return x * c.alpha`) is there
        now."""
        self.draws.settle(frame)
        code, number = frame.f_code, frame.f_lineno
        if code in self.codes:
            ran = {None, *(at for at in lines_of(code).offsets if (code, number, at) in self.seen)}
            self._read(lines_of(code), number, frame, _where(frame), False, ran)

    def _read(
        self, lines: Lines, number: int, frame: types.FrameType, where: str, first: bool, ran: Set[int | None]
    ) -> list[Any]:
        """Notes what a line names, of the uses that `ran`; the generators that it names. Of a library's all count."""
        generators: list[Any] = []
        users = frame.f_code in self.codes
        for use in lines.seeds.get(number, ()):
            if use.at in ran or not users:
                self._follow(use.chain, frame, where, generators, False)
        self.draws.seeded |= {id(generator) for generator in generators}
        written = {use.chain for use in lines.writes.get(number, ())}
        for use in lines.reads.get(number, ()):
            chain, callee = use.chain, use.callee
            if not users or (use.at in ran and (first or _varies(chain))):
                value, place = self._follow(chain, frame, where, generators, users)
                if place is not None and _plain(chain) not in written:
                    self.used.add(_id(place))
                if callee is TRUTH and isinstance(value, read_places.CONTAINERS) and users:
                    self._note((read_places.COPY, value, bool), f"bool({chain})", where, place)
                elif users and value is not MISSING and not self._follows_itself(callee, frame):
                    self._end(value, str(chain), where, place, 0)
        return generators

    def _follows_itself(self, callee: NameChain | None, frame: types.FrameType) -> bool:
        """Whether a value is given to a function of the user, whose own lines say what they read of it. What a
        `__getattr__` returns is part of a longer chain in the line that asks for it. `is None` reads nothing of it."""
        if callee is TESTED:
            return True
        if callee is RETURNED:
            return frame.f_code.co_name == "__getattr__"
        fn = MISSING if callee is None else self._follow(callee, frame, "", [], False)[0]
        fn = fn.__func__ if isinstance(fn, types.MethodType) else fn
        return isinstance(fn, types.FunctionType) and kind_of_code(fn.__code__, fn.__globals__) == USER

    def _follow(
        self, chain: NameChain, frame: types.FrameType, where: str, generators: list[Any], notes: bool
    ) -> tuple[Any, ReadPlace | None]:
        """(the value of a chain, its place). Notes every place on the way where `notes`; adds to `generators`."""
        name, place = chain.name, None
        value: Any = MISSING
        if chain.scope == "module":
            value = sys.modules.get(name, MISSING)
        elif chain.scope == "global":
            value = frame.f_globals.get(name, MISSING)
            if value is not MISSING and notes:
                place = self._note((ENTRY, frame.f_globals, name), name, where, None)
        else:
            value = frame.f_locals.get(name, MISSING)
            if chain.scope == "free" and value is not MISSING and notes:
                spot = (ATTRIBUTE, self.cells.of(frame.f_code, name, value), "cell_contents")
                place = self._note(spot, name, where, None, value)
        for i, step in enumerate(chain.steps):
            if (generator := host_draws.generator_of(value)) is not None:
                generators.append(generator)
            if value is MISSING or read_places.is_traced(value):
                return MISSING, None
            owner = value
            name = str(NameChain(chain.name, chain.scope, chain.steps[: i + 1]))
            spots, value = self._step(owner, step, frame, where)
            whole = isinstance(owner, np.ndarray) or (isinstance(step, str) and read_places.of_all(owner, step))
            whole = whole or (isinstance(step, Within) and not isinstance(owner, dict))
            if whole and notes:
                self.changed |= {id(owner)} if step in _CHANGES else set()
                if step not in _CHANGES:
                    self._end(owner, str(NameChain(chain.name, chain.scope, chain.steps[:i])), where, place, 0)
            for spot in spots if notes else ():
                place = self._note(spot, name, where, place)
                place.behind = value
        if (generator := host_draws.generator_of(value)) is not None:
            generators.append(generator)
        return value, place

    def _step(self, owner: Any, step: Step | NameChain, frame: types.FrameType, where: str) -> tuple[list[Spot], Any]:
        """(where a step's value lies, the value), of an owner that is no dict for the method `get`, too."""
        if isinstance(step, str):
            return read_places.attribute(owner, step)
        if isinstance(step, Get) and not isinstance(owner, dict):
            return read_places.attribute(owner, "get")[0], MISSING
        asked = step.key if isinstance(step, (Get, Within, Named)) else step
        key = asked.value if isinstance(asked, ConstantKey) else self._follow(asked, frame, where, [], False)[0]
        if isinstance(step, Named):
            return read_places.attribute(owner, key) if isinstance(key, str) else ([], MISSING)
        if isinstance(step, Within):
            known = isinstance(owner, dict) and key is not MISSING and read_places.is_fixed(key)
            return ([(read_places.COPY, owner, read_places.Has(key))] if known else []), MISSING
        return read_places.item(owner, key)

    def _note(self, spot: Spot, name: str, where: str, parent: ReadPlace | None, value: Any = MISSING) -> ReadPlace:
        kind, holder, key = spot
        known = (kind, id(holder), key)
        if known not in self.places:
            self.used.discard(known)
            place = ReadPlace(kind, holder, key, name, where, value, parent)
            place.value = place.now() if value is MISSING else value
            self.places[known] = place
        return self.places[known]

    def _end(self, value: Any, name: str, where: str, parent: ReadPlace | None, depth: int) -> None:
        """At the end of a chain: a function is known by its code, and what a container holds is noted."""
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, functools.partial):
            self._given(value, name, where, parent)
            return
        if isinstance(value, types.FunctionType):
            self.cells.know(value)
            return
        self.ended[id(value)] = value
        known_module = isinstance(value, nn.Module) and (ENTRY, id(vars(value)), "training") in self.places
        parts = read_places.contents(value, depth) if depth < read_places.DEEP and not known_module else []
        if any(read_places.is_traced(ReadPlace(*spot, "", "", None).now()) for spot, _ in parts):
            return
        for spot, end in parts:
            place = self._note(spot, name + end, where, parent)
            self.used.add(_id(place))
            if not isinstance(value, nn.Module):
                self._end(place.value, place.name, where, place, depth + 1)

    def _given(self, fn: functools.partial[Any], name: str, where: str, parent: ReadPlace | None) -> None:
        """Notes a partial's function and arguments; what it reads of these, the lines of the user's function name."""
        users = isinstance(fn.func, types.FunctionType) and kind_of_code(fn.func.__code__, fn.func.__globals__) == USER
        self._end(fn.func, name, where, parent, 0)
        for spot, end in read_places.contents(fn):
            place = self._note(spot, name + end, where, parent)
            for inner, key in read_places.contents(place.value):
                part = self._note(inner, name + end + key, where, place)
                self.used.add(_id(part))
                if not users:
                    self._end(part.value, part.name, where, part, 1)

    def _writes(self, lines: Lines, number: int, frame: types.FrameType, where: str, at: int | None) -> None:
        updates = {
            *(use.chain for use in lines.updates.get(number, ())),
            *(_plain(use.chain) for use in lines.reads.get(number, ()) if use.callee not in _EXTREMES),
        }
        for chain in (use.chain for use in lines.writes.get(number, ()) if use.at == at):
            spot = self._target(chain, frame, where)
            if spot is None:
                continue
            known = (spot[0], id(spot[1]), spot[2])
            if known not in self.written:
                value = (
                    frame.f_locals.get(chain.name)
                    if isinstance(spot[1], StandIn)
                    else ReadPlace(*spot, "", "", None).now()
                )
                self.written[known] = _Written(value, str(chain), where, chain in updates)
            self.changed |= {id(spot[1])} if isinstance(spot[1], read_places.CONTAINERS) and chain.steps else set()

    def _target(self, chain: NameChain, frame: types.FrameType, where: str) -> Spot | None:
        """Where a line puts the value of what it writes to; None where that is the function's own."""
        if not chain.steps:
            if chain.scope == "global":
                return ENTRY, frame.f_globals, chain.name
            value = frame.f_locals.get(chain.name, MISSING)
            return ATTRIBUTE, self.cells.of(frame.f_code, chain.name, value), "cell_contents"
        owner, _ = self._follow(NameChain(chain.name, chain.scope, chain.steps[:-1]), frame, where, [], False)
        step = chain.steps[-1]
        if owner is MISSING or read_places.is_traced(owner) or isinstance(step, (Get, Within, Named)):
            return None
        if isinstance(step, str):
            return read_places.target(owner, step)
        key = step.value if isinstance(step, ConstantKey) else self._follow(step, frame, where, [], False)[0]
        kind = read_places.ITEM if isinstance(owner, list) else ENTRY
        return (kind, owner, key) if isinstance(owner, (dict, list)) else None

    # --- after it

    def noted(self) -> Reads:
        """What stays to be compared. Raises CaptureError for a draw, and for a number that the functions count."""
        self._resolve_cells()
        self._defaults()
        self.draws.check(defined_at(self.fns[-1]))
        for known, written in self.written.items():
            self._refuse_count(written, self.places.get(known))
        for fn_place in self._of_libraries():
            self._note(*fn_place)
        for place in self.places.values():
            place.whole = id(place.value) in self.ended
        self.ended.clear()
        own = {id(place) for known, place in self.places.items() if self._is_own(known, place)}
        for known in [known for known, place in self.places.items() if any(id(p) in own for p in _line_of(place))]:
            del self.places[known]
        self._drop_short_lived()
        self._drop_within()
        return Reads(list(self.places.values()))

    def _drop_short_lived(self) -> None:
        """Drops the places of objects that only these places hold: the traced functions made them, and left them."""
        while True:
            ours = Counter(id(x) for place in self.places.values() for x in (place.holder, place.value))
            gone = [
                known
                for known, place in self.places.items()
                if host_draws.references(place.holder) <= ours[id(place.holder)]
            ]
            left = {id(self.places.pop(known)) for known in gone}
            for place in self.places.values():
                place.parent = None if id(place.parent) in left else place.parent
            if not gone:
                return

    def _drop_within(self) -> None:
        """Drops what is noted of modules within a module of which all parts are: the outer one's places tell it too."""
        noted = [p for p in self.places.values() if p.kind == read_places.COPY and isinstance(p.holder, nn.Module)]
        inner = {id(part) for p in noted for part in p.holder.modules() if part is not p.holder}
        for known in [k for k, p in self.places.items() if p.kind == read_places.COPY and id(p.holder) in inner]:
            del self.places[known]

    def _is_own(self, known: _Id, place: ReadPlace) -> bool:
        """Whether a place is the traced functions' own: they write to it, or its value is of the trace."""
        own = known in self.written or place.holder is None or read_places.is_traced(place.value)
        sized = place.kind in (read_places.COPY, read_places.ITEM) and id(place.holder) in self.changed
        return own or sized or not place.holds(place.now())

    def _refuse_count(self, written: _Written, place: ReadPlace | None) -> None:
        if place is None or not written.from_itself or _id(place) not in self.used:
            return
        now = place.now()
        if (
            read_places.is_number(written.before)
            and read_places.is_number(now)
            and not read_places.same(written.before, now)
        ):
            raise CaptureError(
                f"{written.name}, which {place.where} reads, is changed by {written.where} from {written.before!r} to "
                f"{now!r}: that happens once, when the step is traced, and not at each step. Count in the state "
                "(Spec(step=...), or the optimizer's count), or pass the number in the batch as a tensor"
            )

    def _resolve_cells(self) -> None:
        """Puts the cells of outer functions' variables in the places of their stand-ins."""
        self.cells.find(self.codes)
        for stand_in in self.cells.stand_ins.values():
            known = (ATTRIBUTE, id(stand_in), "cell_contents")
            place, written = self.places.pop(known, None), self.written.pop(known, None)
            cell = self.cells.cell(stand_in)
            if cell is None:
                continue
            read = known in self.used
            known = (ATTRIBUTE, id(cell), "cell_contents")
            self.used |= {known} if read else set()
            if written is not None:
                self.written.setdefault(known, written)
            if place is not None:
                place.holder = cell
                self.places.setdefault(known, place)
        self.cells.stand_ins.clear()

    def _defaults(self) -> None:
        """Notes the defaults of the user's functions that ran."""
        for fn in (fn for code in self.codes for fn in self.cells.functions.get(code, ())):
            for part in ("__defaults__", "__kwdefaults__"):
                if values := getattr(fn, part):
                    name = f"{fn.__name__}.{part}"
                    place = self._note((ATTRIBUTE, fn, part), name, defined_at(fn), None)
                    for spot, end in read_places.contents(values):  # what is read of these, the function's lines name
                        self.used.add(_id(self._note(spot, name + end, defined_at(fn), place)))

    def _of_libraries(self) -> Iterator[tuple[Spot, str, str, None]]:
        """The places of the libraries' functions that ran."""
        for code, variables in self.libraries.items():
            first, _, rest = code.co_qualname.partition(".")
            owner = variables.get(first, MISSING)
            if owner is MISSING or "<" in code.co_qualname:
                continue
            where = f"the step, in {code.co_filename.rsplit('site-packages/', 1)[-1]},"
            yield (ENTRY, variables, first), first, where, None
            if isinstance(owner, type) and "." not in rest and rest in vars(owner):
                yield (ATTRIBUTE, owner, rest), f"{first}.{rest}", where, None


def _where(frame: types.FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname.rpartition('<locals>.')[2]} ({code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"


@functools.lru_cache(maxsize=4096)
def _draw_lines(code: types.CodeType) -> frozenset[int]:
    """The lines that name something as methods of generators are named."""
    if not host_draws.NAMES.intersection(code.co_names):
        return frozenset()
    return frozenset(
        line
        for line, reads in lines_of(code).reads.items()
        if any(
            host_draws.NAMES.intersection([c.name, *(s for s in c.steps if isinstance(s, str))])
            for c in (use.chain for use in reads)
        )
    )


def _varies(chain: NameChain) -> bool:
    """Whether a chain's places may be others each time that its line runs."""
    keys = (step.key if isinstance(step, (Get, Within, Named)) else step for step in chain.steps)
    return chain.scope != "global" or any(_varies(key) for key in keys if isinstance(key, NameChain))


def _plain(chain: NameChain) -> NameChain:
    """A chain that reads an entry by `get`, as one that writes it has it."""
    steps = tuple(step.key if isinstance(step, Get) else step for step in chain.steps)
    return NameChain(chain.name, chain.scope, steps)


def _id(place: ReadPlace) -> _Id:
    return place.kind, id(place.holder), place.key


def _line_of(place: ReadPlace) -> Iterator[ReadPlace]:
    """A place, and those that its holder came from."""
    at: ReadPlace | None = place
    while at is not None:
        yield at
        at = at.parent
