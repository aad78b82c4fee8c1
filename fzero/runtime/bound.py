"""bound: a program bound to one rank's memory, ready to run step after step.

Everything that does not change from step to step is done once: where each buffer lies in the arena, which views a
segment takes of it, which tensors a transfer moves. What is left of an op is a few calls without arguments; the loop
over them is all the Python of a step. State keeps its addresses, the batch is copied into the arena, metrics are copied
out of it.

A buffer without a place (what a compiled segment returns) comes to life when it is written: ops that touch one look it
up when they run.

A transfer may still be read by other ranks after this rank has what it waited for (`Comm.settle`). Whatever overwrites
or frees the source settles it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fzero import segments, tape
from fzero._torch_compat import below_autograd
from fzero.program import GIVEN, PERSISTENT, Op, Program, Ref, op_text
from fzero.runtime.handlers import Comm, padding, part

Call = Callable[[], Any]


class Bound:
    """A program on this rank. `memory` holds the state's buffers and the constants by name, `arena` at least
    `program.arena_bytes`; `compiled` are functions for some segments, by hash."""

    def __init__(
        self,
        program: Program,
        rank: int,
        comm: Comm,
        memory: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        compiled: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.program, self.rank, self.comm, self.arena = program, rank, comm, arena
        self.compiled = compiled or {}
        self.memory = dict(memory)
        self.loose = {n for n, b in program.buffers.items() if b.at is None and b.kind not in (*PERSISTENT,)}
        for name, buffer in program.buffers.items():
            if buffer.kind == "rank":
                self.memory[name] = torch.full((), rank, dtype=buffer.dtype, device=arena.device)
            elif buffer.at is not None:
                place = arena[buffer.at : buffer.at + buffer.nbytes]
                self.memory[name] = place.view(buffer.dtype).view(buffer.shape)
        self.batch = [self.memory.get(name) for name, b in program.buffers.items() if b.kind == "batch"]
        self.metrics = list(program.metrics.items())
        self.position = 0  # the op that runs, or ran last
        self.first_write = next(
            (i for i, one in enumerate(program.ops) if _writes_state(program, one)), len(program.ops)
        )
        with torch.no_grad():
            self.calls = self._bind()

    @property
    def wrote_state(self) -> bool:
        """Whether the step in progress has begun to change the state."""
        return self.position >= self.first_write

    def run(self, batch: Sequence[torch.Tensor], watch: Callable[[int], None] | None = None) -> dict[str, torch.Tensor]:
        """One step: the state is written in place; returns the metrics. `watch` is called with each op's number after
        the op, and with -1 before the first. An error says in which op it happened."""
        self.position = -1
        with torch.no_grad(), torch.autocast(self.arena.device.type, enabled=False), below_autograd():
            for place, given in zip(self.batch, batch, strict=True):
                if place is not None:
                    place.copy_(given)
            if watch is not None:
                watch(-1)
            try:
                for self.position, calls in enumerate(self.calls):
                    for call in calls:
                        call()
                    if watch is not None:
                        watch(self.position)
            except Exception as error:
                one = self.program.ops[self.position]
                error.add_note(f"in op {self.position}: {op_text(one)} | {one.why}")
                raise
            return {name: self.memory[buffer].clone() for name, buffer in self.metrics}

    # --- binding

    def _bind(self) -> list[list[Call]]:
        """The calls of each op, and before them what they must wait for."""
        sources: dict[str, list[str]] = {}  # by buffer, the transfers that read it and are not settled
        started: set[str] = set()
        found: list[list[Call]] = []
        for one in self.program.ops:
            calls: list[Call] = []
            touched = one.reads if one.kind == "free" else one.writes if one.kind != "wait" else ()
            for ref in touched:
                calls += [partial(self.comm.settle, name) for name in sources.pop(ref.name, ())]
            for ref in one.writes:
                if ref.name not in started and one.kind in ("run", "update"):
                    calls += self._zeroed(ref)
                started.add(ref.name)
            calls += BINDERS[one.kind](self, one)
            if one.kind in ("gather", "reduce", "send"):
                sources.setdefault(one.reads[0].name, []).append((one.writes or one.reads)[0].name)
            if one.kind == "free":
                started -= {ref.name for ref in one.reads}
            found.append(calls)
        if found:
            found[-1] += [partial(self.comm.settle, name) for names in sources.values() for name in names]
        return found

    def _zeroed(self, ref: Ref) -> Iterator[Call]:
        buffer = self.program.buffers[ref.name]
        if buffer.at is not None:
            for start, stop in padding(self.program, self.rank, buffer):
                yield self.memory[ref.name][start:stop].zero_

    def tensor(self, ref: Ref) -> torch.Tensor:
        """What a reference names; KeyError where its buffer is not there yet."""
        return part(self.program, self.rank, self.memory[ref.name], ref)

    def _is_loose(self, refs: Sequence[Ref]) -> bool:
        return any(ref.name in self.loose for ref in refs)


def _writes_state(program: Program, one: Op) -> bool:
    held = (ref for ref in one.writes if program.buffers[ref.name].kind in PERSISTENT)
    return one.kind != "wait" and any(program.buffers[ref.name].kind not in GIVEN for ref in held)


def _run(bound: Bound, one: Op) -> list[Call]:
    key, num_fresh = str(one.get("segment")), int(one.get("fresh", 0))
    gm = bound.program.segments[key]
    fresh, into = one.writes[:num_fresh], one.writes[num_fresh:]
    if key in bound.compiled or bound._is_loose((*one.reads, *one.writes)):
        return [partial(_call, bound, bound.compiled.get(key, gm.forward), one, fresh, (*one.reads, *into))]
    for ref, node in zip(fresh, segments.outputs(gm.graph), strict=True):
        bound.memory[ref.name] = tape.at(bound.arena, bound.program.buffers[ref.name].at or 0, node.meta["val"])
    start, size = int(one.get("at", 0)), int(one.get("workspace", 0))
    given = [bound.tensor(ref) for ref in (*one.reads, *into)]
    return tape.bind(gm, given, [bound.memory[ref.name] for ref in fresh], bound.arena[start : start + size])


def _call(bound: Bound, fn: Callable[..., Any], one: Op, fresh: Sequence[Ref], given: Sequence[Ref]) -> None:
    for ref in one.writes[len(fresh) :]:
        if ref.name in bound.loose and ref.name not in bound.memory:
            buffer = bound.program.buffers[ref.name]
            bound.memory[ref.name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=bound.arena.device)
    for ref, value in zip(fresh, fn(*[bound.tensor(ref) for ref in given]), strict=True):
        if ref.name in bound.loose:
            bound.memory[ref.name] = value
        else:
            bound.memory[ref.name].copy_(value)


def _start(bound: Bound, one: Op) -> list[Call]:
    refs, name = (*one.reads, *one.writes), (one.writes or one.reads)[0].name
    if bound._is_loose(refs):
        return [lambda: bound.comm.start(name, one, [bound.tensor(ref) for ref in refs])]
    return [partial(bound.comm.start, name, one, [bound.tensor(ref) for ref in refs])]


def _wait(bound: Bound, one: Op) -> list[Call]:
    return [partial(bound.comm.wait, one.reads[0].name)]


def _free(bound: Bound, one: Op) -> list[Call]:
    return [partial(bound.memory.pop, ref.name) for ref in one.reads if ref.name in bound.loose]


BINDERS: dict[str, Callable[[Bound, Op], list[Call]]] = {
    "run": _run,
    "update": _run,
    "gather": _start,
    "reduce": _start,
    "send": _start,
    "recv": _start,
    "wait": _wait,
    "free": _free,
}
