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
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fzero.capture.provenance import defined_at
from fzero.capture.reads import host_draws, moving, read_places
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
    Use,
    Within,
    lines_of,
)
from fzero.capture.reads.cells import StandIn
from fzero.capture.reads.frames import LIBRARY, OTHER, USER, frames_for, kind_of, kind_of_code
from fzero.capture.reads.noted import Reads
from fzero.capture.reads.place_table import PlaceTable
from fzero.capture.reads.read_places import ATTRIBUTE, ENTRY, MISSING, ReadPlace, Spot

_EXTREMES = (NameChain("max", "global"), NameChain("min", "global"))  # of what was met so far: it is no count


@dataclass
class Reading:
    """What is read while a step is traced; a context around the trace. `fns`: the functions that the user gave.

    Only its methods write to it. `paused` is a context for work within the trace in which no user's line runs.
    """

    fns: Sequence[Callable[..., Any]]
    table: PlaceTable = field(default_factory=PlaceTable)
    codes: dict[types.CodeType, None] = field(default_factory=dict)  # of the user's functions that ran
    libraries: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # of others: code, globals
    passed: dict[int, types.CodeType] = field(default_factory=dict)  # code of no interest, by id: its hash reads all
    seen: set[tuple[types.CodeType, int, int | None]] = field(default_factory=set)  # lines, with offsets of uses
    draws: host_draws.Draws = field(default_factory=host_draws.Draws)
    moves: moving.Moves = field(default_factory=moving.Moves)
    last: dict[int, tuple[types.CodeType, int]] = field(default_factory=dict)  # the line before, by a frame's id

    def __post_init__(self) -> None:
        self.paused = frames_for(self)

    def __enter__(self) -> Reading:
        self.draws.start()
        for fn in self.fns:
            self.table.end(fn, defined_at(fn), "fzero", None, 0)
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
        if code in self.codes:
            self._line_before(frame)
            self.last[id(frame)] = code, number
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
        """After the last line of a function."""
        self.draws.settle(frame)
        self._line_before(frame, last=True)

    def _line_before(self, frame: types.FrameType, *, last: bool = False) -> None:
        """After a line: what it has made itself (`c = config(); x = x * c.alpha`) is there now."""
        code, number = self.last.pop(id(frame), (None, 0))
        if code is frame.f_code and (last or number in _local_lines(code)):
            ran = {None, *(at for at in lines_of(code).offsets if (code, number, at) in self.seen)}
            self._read(lines_of(code), number, frame, _where(frame, number), False, ran)

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
                if place is not None and (use.after or _plain(chain) not in written):
                    self.table.use(place)
                if users:
                    self._asked(use, frame, where)
                if callee is TRUTH and isinstance(value, read_places.CONTAINERS) and users:
                    self.table.note((read_places.COPY, value, bool), f"bool({chain})", where, place)
                elif users and value is not MISSING and not self._follows_itself(callee, frame):
                    self.table.end(value, str(chain), where, place, 0)
                    self.moves.given(value, str(chain), where, callee)
        return generators

    def _asked(self, use: Use, frame: types.FrameType, where: str) -> None:
        """Notes what a use takes from its owner, if it ends in a method that may."""
        *owners, last = use.chain.steps or (None,)
        method = "get" if isinstance(last, Get) else last
        if method in moving.METHODS:
            owner = NameChain(use.chain.name, use.chain.scope, tuple(owners))
            value, _ = self._follow(owner, frame, "", [], False)
            self.moves.asked(value, method, str(owner), where, use.dropped)

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
                place = self.table.note((ENTRY, frame.f_globals, name), name, where, None)
        else:
            value = frame.f_locals.get(name, MISSING)
            if chain.scope == "free" and value is not MISSING and notes:
                spot = (ATTRIBUTE, self.table.cells.of(frame.f_code, name, value), "cell_contents")
                place = self.table.note(spot, name, where, None, value)
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
                if step in moving.CHANGES:
                    self.table.change(owner)
                else:
                    self.table.end(owner, str(NameChain(chain.name, chain.scope, chain.steps[:i])), where, place, 0)
            for spot in spots if notes else ():
                place = self.table.note(spot, name, where, place)
                place.behind = value
        if (generator := host_draws.generator_of(value)) is not None:
            generators.append(generator)
        return value, place

    def _step(self, owner: Any, step: Step | NameChain, frame: types.FrameType, where: str) -> tuple[list[Spot], Any]:
        """(where a step's value lies, the value), of an owner that is no dict for the method `get`, too."""
        if isinstance(step, str):
            return read_places.attribute(owner, step)
        if isinstance(step, Get) and not isinstance(owner, (dict, read_places.ENVIRON)):
            return read_places.attribute(owner, "get")[0], MISSING
        asked = step.key if isinstance(step, (Get, Within, Named)) else step
        key = asked.value if isinstance(asked, ConstantKey) else self._follow(asked, frame, where, [], False)[0]
        if isinstance(step, Named):
            return read_places.attribute(owner, key) if isinstance(key, str) else ([], MISSING)
        if isinstance(step, Within):
            known = isinstance(owner, (dict, read_places.ENVIRON)) and key is not MISSING and read_places.is_fixed(key)
            return ([(read_places.COPY, owner, read_places.Has(key))] if known else []), MISSING
        if isinstance(step, Get) and isinstance(owner, read_places.ENVIRON):
            return [(read_places.COPY, owner, read_places.Asked("get", key))], MISSING
        return read_places.item(owner, key)

    def _writes(self, lines: Lines, number: int, frame: types.FrameType, where: str, at: int | None) -> None:
        updates = {
            *(use.chain for use in lines.updates.get(number, ())),
            *(_plain(use.chain) for use in lines.reads.get(number, ()) if use.callee not in _EXTREMES),
        }
        for chain in (use.chain for use in lines.writes.get(number, ()) if use.at == at):
            spot = self._target(chain, frame, where)
            if spot is None:
                continue
            inner = isinstance(spot[1], StandIn)
            before = frame.f_locals.get(chain.name) if inner else ReadPlace(*spot, "", "", None).now()
            self.table.write(spot, before, str(chain), where, chain in updates)
            if isinstance(spot[1], read_places.CONTAINERS) and chain.steps:
                self.table.change(spot[1])

    def _target(self, chain: NameChain, frame: types.FrameType, where: str) -> Spot | None:
        """Where a line puts the value of what it writes to; None where that is the function's own."""
        if not chain.steps:
            if chain.scope == "global":
                return ENTRY, frame.f_globals, chain.name
            value = frame.f_locals.get(chain.name, MISSING)
            return ATTRIBUTE, self.table.cells.of(frame.f_code, chain.name, value), "cell_contents"
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
        """What stays to be compared. Raises CaptureError for draws, counts, and what is taken from an iterator."""
        self.table.resolve(self.codes)
        self.draws.check(defined_at(self.fns[-1]))
        for spot, name, where in self._of_libraries():
            self.table.note(spot, name, where, None)
        kept = self.table.kept()
        self.moves.check(kept)
        return Reads(kept)

    def _of_libraries(self) -> Iterator[tuple[Spot, str, str]]:
        """The places of the libraries' functions that ran."""
        for code, variables in self.libraries.items():
            first, _, rest = code.co_qualname.partition(".")
            owner = variables.get(first, MISSING)
            if owner is MISSING or "<" in code.co_qualname:
                continue
            where = f"the step, in {code.co_filename.rsplit('site-packages/', 1)[-1]},"
            yield (ENTRY, variables, first), first, where
            if isinstance(owner, type) and "." not in rest and rest in vars(owner):
                yield (ATTRIBUTE, owner, rest), f"{first}.{rest}", where


def _where(frame: types.FrameType, number: int | None = None) -> str:
    code, line = frame.f_code, number or frame.f_lineno
    return f"{code.co_qualname.rpartition('<locals>.')[2]} ({code.co_filename.rsplit('/', 1)[-1]}:{line})"


@functools.lru_cache(maxsize=4096)
def _local_lines(code: types.CodeType) -> frozenset[int]:
    """The lines that read a part of a local variable."""
    return frozenset(
        line
        for line, uses in lines_of(code).reads.items()
        if any(use.chain.scope == "local" and use.chain.steps for use in uses)
    )


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
