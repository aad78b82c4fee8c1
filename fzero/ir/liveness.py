"""liveness: which buffers hold values at which op. Passes and accounts read it here; `verify` finds out by itself.

A buffer is live from the op that first writes it to its `free`; before lifetimes are written as `free` ops, to its last
use. Buffers held between steps (`PERSISTENT`) are live throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fzero.ir.op import Op
from fzero.ir.records import DEVICE, PERSISTENT, Buffer, Ref


def uses(op: Op) -> tuple[Ref, ...]:
    """The references whose memory an op needs. A `settle` names a transfer, which may have ended long ago: none."""
    return () if op.is_settle else (*op.reads, *op.writes)


def live_names(ops: Sequence[Op], buffers: Mapping[str, Buffer], index: int) -> set[str]:
    """The names of the buffers that are live after op `index`."""
    live = {name for name, b in buffers.items() if b.kind in PERSISTENT}
    for op in ops[: index + 1]:
        live.update(ref.name for ref in op.writes if ref.name in buffers)
        if op.is_free:
            live.difference_update(ref.name for ref in op.reads)
    return live


def live_bytes(
    ops: Iterable[Op], buffers: Mapping[str, Buffer], counted: Callable[[Buffer], bool] = lambda buffer: True
) -> list[int]:
    """Bytes of buffers alive after each op, of those `counted`. Memory that an op needs only while it runs is not
    counted."""
    size = {name: b.nbytes if counted(b) else 0 for name, b in buffers.items()}
    held = {name for name, b in buffers.items() if b.kind in PERSISTENT}
    live = sum(size[name] for name in held)
    levels = []
    for op in ops:
        for ref in op.writes:
            if ref.name in size and ref.name not in held:
                held.add(ref.name)
                live += size[ref.name]
        if op.is_free:
            for ref in op.reads:
                if ref.name in held:
                    held.discard(ref.name)
                    live -= size[ref.name]
        levels.append(live)
    return levels


def last_uses(ops: Sequence[Op]) -> dict[str, int]:
    """By buffer, the last op that uses it: that reads or writes it, or waits for a transfer that does."""
    last: dict[str, int] = {}
    pending: dict[str, list[tuple[str, ...]]] = {}  # several moves into one buffer end in their order
    for index, op in enumerate(ops):
        for ref in uses(op):
            last[ref.name] = index
        if op.transfers:
            pending.setdefault(op.target, []).append(tuple(r.name for r in (*op.reads, *op.writes)))
        if op.is_wait and pending.get(op.reads[0].name):
            for name in pending[op.reads[0].name].pop(0):
                last[name] = max(last[name], index)
    return last


def intervals(ops: Sequence[Op], buffers: Mapping[str, Buffer], kept: Iterable[str] = ()) -> dict[str, tuple[int, int]]:
    """(first op, last op) of every buffer that is not held between steps; of the batch too, as the step's own copy,
    from before the first op. `kept` (metrics) live beyond the last op."""
    lives: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(ops):
        for ref in uses(op):
            kind = buffers[ref.name].kind
            if kind == "batch":
                lives[ref.name] = (-1, i)
            elif kind not in PERSISTENT:
                lives[ref.name] = (lives.get(ref.name, (i, i))[0], i)
    for name in kept:
        if name in lives:
            lives[name] = (lives[name][0], len(ops))
    return lives


def gathered_bytes(ops: Sequence[Op], buffers: Mapping[str, Buffer]) -> list[int]:
    """Bytes of gathered parameters alive at each op: from the gather's start to the last use (or the free)."""
    last: dict[str, int] = {}
    for index, op in enumerate(ops):
        for ref in uses(op):
            if ref.name in buffers and buffers[ref.name].kind == "gathered":
                last[ref.name] = index
    live: set[str] = set()
    held, levels = 0, []
    for index, op in enumerate(ops):
        begins = {r.name for r in op.writes if r.name in last} - live
        live |= begins
        held += sum(buffers[n].nbytes for n in begins)
        levels.append(held)
        ends = {r.name for r in uses(op) if last.get(r.name) == index} & live
        live -= ends
        held -= sum(buffers[n].nbytes for n in ends)
    return levels


def waits_with_settle(ops: Sequence[Op]) -> set[int]:
    """The waits after which a `settle` of the same transfer follows. Any other wait settles its transfer at once."""
    waits: set[int] = set()
    open_: set[str] = set()  # targets whose settle lies ahead
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        if op.is_settle:
            open_.add(op.target)
        elif op.is_wait and op.target in open_:
            waits.add(index)
            open_.discard(op.target)
        elif op.transfers:
            open_.discard(op.target)
    return waits


def endangered(op: Op, buffers: Mapping[str, Buffer], sources: Iterable[str]) -> list[str]:
    """Which of these buffers an op writes into, by name or where they lie in the arena, or gives back to the allocator.

    A `free` of a buffer with a place in the arena gives nothing back: its bytes stay until an op writes there.
    """
    written = {ref.name for ref in op.writes}
    places = [(b.space, b.at, b.at + b.nbytes) for b in map(buffers.__getitem__, written) if b.at is not None]
    if op.offset is not None:
        spaces = [buffers[ref.name].space for ref in (*op.writes, *op.reads) if ref.name in buffers]
        places.append(((*spaces, DEVICE)[0], op.offset, op.offset + op.workspace))
    freed = {ref.name for ref in op.reads} if op.is_free else set()

    def is_lost(name: str) -> bool:
        low, nbytes, where = buffers[name].at, buffers[name].nbytes, buffers[name].space
        if low is None:
            return name in written or name in freed
        over = (space == where and first < low + nbytes and low < last for space, first, last in places)
        return name in written or any(over)

    return [name for name in sorted(sources) if is_lost(name)]
