"""memory: the account: the planned peak bytes of a rank by kind and by space, read off the program.

The peak of a space is the sum of three parts. The first is held between steps: the state, and the user's batch. The
second is the step's arena there. The third is the most that is asked of the allocator beside it at one op: buffers
without an offset, and `heap`, the bytes that kernels allocate for themselves (`fzero.codegen.workspace`). On disk it is
the rank's file.

Kinds are those of the tables that users read, on the device, at the op where most of its arena is in use. Padding
counts for the buffer that it lies in; bytes of the arena that no buffer uses there count as "other".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fzero.ir.liveness import live_bytes, live_names
from fzero.ir.program import Program, lane_bytes
from fzero.ir.records import DEVICE, DISK, GIVEN, PERSISTENT, SPACES, Buffer

SHOWN = {
    "param": "params",
    "copy": "16-bit copies",
    "grad": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "gathered": "gather buffers",
    "scratch": "receive buffers",
    "batch": "batch",
    "staging": "staging",
}
IF_ANY = ("16-bit copies", "staging")


@dataclass(frozen=True)
class MemoryAccount(Mapping[str, int]):
    """Bytes per rank by kind at the peak.

    peak: the sum of all kinds, on the device. state: the bytes held between steps there, without the batch. op: the
    number of the op at the peak, -1 before the first. spaces: the peaks of device, host and disk. ops: by space, the
    number of the op at its peak. lanes: by lane (`disk→host`), the bytes that a step moves.
    """

    kinds: Mapping[str, int]
    peak: int
    state: int
    op: int
    spaces: Mapping[str, int] = field(default_factory=dict)
    ops: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> int:
        return self.kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def account(program: Program) -> MemoryAccount:
    """The planned peak of a program, by kind."""
    found = {space: _Space(program, space) for space in SPACES}
    device = found[DEVICE]
    shown = {buffer.kind: SHOWN.get(buffer.kind, "other") for buffer in program.buffers.values()}
    names = [kind for kind in SHOWN.values() if kind not in IF_ANY or kind in shown.values()]
    kinds = dict.fromkeys([*names, "other"], 0)
    for name in live_names(program.ops, program.buffers, device.op):
        buffer = program.buffers[name]
        kinds[shown[buffer.kind]] += buffer.nbytes if device.counts(buffer) else 0
    if device.op >= 0:
        kinds["activations"] += device.needs[device.op]
    kinds["other"] += device.peak - sum(kinds.values())
    state = device.held - sum(b.nbytes for b in program.buffers.values() if b.kind in GIVEN)
    peaks, ops = ({space: getattr(of, name) for space, of in found.items()} for name in ("peak", "op"))
    return MemoryAccount(kinds, device.peak, state, device.op, peaks, ops, lane_bytes(program))


class _Space:
    """What a program needs of one space: `held` between steps, at the `peak`, and the `op` there. `needs` is by op,
    what it needs while it runs."""

    def __init__(self, program: Program, space: str) -> None:
        self.space = space
        levels = live_bytes(program.ops, program.buffers, self.counts)
        here = [program.space(op) == space for op in program.ops]
        self.needs = [(op.workspace + op.heap) * mine for op, mine in zip(program.ops, here, strict=True)]
        heights = [level + need for level, need in zip(levels, self.needs, strict=True)]
        self.op = max(range(len(heights)), key=heights.__getitem__, default=-1)
        self.held = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT and self.counts(b))
        loose = live_bytes(
            program.ops, program.buffers, lambda b: b.at is None and b.kind not in PERSISTENT and self.counts(b)
        )
        asked = [level + (op.heap + (op.workspace if op.offset is None else 0)) * mine
                 for level, op, mine in zip(loose, program.ops, here, strict=True)]  # fmt: skip
        arena = program.arenas[space]
        self.peak = arena if space == DISK else self.held + arena + max(asked, default=0)

    def counts(self, buffer: Buffer) -> bool:
        """Whether a buffer lies in this space."""
        return buffer.space == self.space
