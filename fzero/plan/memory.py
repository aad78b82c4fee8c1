"""memory: the account. Peak bytes of a rank, and what they are, read off the program.

At each op: the bytes of live buffers (`program.live_bytes`) and, while a segment runs, what it needs inside, its
`workspace`: intermediate values by liveness, plus what kernels allocate for themselves (`plan.workspace`). Kinds are
those of the tables that users read; padding is counted where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fzero.program import GIVEN, PERSISTENT, Program, live_bytes

SHOWN = {
    "param": "params",
    "grad": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "gather": "gather buffers",
    "scratch": "receive buffers",
    "batch": "batch",
}


@dataclass(frozen=True)
class Account(Mapping[str, int]):
    """Bytes per rank by kind at the moment of the peak; `peak` is their sum, `state` what is held between steps."""

    kinds: Mapping[str, int]
    peak: int
    state: int
    op: int

    def __getitem__(self, kind: str) -> int:
        return self.kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def account(program: Program) -> Account:
    """The planned peak of a program and what it is made of."""
    levels = live_bytes(program)
    heights = [level + int(one.get("workspace", 0)) for level, one in zip(levels, program.ops, strict=True)]
    at = max(range(len(heights)), key=heights.__getitem__, default=-1)
    kinds = dict.fromkeys([*SHOWN.values(), "other"], 0)
    for name in _live_at(program, at):
        buffer = program.buffers[name]
        kinds[SHOWN.get(buffer.kind, "other")] += buffer.nbytes
    if at >= 0:
        kinds["activations"] += int(program.ops[at].get("workspace", 0))
    state = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT and b.kind not in GIVEN)
    total = heights[at] if at >= 0 else state
    kinds["other"] += total - sum(kinds.values())  # memory kept for a buffer that will reuse it
    return Account(kinds, total, state, at)


def _live_at(program: Program, at: int) -> set[str]:
    live = {name for name, b in program.buffers.items() if b.kind in PERSISTENT}
    for one in program.ops[: at + 1]:
        live |= {ref.name for ref in one.writes if ref.name in program.buffers}
        if one.kind == "free":
            live -= {ref.name for ref in one.reads}
    return live
