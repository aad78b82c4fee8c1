"""Small programs before and after each pass."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import fzero
from fzero.ir.program import Program
from fzero.passes import PASSES, Options

OFFLOADED: dict[str, Any] = {
    "zero": 3,
    "optimizer": fzero.optim.adamw(1e-3),
    "offload": {"opt_state/nu/**": "nvme", "**": "cpu"},
    "nvme_path": "/nvme",
}
OFFLOADING = ("to_spaces", "schedule_updates", "offload_activations", "tile_updates", "place_moves")
WAITING = {"zero": 3, "clip_norm": 1.0, "optimizer": fzero.optim.adamw(1e-3)}


class Stage(NamedTuple):
    """A program as a pass left it, and its text and its segments' from before any later pass ran."""

    program: Program
    text: str
    segments: dict[str, str]


def segment_texts(program: Program) -> dict[str, str]:
    return {key: str(gm.graph) for key, gm in program.segments.items()}


def stages(program: Program, options: Options) -> dict[str, Stage]:
    """The program before any pass ("lower") and after each."""
    found = {"lower": Stage(program, str(program), segment_texts(program))}
    for name, run, _ in PASSES:
        program = run(program, options)
        found[name] = Stage(program, str(program), segment_texts(program))
    return found


def without_lines(text: str) -> str:
    """A program's text without the places in the code that it was captured from, which move."""
    return re.sub(r"\b\w+\.py:\d+", "code", text)


def upto(name: str, program: Program, options: Options | None = None) -> Program:
    """The program after all passes up to and with `name`."""
    options = options or Options()
    for each, run, _ in PASSES:
        program = run(program, options)
        if each == name:
            break
    return program
