"""memory: the account: the planned peak bytes of a rank by kind, read off the program.

The peak is the sum of three parts. The first is held between steps: the state, and the user's batch. The second is the
step's arena. The third is the most that is asked of the allocator beside it at one op: buffers without an offset, and
`heap`, the bytes that kernels allocate for themselves (`fzero.codegen.workspace`).

Kinds are those of the tables that users read, at the op where most of the arena is in use. Padding counts for the
buffer that it lies in; bytes of the arena that no buffer uses there count as "other".
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
class MemoryAccount(Mapping[str, int]):
    """Bytes per rank by kind at the peak.

    peak: the sum of all kinds. state: the bytes held between steps, without the batch. op: the number of the op at the
    peak, -1 before the first.
    """

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


def account(program: Program) -> MemoryAccount:
    """The planned peak of a program, by kind."""
    levels = live_bytes(program.ops, program.buffers)
    needs = [op.workspace + op.heap for op in program.ops]
    heights = [level + need for level, need in zip(levels, needs, strict=True)]
    peak_op = max(range(len(heights)), key=heights.__getitem__, default=-1)
    kinds = dict.fromkeys([*SHOWN.values(), "other"], 0)
    for name in live_names(program.ops, program.buffers, peak_op):
        buffer = program.buffers[name]
        kinds[SHOWN.get(buffer.kind, "other")] += buffer.nbytes
    if peak_op >= 0:
        kinds["activations"] += needs[peak_op]
    held = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT)
    state = held - sum(b.nbytes for b in program.buffers.values() if b.kind in GIVEN)
    loose = live_bytes(program.ops, program.buffers, lambda buffer: buffer.at is None and buffer.kind not in PERSISTENT)
    asked = [level + op.heap + (op.workspace if op.offset is None else 0)
             for level, op in zip(loose, program.ops, strict=True)]  # fmt: skip
    total = held + program.arena_bytes + max(asked, default=0)
    kinds["other"] += total - sum(kinds.values())
    return MemoryAccount(kinds, total, state, peak_op)
