"""oracle: whether a broken program means something else, found by running it.

A program's outcome is what it leaves behind and what it costs: the state's leaves and the metrics of every rank, bit
for bit, interpreted with poisoned memory; the order of each rank's collectives along each axis, and whether ranks that
stay in each until its group is there come to their ends; the bytes on the wire, of the buffers, at the planned peak;
gathered bytes above the cap; what is still held or in flight at the end; the runs whose workspace is less than the
executor lays out in it. Where all of that is equal, the executor runs it too, bound to one arena a rank, where a place
or a workspace over something in use shows. A mutant whose outcome differs from the unbroken program's is
*meaning-changing*. Four liberties are a schedule's own and no difference: another order of collectives that all ranks
share, fewer bytes on the wire, fewer bytes of buffers, and a lower peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero._torch_compat import quiet_fakes
from fzero.cost.memory import account
from fzero.ir.liveness import gathered_bytes
from fzero.ir.program import Level, Program, op_text, wire_bytes
from fzero.ir.records import DISK, HOST, PERSISTENT
from fzero.runtime.executor import Executor
from fzero.runtime.handlers import Rank, on_disk
from fzero.runtime.interpreter import LocalComm, Mailbox, interpret
from fzero.state import storage
from lab.mutate import room
from lab.mutate.corpus import Case


@dataclass(frozen=True)
class Outcome:
    """The result of running `{rank: program}`. `error` is set if it cannot be run to its end."""

    error: str | None
    state: tuple[torch.Tensor, ...] = ()
    metrics: tuple[torch.Tensor, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()  # of the metrics
    read_only: bool = True  # batch and constants are as they were
    left: tuple[frozenset[str], ...] = ()
    order: frozenset[tuple[str, ...]] = frozenset()
    circle: bool = False  # ranks that stay in a collective until its whole group is there never end
    wire: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    peak: tuple[int, ...] = ()
    over_cap: tuple[int, ...] = ()
    cramped: tuple[frozenset[int], ...] = ()  # runs whose own values do not fit into their workspace


def outcome(case: Case, programs: Mapping[int, Program]) -> Outcome:
    """Runs the ranks' programs from the case's memory. Any error that running raises is an outcome."""
    memory = [{name: tensor.clone() for name, tensor in own.items()} for own in case.memory]
    every = [programs[rank] for rank in sorted(programs)]
    try:
        ranks = interpret(programs, memory, poison=True)
        state = _state(case, memory, [rank.memory for rank in ranks])
        read_only = all(_same(own[name], was[name]) for own, was in zip(memory, case.memory, strict=True)
                        for name in was.keys() - case.plan.buffers.keys())  # fmt: skip
        metrics = tuple(r.memory[buffer] for r in ranks for _, buffer in sorted(r.program.metrics.items()))
        return Outcome(
            None,
            state,
            metrics,
            tuple(tuple(sorted(p.metrics)) for p in every),
            read_only,
            tuple(map(_left, ranks)),
            frozenset(map(_order, every)),
            _circle(programs),
            tuple(sum(wire_bytes(p, op) for op in p.ops) for p in every),
            tuple(sum(b.nbytes for b in p.buffers.values()) for p in every),
            tuple(account(p).peak for p in every),
            tuple(max(0, max(gathered_bytes(p.ops, p.buffers), default=0) - p.gather_cap_bytes) for p in every),
            tuple(map(_cramped, every)),
        )
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {error}".splitlines()[0])


def _state(
    case: Case, memory: Sequence[Mapping[str, torch.Tensor]], after: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """The state of every rank: what it was given, written in place; of what lies on disk, the copy in the file. Behind
    it the copies of parameters that the next step finds."""
    disk = [name for name, b in case.plan.buffers.items() if b.space == DISK]
    held = [{**own, **{n: then[n] for n in disk if n in own}} for own, then in zip(memory, after, strict=True)]
    copies = [_of_leaves(program, name, after[r][name], r) for r, program in sorted(case.programs.items())
              for name in sorted(program.copies)]  # fmt: skip
    return (*(storage.local(case.plan, own, x, r) for r, own in enumerate(held) for x in case.plan.leaves), *copies)


def _of_leaves(program: Program, name: str, copy: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank's copy has of leaves: of the padding between them nothing is read."""
    bucket = program.buckets[program.buffers[name].bucket or ""]
    low = program.mesh.coordinate(rank, bucket.axis) * copy.numel() if copy.numel() < bucket.length else 0
    flat = copy.reshape(-1)
    return torch.cat([flat[max(slot.start - low, 0) : max(slot.stop - low, 0)] for slot in bucket.slots])


def _left(rank: Rank) -> frozenset[str]:
    """The buffers and transfers that a rank still holds at the end, beside the state, the batch and the metrics."""
    named = {name for name, b in rank.program.buffers.items() if b.kind in PERSISTENT}
    named |= set(rank.program.metrics.values())
    comm: Any = rank.comm
    waits = {f"transfer into {name}" for name in (*comm.pending, *comm.inbox, *comm.outbox, *comm.moves)}
    mail = {f"message {key}" for key, letters in comm.world.mail.items() if letters}
    return frozenset((rank.memory.keys() - named) | waits | mail)


