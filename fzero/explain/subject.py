"""subject: what is explained: a spec, lowered for a world, or the text of a program that a run left.

A text has no segments, so nothing in it can be priced: there are bytes, and no seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fzero.compile import fault_report
from fzero.compile.ahead import lower
from fzero.compile.lowered import Lowered
from fzero.compile.resolve import mesh_of
from fzero.cost.memory import MemoryAccount, account
from fzero.errors import SpecError
from fzero.ir.parse import parse
from fzero.ir.program import HEADER, Program
from fzero.plan.stages import batch_layout
from fzero.planner.plan_command import problem
from fzero.planner.problem import by_rows
from fzero.spec import Spec

PROGRAM = "program.txt"  # as examples/train_gpt.py leaves it


@dataclass(frozen=True)
class Subject:
    """name: as it was given. programs: by role. lowered: the way that led to them, if there is one."""

    name: str
    programs: Mapping[int, Program]
    lowered: Lowered | None = None

    @cached_property
    def accounts(self) -> Mapping[int, MemoryAccount]:
        """By role, the planned peak."""
        return {role: account(program) for role, program in self.programs.items()}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return next(iter(self.programs.values())).world_size


def read(text: str, ranks: int | None = None, phase: str = "") -> Subject:
    """The subject that a word of the command line names.

    text: `FILE.py:FUNCTION`, a function that returns (spec, params_like, batch_like), the batch of all ranks together;
    a file with the text of a program, a folder with `program.txt`, or a report of a fault. ranks: of the world, for a
    spec whose mesh does not say it. phase: of a spec with phases, "" for the first. Raises SpecError for anything else.
    """
    path = Path(text)
    if path.is_dir():
        path = path / PROGRAM
        if not path.is_file():
            raise SpecError(
                f"{text!r}: there is no {PROGRAM} in this folder. Write it in your run: "
                f"Path({text!r}, {PROGRAM!r}).write_text(str(state.program))"
            )
    if path.is_file():
        if phase:
            raise SpecError(
                f"--phase {phase}: the text of a program is of one phase. Needed FILE.py:FUNCTION, or no --phase"
            )
        if ranks is not None:
            raise SpecError(f"--ranks {ranks}: a program says its mesh. Needed FILE.py:FUNCTION, or no --ranks")
        return of_file(path)
    spec, params, batch = problem(text)
    return Subject(text, (lowered := of_spec(spec, params, batch, ranks, phase)).programs, lowered)


def of_file(path: Path) -> Subject:
    """The program of a text, or the programs of a report."""
    content = path.read_text(encoding="utf-8")
    if content.startswith("{"):
        report = fault_report.read(str(path))
        return Subject(str(path), {program.role or 0: program for program in report.programs.values()})
    if not content.startswith(HEADER.rsplit(" ", 1)[0]):
        raise SpecError(
            f"{path}: it begins with {content[:40]!r}; needed the text of a program, {HEADER!r}, or FILE.py:FUNCTION"
        )
    try:
        program = parse(content)
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from error
    return Subject(str(path), {program.role or 0: program})


def of_spec(spec: Spec, params: Any, batch: Any, ranks: int | None, phase: str = "") -> Lowered:
    """A spec lowered for a world, without its devices; the rows of the batch are divided over the data ranks."""
    if ranks is not None and ranks < 1:
        raise SpecError(f"--ranks {ranks}: needed a positive int")
    if spec.mesh is None and ranks is None:
        raise SpecError("the spec has no mesh: say how many ranks there are, as --ranks 64")
    if spec.mesh == "auto":
        raise SpecError("the spec leaves its mesh open: `fzero plan` chooses one. Paste its answer into the spec")
    part_of, rows = by_rows(batch)
    parts = batch_layout(mesh_of(spec, ranks)).parts
    if rows % parts:
        raise SpecError(f"a batch of {rows} rows cannot be divided over {parts} data ranks: needed a multiple of them")
    return lower(spec, params, part_of(rows // parts), world_size=ranks, phase=phase)
