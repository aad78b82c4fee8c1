"""passes: pure functions Program → Program, in the order they run."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.program import Program


@dataclass(frozen=True)
class Options:
    """What the passes may choose: see the fields of the same names in `fzero.Spec`."""

    prefetch: int = 1
    gather_bytes: int | None = None
    overlap: bool = True


def optimise(program: Program, options: Options) -> Program:
    return program
