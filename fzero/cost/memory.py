"""memory: the account. Peak bytes of a rank, and what they are, read off the program.

What is held between steps (the state, and the user's batch), the step's arena, and the most that is asked of the
allocator beside it at one op: buffers without a place, and `heap`, what kernels allocate for themselves
(`plan.workspace`). Kinds are those of the tables that users read, at the op where most of the arena is in use; padding
is counted where it lies, what the arena's packing leaves unused under "other".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fzero.ir.liveness import live_bytes, live_names
from fzero.ir.program import Program
from fzero.ir.records import GIVEN, PERSISTENT

SHOWN = {
    "param": "params",
    "grad": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "gathered": "gather buffers",
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
    levels = live_bytes(program.ops, program.buffers)
    needs = [op.workspace + op.heap for op in program.ops]
    heights = [level + need for level, need in zip(levels, needs, strict=True)]
    at = max(range(len(heights)), key=heights.__getitem__, default=-1)
    kinds = dict.fromkeys([*SHOWN.values(), "other"], 0)
    for name in live_names(program.ops, program.buffers, at):
        buffer = program.buffers[name]
        kinds[SHOWN.get(buffer.kind, "other")] += buffer.nbytes
    if at >= 0:
        kinds["activations"] += needs[at]
    held = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT)
    state = held - sum(b.nbytes for b in program.buffers.values() if b.kind in GIVEN)
    loose = live_bytes(program.ops, program.buffers, lambda buffer: buffer.at is None and buffer.kind not in PERSISTENT)
    asked = [level + op.heap + (op.workspace if op.offset is None else 0)
             for level, op in zip(loose, program.ops, strict=True)]  # fmt: skip
    total = held + program.arena_bytes + max(asked, default=0)
    kinds["other"] += total - sum(kinds.values())
    return Account(kinds, total, state, at)
