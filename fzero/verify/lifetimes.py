"""lifetimes: the rules of `fzero.verify` about memory in time: buffers that are live, in flight or donated along a
program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fzero.ir.offset_assignment import ALIGN_BYTES, PAGE_BYTES, clash
from fzero.ir.op import Op
from fzero.ir.program import Level, Program
from fzero.ir.records import DEVICE, DISK, GIVEN, HOST, PERSISTENT, SPACES, Ref
from fzero.ir.rewrite import Spans

Fault = tuple[int, str]


@dataclass
class _Lifetimes:
    """Lifetimes along one program. Only `faults` and its helpers write the fields.

    flight: by target, the transfers in flight into it, in order: several moves of apart ranges may be. touched: by
    buffer, the transfers in flight that use it.
    """

    program: Program
    live: set[str] = field(default_factory=set)
    freed: dict[str, int] = field(default_factory=dict)
    flight: dict[str, list[int]] = field(default_factory=dict)
    touched: dict[str, dict[int, None]] = field(default_factory=dict)

    def faults(self) -> Iterator[Fault]:
        """The faults of the program, in the order of its ops."""
        p = self.program
        written = [(i, ref) for i, op in enumerate(p.ops) if op.is_update for ref in op.writes]
        self.written = [(i, ref) for i, ref in written if p.buffers[ref.name].kind in PERSISTENT]
        self.spans = Spans(ref for _, ref in self.written)
        self.live = {name for name, b in p.buffers.items() if b.kind in PERSISTENT}
        for i, op in enumerate(p.ops):
            if op.is_wait:
                yield from self._wait(i, op)
            elif op.is_free:
                yield from self._free(i, op)
            elif not op.is_settle:
                yield from self._ordinary(i, op)
        for name, started in self.flight.items():
            yield from ((i, f"the transfer into {name} is started and never waited for") for i in started)
        for name in p.metrics.values():
            if name not in self.live:
                yield len(p.ops), f"metric buffer {name} is not live at the end"
        if p.level >= Level.FREED:
            for name in sorted(self.live - set(p.metrics.values())):
                if p.buffers[name].kind not in PERSISTENT:
                    yield len(p.ops), f"{name} is never freed"

    def _wait(self, i: int, op: Op) -> Iterator[Fault]:
        name = op.reads[0].name
        if not self.flight.get(name):
            yield i, f"waits for a transfer into {name}, of which none is in flight"
            return
        started = self.flight[name].pop(0)
        for ref in (*self.program.ops[started].reads, *self.program.ops[started].writes):
            self.touched[ref.name].pop(started, None)

    def _free(self, i: int, op: Op) -> Iterator[Fault]:
        for ref in op.reads:
            yield from self._busy(i, ref, "frees")
            if ref.name not in self.live:
                yield i, f"frees {ref.name}, which is not live{self._since(ref.name)}"
            elif self.program.buffers[ref.name].kind in PERSISTENT:
                yield i, f"frees {ref.name}, which belongs to the state or the batch"
            self.live.discard(ref.name)
            self.freed[ref.name] = i

    def _ordinary(self, i: int, op: Op) -> Iterator[Fault]:
        """The faults of an op that is no mark: it reads, writes or starts a transfer."""
        for ref in op.reads:
            if ref.name not in self.live:
                yield i, f"reads {ref}, which is not live{self._since(ref.name)}"
            for started in self.touched.get(ref.name, ()):
                other = self.program.ops[started]
                if any(ref.overlaps(w) for w in other.writes):
                    yield i, f"reads {ref} before the transfer into {other.target} (op {started}) is waited for"
            if not (op.moves or (op.gathers and ref.mine)):  # they bring the new value
                for written in (self.written[w][0] for w in self.spans.over(ref)):
                    if written < i:
                        yield i, f"reads {ref}, which was donated: op {written} wrote its new value"
        for ref in op.writes:
            yield from self._busy(i, ref, "writes")
            if op.reduces and ref is not op.writes[0] and ref.name in self.live:
                yield i, f"receives into {ref.name}, which is in use: free it first"
            if self.program.buffers[ref.name].kind in GIVEN:
                yield i, f"writes {ref}, which is the user's and read-only"
            self.live.add(ref.name)
        if op.transfers:
            others = self.flight.setdefault(op.target, [])
            if not all(one.moves for one in (op, *map(self.program.ops.__getitem__, others))) and others:
                yield i, f"starts a transfer into {op.target} while another is in flight"
            others.append(i)
            for ref in (*op.reads, *op.writes):
                self.touched.setdefault(ref.name, {})[i] = None

    def _busy(self, i: int, ref: Ref, does: str) -> Iterator[Fault]:
        for started in self.touched.get(ref.name, ()):
            other = self.program.ops[started]
            if any(ref.overlaps(r) for r in (*other.reads, *other.writes)):
                yield i, f"{does} {ref.name} while the transfer into {other.target} (op {started}) is in flight"

    def _since(self, name: str) -> str:
        return f": freed at op {self.freed[name]}" if name in self.freed else ": nothing wrote it"


def lifetimes(program: Program) -> Iterator[Fault]:
    """Reads are of live, waited-for buffers, transfers are waited for once, and nothing in use is freed or donated."""
    yield from _Lifetimes(program).faults()


def places(program: Program) -> Iterator[Fault]:
    """Buffers and workspaces that are alive at one moment lie apart in the arena, and every place is aligned."""
    items: dict[str, list[tuple[int, int, int, int]]] = {space: [] for space in SPACES}
    names: dict[str, list[str]] = {space: [] for space in SPACES}
    lives = _lives(program)
    for name, buffer in program.buffers.items():
        if buffer.space == DISK:
            if buffer.at is None:
                yield -1, f"{name} has no place in the rank's file"
                continue
            names[DISK].append(name)
            items[DISK].append((0, 0, buffer.at, buffer.nbytes))
        elif buffer.at is not None and (buffer.kind in PERSISTENT) > (buffer.kind == "batch"):
            yield -1, f"{name} has a place in the step's arena, but is held between steps"
        elif buffer.at is None and buffer.kind == "batch" and name in lives and program.level >= Level.PLACED:
            yield -1, f"{name} has no place in the step's arena: the batch is copied there"
        elif buffer.at is not None and name in lives:
            names[buffer.space].append(name)
            items[buffer.space].append((*lives[name], buffer.at, buffer.nbytes))
    for i, op in enumerate(program.ops):
        if op.offset is not None:
            names[program.space(op)].append(f"the workspace of op {i}")
            items[program.space(op)].append((i, i, (op.offset or 0), op.workspace))
        elif op.workspace and program.level >= Level.PLACED:
            yield i, "its workspace has no place in the step's arena"
    for space, own in items.items():
        align = ALIGN_BYTES if space == DEVICE else PAGE_BYTES
        what = {DEVICE: "the arena", HOST: "the host's arena", DISK: "the rank's file"}[space]
        for name, (_, _, low, _) in zip(names[space], own, strict=True):
            if low < 0 or low % align:
                yield -1, f"{name} lies at byte {low} of {what}: not a multiple of {align}"
        if (pair := clash(own)) is not None:
            a, b = (names[space][n] for n in pair)
            if space == DISK:
                yield -1, f"{a} and {b} share bytes of {what}"
            else:
                yield max(own[n][0] for n in pair), f"{a} and {b} share memory of {what} while both are alive"


def _lives(program: Program) -> dict[str, tuple[int, int]]:
    """(first op, last op) that names a buffer which is not held between steps. The step's copy of the batch is there
    before the first op, and a metric after the last one."""
    found: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(program.ops):
        for ref in () if op.is_settle else (*op.reads, *op.writes):
            kind = program.buffers[ref.name].kind
            if kind not in PERSISTENT or kind == "batch":
                found[ref.name] = found.get(ref.name, (-1 if kind == "batch" else i, i))[0], i
    shown = set(program.metrics.values())
    return {name: (first, len(program.ops) if name in shown else last) for name, (first, last) in found.items()}


def settled(program: Program) -> Iterator[Fault]:
    """No op writes into the source of a transfer between its `wait` and its `settle`: other ranks may read it still."""
    started: dict[str, Op] = {}
    deferred = _settled_later(program)
    lent: dict[str, set[str]] = {}  # by target: the sources that other ranks may read
    for i, op in enumerate(program.ops):
        if op.is_settle:
            if op.target not in lent:
                yield i, f"settles a transfer into {op.target}, of which none has been waited for"
            lent.pop(op.target, None)
            continue
        for target, sources in lent.items():
            for name in sorted(name for name in sources if _lost(program, op, name)):
                yield i, f"writes or frees {name} before the transfer into {target} is settled"
        if op.transfers:
            started[op.target] = op
        elif i in deferred and op.target in started:
            lent[op.target] = started[op.target].sources


def _settled_later(program: Program) -> set[int]:
    """The waits for transfers that a `settle` ends: the last wait for a target before each settle of it, unless a
    transfer into it starts between them."""
    waits: set[int] = set()
    waited: dict[str, int] = {}
    for i, op in enumerate(program.ops):
        if op.is_wait:
            waited[op.target] = i
        elif op.is_settle and op.target in waited:
            waits.add(waited.pop(op.target))
        elif op.transfers:
            waited.pop(op.target, None)
    return waits


def _lost(program: Program, op: Op, name: str) -> bool:
    """Whether an op writes into a buffer, by its name or where it lies, or gives its memory back."""
    buffer = program.buffers[name]
    if any(ref.name == name for ref in op.writes):
        return True
    if buffer.at is None:
        return op.is_free and any(ref.name == name for ref in op.reads)
    spans = [(b.space, b.at, b.nbytes) for b in (program.buffers[ref.name] for ref in op.writes) if b.at is not None]
    if op.offset is not None:
        spans.append((program.space(op), op.offset, op.workspace))
    return any(
        space == buffer.space and at < buffer.at + buffer.nbytes and buffer.at < at + size for space, at, size in spans
    )


def needed(program: Program) -> Iterator[Fault]:
    """Nothing brings again what nobody has read since it was brought."""
    unread: dict[str, dict[Ref, int]] = {}
    for i, op in enumerate(program.ops):
        target = op.writes[0] if op.transfers and op.writes else None
        for ref in op.reads:
            own = unread.get(ref.name, {}) if target is not None and ref.name == target.name else {}
            if not op.is_wait and all(program.ops[first].moves for first in own.values()):
                unread.pop(ref.name, None)
        if target is not None:
            brought = unread.setdefault(target.name, {})
            for ref, first in brought.items():
                if ref.overlaps(target):
                    yield i, f"brings {target} again: nothing read it since op {first}"
            brought[target] = i
