"""place_table: the places that a trace read or wrote, and which of them stay to be compared.

`reading` fills the table while the lines run; `kept` drops what is the trace's own. A number that the functions read
and change is refused: it would be counted once.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fzero.capture.provenance import defined_at, describe
from fzero.capture.reads import host_draws, module_parts, read_places, worth
from fzero.capture.reads.cells import Cells
from fzero.capture.reads.frames import USER, kind_of_code
from fzero.capture.reads.read_places import ATTRIBUTE, ENTRY, ReadPlace, Spot
from fzero.capture.reads.worth import MISSING
from fzero.errors import CaptureError

PlaceId = tuple[str, int, Any]


@dataclass
class _Written:
    """A place that the traced functions write to.

    before: its value then. from_itself: whether the line that writes it also reads it, as a count does (the longest
    sequence so far is written, too, but it is no count). copied: whether it is of a copy, made for this call, of what
    the user holds. after_read: whether another line had read it. anew: the tensor that each step computes anew and
    leaves there.
    """

    spot: Spot
    before: Any
    name: str
    where: str
    from_itself: bool
    copied: bool
    after_read: bool
    anew: torch.Tensor | None = None


@dataclass
class PlaceTable:
    """Only its methods write to it."""

    places: dict[PlaceId, ReadPlace] = field(default_factory=dict)
    written: dict[PlaceId, _Written] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)  # ids of containers that a method call changed
    ended: dict[int, Any] = field(default_factory=dict)  # by id, objects that were given to what may read all of them
    used: set[PlaceId] = field(default_factory=set)  # places that a line reads which does not write them
    copied: set[PlaceId] = field(default_factory=set)  # places of copies, made for a call, of what the user holds
    cells: Cells = field(default_factory=Cells)

    # --- while the trace runs

    def use(self, place: ReadPlace) -> None:
        """A line reads it and does not write it."""
        self.used.add(_id(place))

    def write(
        self, spot: Spot, before: Any, name: str, where: str, from_itself: bool, within: Iterable[str] = ()
    ) -> None:
        """A line writes to a place. before: its value then. from_itself: the line also reads it. within: the lines from
        which it was called, whose reads may come before or after."""
        known = _id_of(spot)
        if known not in self.written:
            after_read = known in self.places and self.places[known].where not in within
            copied = module_parts.stands_in(spot[1])
            self.written[known] = _Written(spot, before, name, where, from_itself, copied, after_read)

    def settle(self, made_anew: Callable[[torch.Tensor], bool]) -> None:
        """Where a function was traced: finds what was written that each step computes anew."""
        for written in self.written.values():
            left = ReadPlace(*written.spot, "", "", None).now()
            if worth.is_traced(left) and made_anew(left):
                written.anew = left

    def change(self, container: Any) -> None:
        """A line changes what a container holds."""
        self.changed.add(id(container))

    def note(self, spot: Spot, name: str, where: str, parent: ReadPlace | None, value: Any = MISSING) -> ReadPlace:
        """The place of a spot, noted at its first use. parent: that of its holder."""
        kind, holder, key = spot
        known = _id_of(spot)
        if known not in self.places:
            self.used.discard(known)
            place = ReadPlace(kind, holder, key, name, where, value, parent)
            place.value = place.now() if value is MISSING else value
            self.places[known] = place
            self.copied |= {known} if module_parts.stands_in(holder) else set()
        return self.places[known]

    def end(self, value: Any, name: str, where: str, parent: ReadPlace | None, depth: int) -> None:
        """At the end of a chain: a function is known by its code, and what a container holds is noted."""
        value = read_places.wrapped(value.__func__ if isinstance(value, types.MethodType) else value)
        if isinstance(value, functools.partial):
            self._given(value, name, where, parent)
            return
        if isinstance(value, worth.WRAPPERS):
            self.wrapped(value, name, where, parent)
            return
        self.ended[id(value)] = value
        known_module = isinstance(value, nn.Module) and (ENTRY, id(vars(value)), "training") in self.places
        parts = read_places.contents(value, depth) if depth < read_places.DEEP and not known_module else []
        if any(worth.is_traced(ReadPlace(*spot, "", "", None).now()) for spot, _ in parts):
            return
        for spot, end in parts:
            place = self.note(spot, name + end, where, parent)
            self.use(place)
            if not isinstance(value, nn.Module):
                self.end(place.value, place.name, where, place, depth + 1)

    def wrapped(self, fn: Any, name: str, where: str, parent: ReadPlace | None) -> None:
        """Knows a function, and notes those that decorators have wrapped: the user's is named there alone."""
        fns = worth.within(fn)
        for outer in fns[:-1]:
            parent = self.note((ENTRY, vars(outer), "__wrapped__"), name, where, parent)
        for one in fns:
            if isinstance(one, types.FunctionType):
                self.cells.know(one)

    def _given(self, fn: functools.partial[Any], name: str, where: str, parent: ReadPlace | None) -> None:
        """Notes a partial's function and arguments; what it reads of these, the lines of the user's function name."""
        users = isinstance(fn.func, types.FunctionType) and kind_of_code(fn.func.__code__, fn.func.__globals__) == USER
        self.end(fn.func, name, where, parent, 0)
        for spot, end in read_places.contents(fn):
            place = self.note(spot, name + end, where, parent)
            for inner, key in read_places.contents(place.value):
                part = self.note(inner, name + end + key, where, place)
                self.use(part)
                if not users:
                    self.end(part.value, part.name, where, part, 1)

    # --- after it

    def resolve(self, codes: Iterable[types.CodeType]) -> None:
        """Finds the cells of the user's functions that ran, and notes the functions' code and defaults."""
        self._resolve_cells(codes)
        self._functions(codes)

    def kept(self) -> list[ReadPlace]:
        """What stays to be compared. Raises CaptureError for a number that the functions count, and for parameters that
        they make and keep."""
        for known, place in self.places.items():
            self._fill(known, place)
            place.whole = id(place.value) in self.ended
        self.ended.clear()
        for known, written in self.written.items():
            self._refuse_made(written, self.places.get(known))
            if written.copied:
                self._refuse_left_behind(written)
                self._refuse_kept(written, self.places.get(known))
        self._drop_short_lived()  # a copy of a configuration, which the functions may change
        for known, written in self.written.items():
            self._refuse_kept(written, self.places.get(known))
        own = {id(place) for known, place in self.places.items() if self._is_own(known, place)}
        for known in [known for known, place in self.places.items() if any(id(p) in own for p in _line_of(place))]:
            del self.places[known]
        self._drop_short_lived()
        self._drop_within()
        return list(self.places.values())

    def _fill(self, known: PlaceId, place: ReadPlace) -> None:
        """Tells an entry that was not there what no line of the user put there, but a `defaultdict` or the like."""
        if place.kind == ENTRY and place.value is MISSING and known not in self.written:
            place.value = place.now()
            place.filled = place.value is not MISSING

    def _drop_short_lived(self) -> None:
        """Drops the places of objects that only these places hold: the traced functions made them, and left them."""
        while True:
            ours = Counter(id(x) for place in self.places.values() for x in (place.holder, place.value))
            ours += Counter(id(written.spot[1]) for written in self.written.values())
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

    def _is_own(self, known: PlaceId, place: ReadPlace) -> bool:
        """Whether a place is the traced functions' own: they write to it, or its value is of the trace."""
        own = known in self.written or place.holder is None or worth.is_traced(place.value)
        sized = place.kind in (read_places.COPY, read_places.ITEM) and id(place.holder) in self.changed
        return own or sized or not place.holds(place.now())

    def _refuse_kept(self, written: _Written, place: ReadPlace | None) -> None:
        """Of a number that is counted, and of a tensor that is read before another is left there, as a hidden state."""
        if place is None or _id(place) not in self.used:
            return
        if written.anew is not None and written.after_read and not worth.is_traced(written.before):
            raise CaptureError(
                f"{written.name}, which {place.where} reads, is set by {written.where} to {describe(written.anew)}, "
                "which each step computes anew: a program never reads what the step before left there. If each step "
                "begins afresh, set it before it is read; else keep it in the state: as a buffer, with "
                "from_module(module, mutable=True), or by Spec(step=...)"
            )
        if not written.from_itself:
            return
        now = place.now()
        if worth.is_number(written.before) and worth.is_number(now) and not worth.same(written.before, now):
            raise CaptureError(
                f"{written.name}, which {place.where} reads, is changed by {written.where} from {written.before!r} to "
                f"{now!r}: that happens once, when the step is traced, and not at each step. Count in the state "
                "(Spec(step=...), or the optimizer's count), or pass the number in the batch as a tensor"
            )

    def _refuse_left_behind(self, written: _Written) -> None:
        """Of a tensor that a forward leaves on its copy of a module, where a line reads it of the module itself."""
        _, holder, key = written.spot
        if written.anew is None or not isinstance(holder, dict) or "_modules" not in holder:
            return
        for known, place in self.places.items():
            own = known in self.used and known not in self.copied and place.key == key
            if not own or worth.is_traced(place.value):
                continue
            of = place.holder
            if isinstance(of, dict) and of.keys() <= holder.keys() and _parts(of) == _parts(holder):
                raise CaptureError(
                    f"{place.name}, which {place.where} reads, is {worth.shown(place.value)} on the module itself: "
                    f"{written.where} sets it on the copy that apply runs. Read it there: apply.call(params, buffers, "
                    "lambda module: ...), or return it from the forward"
                )

    def _refuse_made(self, written: _Written, place: ReadPlace | None) -> None:
        if place is None or place.holder is None or _id(place) not in self.used:
            return
        made = place.now()
        if made is MISSING and isinstance(place.holder, dict):  # of a module, which keeps its parts elsewhere
            made = {**place.holder.get("_modules", {}), **place.holder.get("_parameters", {})}.get(place.key)
        parameters = made.parameters() if isinstance(made, nn.Module) else [made]
        if any(isinstance(x, nn.Parameter) and worth.is_traced(x) for x in parameters):
            raise CaptureError(
                f"{written.name}, which {place.where} reads, has parameters that {written.where} makes while the step "
                "is traced: a program would draw them anew at each step, and train none. Make it before fzero.init, "
                "and give what it trains in params"
            )

    def _resolve_cells(self, codes: Iterable[types.CodeType]) -> None:
        """Puts the cells of outer functions' variables in the places of their stand-ins."""
        self.cells.find(codes)
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

    def _functions(self, codes: Iterable[types.CodeType]) -> None:
        """Notes the code and the defaults of the user's functions that ran: IPython's `%autoreload` puts new code into
        an old function. Not the code of a function within one that ran: it was made anew in the trace."""
        codes = [*codes]
        inner = {const for code in codes for const in code.co_consts if isinstance(const, types.CodeType)}
        for fn in (fn for code in codes for fn in self.cells.functions.get(code, ())):
            if fn.__code__ not in inner:
                self.note((ATTRIBUTE, fn, "__code__"), f"the code of {fn.__qualname__}", "the step", None)
            for part in ("__defaults__", "__kwdefaults__"):
                if values := getattr(fn, part):
                    name = f"{fn.__name__}.{part}"
                    place = self.note((ATTRIBUTE, fn, part), name, defined_at(fn), None)
                    for spot, end in read_places.contents(values):  # what is read of these, the function's lines name
                        self.use(self.note(spot, name + end, defined_at(fn), place))


def _id(place: ReadPlace) -> PlaceId:
    return _id_of((place.kind, place.holder, place.key))


def _id_of(spot: Spot) -> PlaceId:
    kind, holder, key = spot
    if isinstance(key, slice):  # which has no hash before Python 3.12
        key = (slice, key.start, key.stop, key.step)
    return kind, id(holder), key


def _parts(holder: dict[str, Any]) -> set[str]:
    """The names of the modules within one, by what it holds."""
    return {*holder.get("_modules", ())}


def _line_of(place: ReadPlace) -> Iterator[ReadPlace]:
    """A place, and those that its holder came from."""
    at: ReadPlace | None = place
    while at is not None:
        yield at
        at = at.parent
