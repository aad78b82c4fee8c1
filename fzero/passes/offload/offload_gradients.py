"""offload_gradients: a gradient that waits for all others, to be clipped, waits on the host or on disk.

The sums of squares of a bucket's leaves become an op of their own, right behind the gradient's reduction. What the
gradient is read for then lies at the step's end, and in between it is held where the rules say: on disk behind what the
rank's file has of the state. Gradients that nothing reads beside their update do not wait, and stay.

    run bwd1; wait g1; run bwd0; wait g0; run g0 g1 -> s[0:1] s[1:2]; ...; run g0 p0 -> p0.new; run g1 p1 -> p1.new
    becomes   run bwd1; wait g1; run g1 -> s[1:2]; move g1 -> g1.down; wait g1.down; move g1.down -> g1.kept; run bwd0;
              wait g1.kept; ...; move g1.kept -> g1.up; wait g1.up; move g1.up -> g1.in; wait g1.in; run g1.in p1 -> ...
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from fzero import tree
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.op import Op
from fzero.ir.program import Program, route
from fzero.ir.records import DEVICE, DISK, HOST, Buffer, Ref
from fzero.passes.offload.early import last_of_losses, moved_early
from fzero.passes.offload.to_spaces import chain, staging

APART = 2  # runs from one use to the next that a wait elsewhere needs more than


def offload_gradients(program: Program, rules: Mapping[str, str]) -> Program:
    """The program with gradients that wait held in the spaces that `rules` give, path rules of parameters; itself where
    none does. The first rule that matches decides. A bucket whose leaves differ stays on the device."""
    if not rules or not any(space != DEVICE for space in rules.values()):
        return program
    end = last_of_losses(program.ops) + 1
    pool: dict[str, fx.GraphModule] = {}
    ops: list[Op] = [*program.ops[:end]]
    sums: set[int] = set()
    for op in program.ops[end:]:
        parts = _by_bucket(program, op, pool)
        sums |= set(range(len(ops), len(ops) + len(parts))) if _sums(program, op) else set()
        ops += parts
    names = {ref.name for i in sums for ref in ops[i].writes}
    movable = {i for i in range(end, len(ops)) if ops[i].computes and (ops[i].is_flat or i in sums)}
    ops, moved = moved_early(ops, movable, lambda op: bool(op.writes) and all(ref.name in names for ref in op.writes))
    if not moved:
        return program
    kept = replace(program, segments={**program.segments, **pool})
    return _Waiting(kept, ops, rules).placed().apply(kept, "offload_gradients", ops)


def _sums(program: Program, op: Op) -> bool:
    """Whether an op sums ranges of buckets up, each to a number of its own."""
    ranges = all(program.buffers[ref.name].bucket is not None for ref in op.reads)
    numbers = all(ref.shape == () and ref.start is not None for ref in op.writes)
    return (
        op.is_run and not op.is_flat and not op.num_outputs and len(op.reads) == len(op.writes) and ranges and numbers
    )


def _by_bucket(program: Program, op: Op, pool: dict[str, fx.GraphModule]) -> list[Op]:
    """An op that sums leaves up as one for each buffer that it reads; any other op as it is."""
    if not _sums(program, op):
        return [op]
    graph = program.segments[op.segment].graph
    holders = fx_nodes.placeholders(graph)
    size = len(op.reads)
    result = {
        node.args[0]: fx_nodes.operand(node, 1) for node in graph.nodes if node.target is segments.aten.copy_.default
    }
    groups: dict[str, list[int]] = {}
    for n, ref in enumerate(op.reads):
        groups.setdefault(ref.name, []).append(n)
    parts = []
    for members in groups.values():
        values = [result[holders[size + n]] for n in members]
        gm = segments.extract(values, [holders[n] for n in members], values, [holders[size + n] for n in members])
        done = rewrite.run_op(op, gm, [op.reads[n] for n in members], [op.writes[n] for n in members])
        pool.setdefault(done.segment, gm)
        parts.append(done)
    return parts


class _Waiting:
    """Ops whose gradients get a place to wait. `placed` writes `edits` and `end`."""

    def __init__(self, program: Program, ops: list[Op], rules: Mapping[str, str]) -> None:
        self.program, self.ops, self.rules = program, ops, rules
        self.runs = [i for i, op in enumerate(ops) if op.computes]
        self.last_loss = last_of_losses(ops)
        self.reads, self.writes = rewrite.reads_of(ops), rewrite.writes_of(ops)
        self.waits = {op.target: i for i, op in enumerate(ops) if op.is_wait}
        self.edits = rewrite.Edits()
        self.end = _pages(program.arenas[DISK])

    def placed(self) -> rewrite.Edits:
        """The edits that move the gradients that wait."""
        for name, buffer in self.program.buffers.items():
            space = self._space(buffer)
            late = [i for i, _ in self.reads.get(name, ()) if i > self.last_loss and self.ops[i].is_flat]
            if space == DEVICE or buffer.kind != "grad" or not late:
                continue
            uses = [i for i, _ in (*self.reads[name], *self.writes[name])] + [self.waits.get(name, -1)]
            last, first = max(i for i in uses if i < late[0]), late[0]
            if self._turn(first) - self._turn(last) <= APART or any(i > first and i not in late for i in uses):
                continue
            down, up = self._hold(buffer, space)
            why = f"gradients of {buffer.bucket} wait"
            *near, far = chain([Ref(n) for n in (name, *down)], why)  # `far` is the last wait
            settled = self.runs[self._turn(last + 1)] + 1
            self.edits.before[last + 1] += near
            self.edits.before[settled].append(far)
            self.edits.before[first] += chain([Ref(n) for n in (down[-1], *up)], why)
            for i in late:
                self.edits.rename[i][name] = up[-1]
        return self.edits

    def _turn(self, index: int) -> int:
        return bisect_left(self.runs, index)

    def _space(self, buffer: Buffer) -> str:
        """Where the gradients in a buffer wait."""
        bucket = self.program.buckets.get(buffer.bucket or "")
        paths = [slot.path for slot in bucket.slots] if bucket is not None else []
        spaces = {next((to for rule, to in self.rules.items() if tree.matches(rule, path)), DEVICE) for path in paths}
        return spaces.pop() if len(spaces) == 1 else DEVICE

    def _hold(self, buffer: Buffer, space: str) -> tuple[list[str], list[str]]:
        """Makes the buffers on the way to where a gradient waits, that one at the end, and on the way back."""
        name = buffer.name
        kept = replace(buffer, name=f"{name}.kept", space=space, at=None, note="")
        down, up = [kept.name], [f"{name}.in"]
        if space == DISK:
            kept = replace(kept, at=self.end)
            self.end += _pages(kept.nbytes)
        if len(route(self.program, DEVICE, space)) > 1:
            down, up = [f"{name}.down", kept.name], [f"{name}.up", f"{name}.in"]
            self.edits.buffers.update({n: staging(buffer, n, HOST) for n in (down[0], up[0])})
        self.edits.buffers[kept.name] = kept
        self.edits.buffers[up[-1]] = staging(buffer, up[-1], DEVICE)
        return down, up


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
