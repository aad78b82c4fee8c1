"""op_info: all that is known of an op, in one row, asked by every room.

`of(op)` puts the row together: what `op_table` says of the op and of its overload, what the rooms filled in, and the
defaults of columns that follow from torch's tags. A room fills the columns that it has the words for, when it is
imported: `fzero.shard` the placements, `fzero.codegen` the workspaces. The module that defines an op of fzero, or of a
user, adds its row beside it:

    op_info.add(torch.ops.mylib.mix.default, OpInfo(flops=..., placements=..., workspace=...))

$ python -c "import torch; from fzero.ir.op_info import of; print(of(torch.ops.aten.mm.default))"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from fzero._torch_compat import OpOverload
from fzero.ir.op_table import ROWS, OpInfo
from fzero.kernels import KERNELS

Default = Callable[[OpOverload, OpInfo], Any]  # of an op's row so far; None where it says nothing

_rows: dict[str, OpInfo] = dict(ROWS)  # by name; only `add` writes it
_defaults: list[tuple[str, Default]] = []  # (column, its default); only `default` writes it
_known: dict[int, tuple[OpOverload, OpInfo]] = {}  # rows that were asked for, by id: torch's hash of an op is slow
_columns: dict[str, dict[OpOverload, Any]] = {}  # and columns
_foreign: set[str] = set()  # what a module that is not fzero's added facts to; only `add` and `default` write it
_NOTHING = OpInfo()


def of(op: Any) -> OpInfo:
    """The row of an op. Anything but an overload has an empty one.

    >>> of(torch.ops.aten.mul.Tensor).pointwise, of(torch.ops.aten.mm.default).pointwise
    (True, False)
    """
    known = _known.get(id(op))
    if known is None:
        if not isinstance(op, OpOverload):
            return _NOTHING
        known = _known[id(op)] = op, _row(op)
    return known[1]


def add(op: OpOverload | str, row: OpInfo) -> None:
    """Adds facts to an op's row; one that was stated before is stated anew.

    op: an overload, or a name as in `op_table`: `mylib.mix` for all overloads, or one of an op that is not loaded.
    Raises TypeError for anything else, as a function that dispatches to ops: nothing would ask for its row.

    >>> add(torch.relu, OpInfo(exact=True))
    Traceback (most recent call last):
    TypeError: add(relu): needed an overload, as torch.ops.mylib.mix.default, or a name, as "mylib.mix"
    """
    if not isinstance(op, (OpOverload, str)) or "." not in str(op):
        raise TypeError(
            f"add({getattr(op, '__name__', op)}): needed an overload, as torch.ops.mylib.mix.default, or a name, as "
            '"mylib.mix"'
        )
    name = str(op)
    if not _asked_by_fzero():
        _foreign.add(name)
    _rows[name] = replace(_rows.get(name, _NOTHING), **row.stated())
    _forget()


def has_foreign_rows() -> bool:
    """Whether a module that is not fzero's has added facts."""
    return bool(_foreign)


def _asked_by_fzero() -> bool:
    """Whether facts are added where a module of fzero's is imported, and not by a function that a user calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("fzero."):
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


def fill(column: str, facts: Mapping[Any, Any]) -> None:
    """Adds a column's facts, by op or name. Raises ValueError for a second fact of one op."""
    for op, fact in facts.items():
        if column in (before := _rows.get(str(op), _NOTHING).stated()):
            raise ValueError(f"{op}: its {column} are {before[column]} already")
        add(op, OpInfo(**{column: fact}))


def default(column: str, of_op: Default) -> None:
    """Sets what a column says of the ops that no row states it of. The first default that says something holds."""
    if not _asked_by_fzero():
        _foreign.add(f"default {column}")
    _defaults.append((column, of_op))
    _forget()


def column(name: str) -> dict[OpOverload, Any]:
    """{op: fact} of the ops that rows state a column of, without defaults. Ops that are not loaded are left out."""
    if name not in _columns:
        stated = {key: row.stated()[name] for key, row in _rows.items() if name in row.stated()}
        _columns[name] = {op: fact for key, fact in stated.items() for op in named(key)}
    return _columns[name]


def named(name: str) -> list[OpOverload]:
    """The loaded overloads that a name stands for: that one, or all of an op.

    >>> named("aten.mm.default"), len(named("aten.mm")) > 1, named("aten.no_such_op")
    ([<OpOverload(op='aten.mm', overload='default')>], True, [])
    """
    library, op, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, library), op, None)
    names: Iterable[str] = overload or (packet.overloads() if packet is not None else ())
    return [getattr(packet, each) for each in names if hasattr(packet, each)]


def _forget() -> None:
    _known.clear()
    _columns.clear()


def _row(op: OpOverload) -> OpInfo:
    name = str(op)
    packet = name.rpartition(".")[0]
    row = replace(_rows.get(packet, _NOTHING), **_rows.get(name, _NOTHING).stated())
    if torch.Tag.pointwise in op.tags:
        row = replace(row, pointwise=True)
    for column, of_op in _defaults:
        if column not in row.stated() and (fact := of_op(op, row)):
            row = replace(row, **{column: fact})
    return row


fill("kernel", KERNELS)
default("out_form", lambda op, row: "program" if row.pointwise else "")
default("fake", lambda op, row: "kernel" if row.pointwise and op.namespace == "aten" else "")
default("fusion", lambda op, row: "loop" if row.pointwise and op.namespace == "aten" else "")


def kernel_for(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    """Returns the function to call instead of `op` (an OpOverload) with these arguments; None if no kernel fits them.

    The arguments may be fake tensors: dtypes, devices and strides decide. Results agree to rounding; each kernel's file
    says which bits are the operator's. The result is a plain function. torch.fx must know that it has effects, so swap
    after the last elimination of dead code.

    >>> kernel_for(torch.ops.aten.add.Tensor, torch.ones(2), torch.ones(2)) is None
    True
    """
    row = of(op).kernel
    return row.taking(*args, **kwargs) if row is not None else None
