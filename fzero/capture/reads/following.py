"""following: from what a line names to the places where its values lie (`chains`, `read_places`)."""

from __future__ import annotations

import builtins
import sys
import types
from collections import ChainMap, deque
from dataclasses import dataclass, field, replace
from typing import Any

from fzero.capture.reads import host_draws, moving, read_places, worth
from fzero.capture.reads.chains import Computed, ConstantKey, Get, Key, NameChain, Named, Step, Within
from fzero.capture.reads.place_table import PlaceTable
from fzero.capture.reads.read_places import ATTRIBUTE, ENTRY, ReadPlace, Spot
from fzero.capture.reads.worth import MISSING

Result = tuple[types.CodeType, Any]  # of a call of a function of the user


@dataclass
class Following:
    """Follows chains, and notes their places in the table. results: what the calls of a line gave, by a frame's id."""

    table: PlaceTable
    results: dict[int, list[Result]] = field(default_factory=dict)

    def follow(
        self,
        chain: NameChain,
        frame: types.FrameType,
        where: str,
        generators: list[Any],
        notes: bool,
        result: Any = MISSING,
    ) -> tuple[Any, ReadPlace | None]:
        """(the value of a chain, its place). Notes every place on the way where `notes`; adds to `generators`. result:
        of the call that the chain begins with."""
        value, place = self._start(chain, frame, where, notes)
        value = value if chain.called is None else result
        for i, step in enumerate(chain.steps):
            if (generator := host_draws.generator_of(value)) is not None:
                generators.append(generator)
            if value is MISSING or worth.is_traced(value):
                return MISSING, None
            chained = isinstance(value, ChainMap)
            owner = value if isinstance(step, str) or chained else read_places.wrapped(value)
            name = str(replace(chain, steps=chain.steps[: i + 1]))
            spots, value = self._step(owner, step, frame, where)
            if value is MISSING and isinstance(step, str):
                value = next(reversed(self._given(step, None, frame)), MISSING)  # of a property
            whole = _reads_all(step, owner, spots) or self._cuts(step, owner, frame, where)
            if notes and isinstance(step, str) and read_places.computed_elsewhere(owner, step) and not generators:
                self.table.ended[id(owner)] = owner
            if whole and notes:
                if step in moving.CHANGES:
                    self.table.change(owner)
                else:
                    self.table.end(owner, str(replace(chain, steps=chain.steps[:i])), where, place, 0)
            for spot in spots if notes else ():
                place = self.table.note(spot, name, where, place)
                place.behind = value
        if (generator := host_draws.generator_of(value)) is not None:
            generators.append(generator)
        return value, place

    def _start(self, chain: NameChain, frame: types.FrameType, where: str, notes: bool) -> tuple[Any, ReadPlace | None]:
        """(the value of a chain's name, its place)."""
        name = chain.name
        if chain.scope == "namespace":
            return frame.f_globals, None
        if chain.scope == "module":
            return sys.modules.get(name, MISSING), None
        if chain.scope == "global":
            value = frame.f_globals.get(name, MISSING)
            noted = notes and (value is not MISSING or not hasattr(builtins, name))
            return value, self.table.note((ENTRY, frame.f_globals, name), name, where, None) if noted else None
        value = frame.f_locals.get(name, MISSING)
        if chain.scope != "free" or value is MISSING or not notes:
            return value, None
        spot = (ATTRIBUTE, self.table.cells.of(frame.f_code, name, value), "cell_contents")
        return value, self.table.note(spot, name, where, None, value)

    def _step(self, owner: Any, step: Step | NameChain, frame: types.FrameType, where: str) -> tuple[list[Spot], Any]:
        """(where a step's value lies, the value), of an owner that is no dict for the method `get`, too."""
        if isinstance(step, str):
            return read_places.attribute(owner, step)
        if isinstance(step, Get) and not isinstance(owner, (dict, read_places.ENVIRON)):
            spots, value = read_places.got(owner, self._key(step.key, frame, where))
            return [*read_places.attribute(owner, "get")[0], *spots], value
        key = self._key(step.key if isinstance(step, (Get, Within, Named)) else step, frame, where)
        if isinstance(step, Named):
            return read_places.attribute(owner, key) if isinstance(key, str) else ([], MISSING)
        if isinstance(step, Within):
            maps = isinstance(owner, (dict, read_places.ENVIRON)) or read_places.maps_of_library(owner)
            known = maps and key is not MISSING and worth.is_fixed(key)
            return ([(read_places.COPY, owner, read_places.Has(key))] if known else []), MISSING
        if isinstance(step, Get) and isinstance(owner, read_places.ENVIRON):
            return [(read_places.COPY, owner, read_places.Asked("get", key))], MISSING
        return ([], MISSING) if isinstance(key, slice) else read_places.item(owner, key)

    def _cuts(self, step: Step | NameChain, owner: Any, frame: types.FrameType, where: str) -> bool:
        """Whether a step takes a slice of a list, which has a name: `table[part]`."""
        if not isinstance(step, (NameChain, ConstantKey)) or not isinstance(owner, (list, tuple, deque)):
            return False
        return isinstance(self._key(step, frame, where), slice)

    def _key(self, key: Key, frame: types.FrameType, where: str) -> Any:
        """The value of a subscript or a name; MISSING where it is not known."""
        if isinstance(key, ConstantKey):
            return key.value
        if isinstance(key, NameChain):
            return self.follow(key, frame, where, [], False)[0]
        try:
            return key.value([self._key(part, frame, where) for part in key.parts])
        except Exception:  # what the line itself will raise, or what is no number and no text
            return MISSING

    def results_of(self, called: NameChain, frame: types.FrameType) -> list[Any]:
        """What the calls of a chain gave, after their line."""
        if id(frame) not in self.results:
            return []
        fn, _ = self.follow(called, frame, "", [], False)
        fn = fn.__func__ if isinstance(fn, types.MethodType) else fn
        last = called.steps[-1] if called.steps else called.name
        return self._given(last, fn.__code__ if isinstance(fn, types.FunctionType) else None, frame)

    def _given(self, name: Any, code: types.CodeType | None, frame: types.FrameType) -> list[Any]:
        """What the functions of this code, or of this name, gave to the line before."""
        given = self.results.get(id(frame), ())
        return [value for ran, value in given if (ran is code if code else ran.co_name == name)]

    def target(self, chain: NameChain, frame: types.FrameType, where: str) -> Spot | None:
        """Where a line puts the value of what it writes to; None where that is the function's own."""
        if not chain.steps:
            if chain.scope == "global":
                return ENTRY, frame.f_globals, chain.name
            value = frame.f_locals.get(chain.name, MISSING)
            return ATTRIBUTE, self.table.cells.of(frame.f_code, chain.name, value), "cell_contents"
        owner, _ = self.follow(replace(chain, steps=chain.steps[:-1]), frame, where, [], False)
        step = chain.steps[-1]
        if owner is MISSING or worth.is_traced(owner) or isinstance(step, (Get, Within, Named)):
            return None
        if isinstance(step, str):
            return read_places.target(owner, step)
        key = self._key(step, frame, where)
        kind = read_places.ITEM if isinstance(owner, list) else ENTRY
        return (kind, owner, key) if isinstance(owner, (dict, list)) else None


def _reads_all(step: Step | NameChain, owner: Any, spots: list[Spot]) -> bool:
    """Whether a step reads, or may read, all that its owner holds."""
    if isinstance(owner, read_places.BUFFERS):
        return True
    if isinstance(step, str):
        return read_places.of_all(owner, step)
    if isinstance(step, Within):
        return not isinstance(owner, dict) and not read_places.maps_of_library(owner)
    return isinstance(owner, ChainMap) if isinstance(step, Get) else isinstance(step, Computed) and not spots