def _cramped(program: Program) -> frozenset[int]:
    """The runs that would write beyond their workspace, in a program that has been measured."""
    runs = [i for i, op in enumerate(program.ops) if op.computes and program.level >= Level.SIZED]
    return frozenset(i for i in runs if room.needed(program, program.ops[i]) > program.ops[i].workspace)


def executed(case: Case, programs: Mapping[int, Program]) -> Outcome:
    """The state and the metrics that the executor leaves behind, all ranks in one process, in arenas full of NaN."""
    world = Mailbox(programs[min(programs)].mesh)
    memory = [{name: tensor.clone() for name, tensor in own.items()} for own in case.memory]
    try:
        with quiet_fakes():
            ranks = [_bound(programs[r], r, LocalComm(world, r), memory[r]) for r in sorted(programs)]
        running = [_calls(bound) for bound in ranks]
        for _ in range(1 + sum(len(p.ops) for p in programs.values())):
            running = [rank for rank in running if next(rank, None) is not None]
        state = _state(case, memory, [bound.memory for bound in ranks])
        metrics = tuple(bound.memory[buffer] for bound in ranks for _, buffer in sorted(bound.metrics))
        return Outcome("ranks wait for one another" if running else None, state, metrics)
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {error}".splitlines()[0])


def _bound(program: Program, rank: int, comm: LocalComm, memory: Mapping[str, torch.Tensor]) -> Executor:
    arena = torch.full((program.arena_bytes,), 255, dtype=torch.uint8)
    batch = {name for name, b in program.buffers.items() if b.kind == "batch"}
    memory = {**memory, **on_disk(program, memory)}
    host = torch.full((program.arenas[HOST],), 255, dtype=torch.uint8)
    held = {name: tensor for name, tensor in memory.items() if name not in batch}
    bound = Executor(program, rank, comm, held, arena, host_arena=host)
    for name, place in zip((n for n, b in program.buffers.items() if b.kind == "batch"), bound.batch, strict=True):
        if place is not None:
            place.copy_(memory[name])
    return bound


def _calls(bound: Executor) -> Iterator[int]:
    """Runs a rank; yields the number of an op whose transfer is not there yet."""
    for index, (op, calls) in enumerate(zip(bound.program.ops, bound.calls, strict=True)):
        while op.is_wait and not bound.comm.ready(op.reads[0].name):
            yield index
        with torch.no_grad():
            for call in calls:
                call()


def _order(program: Program) -> tuple[str, ...]:
    """The collectives along each axis in their order, one axis after the other."""
    return tuple(map(op_text, sorted((op for op in program.ops if op.is_collective), key=lambda op: str(op.axis))))


def _circle(programs: Mapping[int, Program]) -> bool:
    meshes = {rank: program.mesh for rank, program in programs.items()}
    roads = {rank: [frozenset(meshes[rank].peers(rank, str(op.axis))) for op in program.ops if op.is_collective]
             for rank, program in programs.items()}  # fmt: skip
    while meeting := next((r[0] for r in roads.values() if r and all(roads[x][:1] == r[:1] for x in r[0])), None):
        for rank in meeting:
            del roads[rank][0]
    return any(roads.values())


def difference(sound: Outcome, broken: Outcome) -> str | None:
    """Returns the change that a mutant makes, in a few words; None if it makes none."""
    if broken.error is not None:
        return f"fails: {broken.error}"
    for name in ("state", "metrics"):
        a, b = getattr(sound, name), getattr(broken, name)
        if len(a) != len(b) or not all(map(_same, a, b)):
            return f"other {name}"
    if len(broken.order) > len(sound.order):
        return "ranks issue collectives in different orders"
    if broken.circle and not sound.circle:
        return "ranks wait for one another in a circle"
    for name in ("names", "read_only", "cramped", "left", "over_cap"):
        a, b = getattr(sound, name), getattr(broken, name)
        if a != b:
            return f"other {name}: {b}, not {a}"
    if any(b > a for a, b in zip(sound.buffers, broken.buffers, strict=True)):
        return f"more bytes of buffers: {broken.buffers}, not {sound.buffers}"
    if any(b > a for a, b in zip(sound.wire, broken.wire, strict=True)):
        return f"more bytes on the wire: {broken.wire}, not {sound.wire}"
    if max(broken.peak, default=0) > max(sound.peak, default=0):  # the budget of every rank, whichever role needs it
        return f"a higher peak: {broken.peak}, not {sound.peak}"
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, all NaN alike."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    raw = a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    if torch.equal(*raw):
        return True
    if not a.dtype.is_floating_point:
        return False
    x, y = torch.nan_to_num(a, 0.5), torch.nan_to_num(b, 0.5)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)
    )
