"""verify (first version)."""

from __future__ import annotations

from fzero.errors import VerifyError
from fzero.meaning import Undefined, program_meaning
from fzero.program import Program


def verify(program: Program) -> None:
    try:
        found = program_meaning(program)
    except Undefined as error:
        raise VerifyError(str(error)) from None
    if program.meaning and found != program.meaning:
        raise VerifyError("the program does not compute what was captured")
