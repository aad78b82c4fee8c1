"""cells: the variables of outer functions. A frame shows their values alone; where they lie is known to its function.

While the trace runs a `StandIn` takes the cell's place. Afterwards the functions are looked up by their code: those
that were met as values, and others by the garbage collector. A function within one is made anew in each call; its
variables are those of the function around it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fzero import collector
from fzero.capture.reads.worth import MISSING


@dataclass(eq=False)
class StandIn:
    """Stands for the cell of a variable, named by the code of a function that uses it. `value`: what it holds, for
    functions of one code may have other cells."""

    code: types.CodeType
    name: str
    value: Any


@dataclass
class Cells:
    """The functions that are known, by code, and the stand-ins. Only its methods write to it."""

    functions: dict[types.CodeType, list[types.FunctionType]] = field(default_factory=dict)
    stand_ins: dict[tuple[types.CodeType, str, int], StandIn] = field(default_factory=dict)

    def know(self, fn: types.FunctionType) -> None:
        """Adds a function."""
        known = self.functions.setdefault(fn.__code__, [])
        if fn not in known:
            known.append(fn)

    def of(self, code: types.CodeType, name: str, value: Any) -> StandIn:
        """The stand-in for a variable of an outer function."""
        return self.stand_ins.setdefault((code, name, id(value)), StandIn(code, name, value))

    def find(self, codes: Iterable[types.CodeType]) -> None:
        """Finds the functions of the stand-ins' codes. `codes`: those of all the user's functions that ran."""
        around = {inner: code for code in codes for inner in code.co_consts if isinstance(inner, types.CodeType)}
        for code, name, _ in [*self.stand_ins]:
            outer = code
            while outer not in self.functions and outer in around and name in around[outer].co_freevars:
                outer = around[outer]
            if outer is not code and outer in self.functions:
                self.functions.setdefault(code, self.functions[outer])
        if lost := {code for code, _, _ in self.stand_ins} - around.keys() - self.functions.keys():
            for fn in collector.functions_of(lost):
                self.know(fn)

    def cell(self, stand_in: StandIn) -> types.CellType | None:
        """The cell, of the function of which its value was read; None for one that the trace made."""
        fns = self.functions.get(stand_in.code, ())
        cells = [dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)).get(stand_in.name) for fn in fns]
        found = [cell for cell in cells if cell is not None]
        return next((cell for cell in found if _content(cell) is stand_in.value), found[0] if found else None)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING
