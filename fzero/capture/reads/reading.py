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

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from fzero.capture.provenance import defined_at, short_name
from fzero.capture.reads import host_draws, moving, read_places, worth
from fzero.capture.reads.bytecode import RETURNED, TESTED, TRUTH, lines_of
from fzero.capture.reads.cells import StandIn
from fzero.capture.reads.chains import Computed, Get, Lines, NameChain, Named, Use, Within
from fzero.capture.reads.following import Following
from fzero.capture.reads.frames import LIBRARY, OTHER, USER, frames_for, kind_of, kind_of_code
from fzero.capture.reads.noted import Reads
from fzero.capture.reads.place_table import PlaceTable
from fzero.capture.reads.read_places import ATTRIBUTE, ENTRY, ReadPlace, Spot
from fzero.capture.reads.worth import MISSING

_OF_ALL_FIELDS = (dataclasses.asdict, dataclasses.astuple, dataclasses.replace, copy.copy, copy.deepcopy, dict)
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
    seen: set[tuple[types.CodeType, int, int | None]] = field(default_factory=set)  # lines, with offsets of uses
    draws: host_draws.Draws = field(default_factory=host_draws.Draws)
    moves: moving.Moves = field(default_factory=moving.Moves)
    last: dict[int, tuple[types.CodeType, int]] = field(default_factory=dict)  # the line before, by a frame's id

    def __post_init__(self) -> None:
        self.paused = frames_for(self)
        self.following = Following(self.table)

    def __enter__(self) -> Reading:
        self.draws.start()
        for fn in self.fns:
            self.table.end(fn, defined_at(fn), "fzero", None, 0)
        self.paused.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.paused.stop()

    # --- while the trace runs

    def entered(self, frame: types.FrameType) -> bool | None:
        """Whether the lines of a function are of interest; None: they are not, but may be where it is called again."""
        code = frame.f_code
        if drawing := host_draws.of_the_system(frame):
            self.draws.of_system = _where(drawing)
        kind = kind_of_code(code, frame.f_globals)
        if kind == USER:
            if code not in self.codes:
                self.codes[code] = None
                self._method(frame)
            return True
        if kind == LIBRARY:
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            dunder = code.co_name.startswith("__")
            if kind_of(caller) != OTHER and not dunder:
                self.libraries[code] = frame.f_globals
            return True if _draw_lines(code) else False if dunder or code in self.libraries else None
        return None if host_draws.may_ask_the_system(code) or code.co_filename == "<string>" else False

    def _method(self, frame: types.FrameType) -> None:
        """Notes where a method lies that runs, for not each is named: `__mul__`, `forward`, one of `super()`."""
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        found = {name: kind for kind in reversed(_class_of(owner).__mro__) for name in _names_of(kind, code)}
        for name, kind in found.items():
            first = next(one for one in _class_of(owner).__mro__ if name in vars(one))
            for spot in read_places.attribute(owner if kind is first else kind, name)[0]:
                place = self.table.note(spot, f"{kind.__qualname__}.{name}", _where(frame), None)
                self.table.wrapped(place.value, place.name, place.where, place)
            for fn in _running(vars(kind)[name], code):
                self.table.cells.know(fn)

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

    def left(self, frame: types.FrameType, value: Any) -> None:
        """After the last line of a function. value: what it returns."""
        self.draws.settle(frame)
        self._line_before(frame, last=True)
        caller = frame.f_back
        if caller is not None and frame.f_code in self.codes and caller.f_code in self.codes:
            self.following.results.setdefault(id(caller), []).append((frame.f_code, value))

    def _line_before(self, frame: types.FrameType, *, last: bool = False) -> None:
        """After a line: what it has made itself (`c = config(); x = x * c.alpha`) is there now."""
        code, number = self.last.pop(id(frame), (None, 0))
        if code is frame.f_code and (last or number in _local_lines(code) or id(frame) in self.following.results):
            ran = {None, *(at for at in lines_of(code).offsets if (code, number, at) in self.seen)}
            self._read(lines_of(code), number, frame, _where(frame, number), False, ran)
        self.following.results.pop(id(frame), None)

    def _read(
        self, lines: Lines, number: int, frame: types.FrameType, where: str, first: bool, ran: Set[int | None]
    ) -> list[Any]:
        """Notes what a line names, of the uses that `ran`; the generators that it names. Of a library's all count."""
        generators: list[Any] = []
        users = frame.f_code in self.codes
        for use in lines.seeds.get(number, ()):
            if use.at in ran or not users:
                self.following.follow(use.chain, frame, where, generators, False)
        self.draws.seeded |= {id(generator) for generator in generators}
        written = {use.chain for use in lines.writes.get(number, ())}
        for use in lines.reads.get(number, ()):
            chain = use.chain
            again = first or _varies(chain) or id(frame) in self.following.results
            if not users or (use.at in ran and again):
                called = chain.called
                for result in [MISSING] if called is None else self.following.results_of(called, frame):
                    self._note(use, frame, where, generators, _plain(chain) in written, result)
        return generators

    def _note(
        self, use: Use, frame: types.FrameType, where: str, generators: list[Any], written: bool, result: Any
    ) -> None:
        """Notes what one use reads. written: the line writes to the same. result: of the call that it begins with."""
        chain, callee, users = use.chain, use.callee, frame.f_code in self.codes
        value, place = self.following.follow(chain, frame, where, generators, users, result)
        if place is not None and (use.after or not written):
            self.table.use(place)
        if not users:
            return
        self._asked(use, frame, where)
        if callee is TRUTH and read_places.has_length(value):
            self.table.note((read_places.COPY, value, bool), f"bool({chain})", where, place)
        elif value is not MISSING and not self._follows_itself(callee, frame, value):
            self.table.end(value, str(chain), where, place, 0)
            self.moves.given(value, str(chain), where, callee)
            if any(self._function(callee, frame) is fn for fn in _OF_ALL_FIELDS) and hasattr(value, "__dict__"):
                for name, fields in (str(chain), vars(value)), *_fields_within(vars(value), str(chain), 0):
                    self.table.end(fields, name, where, place, 0)

    def _asked(self, use: Use, frame: types.FrameType, where: str) -> None:
        """Notes what a use takes from its owner, if it ends in a method that may."""
        *owners, last = use.chain.steps or (None,)
        method = "get" if isinstance(last, Get) else last
        if method in moving.METHODS:
            owner = replace(use.chain, steps=tuple(owners))
            value, _ = self.following.follow(owner, frame, "", [], False)
            self.moves.asked(value, method, str(owner), where, use.dropped)

    def _follows_itself(self, callee: NameChain | None, frame: types.FrameType, value: Any) -> bool:
        """Whether a value is given to a function of the user, whose own lines say what they read of it. What a
        `__getattr__` returns is part of a longer chain in the line that asks for it; so is a configuration of a library
        that a function returns. `is None` reads nothing of it."""
        if callee is TESTED:
            return True
        if callee is RETURNED:
            return frame.f_code.co_name == "__getattr__" or read_places.maps_of_library(value)
        fn = self._function(callee, frame)
        return isinstance(fn, types.FunctionType) and kind_of_code(fn.__code__, fn.__globals__) == USER

    def _function(self, callee: NameChain | None, frame: types.FrameType) -> Any:
        """What a value is given to; MISSING where it is not known."""
        fn = MISSING if callee is None else self.following.follow(callee, frame, "", [], False)[0]
        return fn.__func__ if isinstance(fn, types.MethodType) else fn

    def _writes(self, lines: Lines, number: int, frame: types.FrameType, where: str, at: int | None) -> None:
        updates = {
            *(use.chain for use in lines.updates.get(number, ())),
            *(_plain(use.chain) for use in lines.reads.get(number, ()) if use.callee not in _EXTREMES),
        }
        for chain in (use.chain for use in lines.writes.get(number, ()) if use.at == at):
            spot = self.following.target(chain, frame, where)
            if spot is None:
                continue
            inner = isinstance(spot[1], StandIn)
            before = frame.f_locals.get(chain.name) if inner else ReadPlace(*spot, "", "", None).now()
            self.table.write(spot, before, str(chain), where, chain in updates, _callers(frame))
            if isinstance(spot[1], read_places.CONTAINERS) and chain.steps:
                self.table.change(spot[1])

    # --- after it

    def noted(self) -> Reads:
        """What stays to be compared. Raises CaptureError for draws, counts, and what is taken from an iterator."""
        self.following.results.clear()
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


def _names_of(kind: type, code: types.CodeType) -> list[str]:
    """The names under which a class has a function of this code: its own, else others (`forward = other`)."""
    if code.co_name in vars(kind):
        return [code.co_name] if _running(vars(kind)[code.co_name], code) else []
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return []
    return [name for name, raw in vars(kind).items() if _running(raw, code)]


def _running(raw: Any, code: types.CodeType) -> list[types.FunctionType]:
    """The functions of this code that a class's attribute runs."""
    fns = (fn for outer in worth.functions_of(raw) for fn in worth.within(outer))
    return [fn for fn in fns if isinstance(fn, types.FunctionType) and fn.__code__ is code]


def _fields_within(value: Any, name: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of the dataclasses that a value holds, each with its name: what copies all of it reads these too."""
    if depth > read_places.DEEP:
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield name, vars(value)
        value = vars(value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in items:
        yield from _fields_within(part, f"{name}[{key!r}]", depth + 1)


def _class_of(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _callers(frame: types.FrameType) -> Iterator[str]:
    """The lines from which a function was called."""
    at = frame.f_back
    while at is not None:
        yield _where(at)
        at = at.f_back


def _where(frame: types.FrameType, number: int | None = None) -> str:
    code, line = frame.f_code, number or frame.f_lineno
    return f"{code.co_qualname.rpartition('<locals>.')[2]} ({short_name(code.co_filename)}:{line})"


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
    return chain.scope != "global" or any(map(_key_varies, keys))


def _key_varies(key: Any) -> bool:
    return (
        _varies(key) if isinstance(key, NameChain) else isinstance(key, Computed) and any(map(_key_varies, key.parts))
    )


def _plain(chain: NameChain) -> NameChain:
    """A chain that reads an entry by `get`, as one that writes it has it."""
    steps = tuple(step.key if isinstance(step, Get) else step for step in chain.steps)
    return replace(chain, steps=steps)
