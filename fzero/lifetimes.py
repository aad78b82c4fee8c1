"""lifetimes: what is live, in flight and donated along a program. The rules of `fzero.verify` about memory in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fzero.passes.place import lifetimes as lives_of
from fzero.passes.rewrite import Spans, overlap
from fzero.plan.pack import ALIGN_BYTES, clash
from fzero.program import GIVEN, PERSISTENT, Op, Program, Ref

Fault = tuple[int, str]
TRANSFERS = ("gather", "reduce", "send", "recv")


@dataclass
class _Walk:
    """Lifetimes along one program: what is live, what is in flight, what the state's new values are."""

    program: Program
    live: set[str] = field(default_factory=set)
    freed: dict[str, int] = field(default_factory=dict)
    flight: dict[str, tuple[int, Op]] = field(default_factory=dict)
    touched: dict[str, dict[str, None]] = field(default_factory=dict)  # by buffer, the transfers in flight that use it

    def faults(self) -> Iterator[Fault]:
        p = self.program
        written = [(i, ref) for i, one in enumerate(p.ops) if one.kind == "update" for ref in one.writes]
        self.written = [(i, ref) for i, ref in written if p.buffers[ref.name].kind in PERSISTENT]
        self.spans = Spans(ref for _, ref in self.written)
        self.live = {name for name, b in p.buffers.items() if b.kind in PERSISTENT}
        for i, one in enumerate(p.ops):
            if one.kind == "wait":
                yield from self._wait(i, one)
            elif one.kind == "free":
                yield from self._free(i, one)
            else:
                yield from self._ordinary(i, one)
        for name, (i, _) in self.flight.items():
            yield i, f"the transfer into {name} is started and never waited for"
        for name in p.metrics.values():
            if name not in self.live:
                yield len(p.ops), f"metric buffer {name} is not live at the end"
        if "free" in p.passes:
            for name in sorted(self.live - set(p.metrics.values())):
                if p.buffers[name].kind not in PERSISTENT:
                    yield len(p.ops), f"{name} is never freed"

    def _wait(self, i: int, one: Op) -> Iterator[Fault]:
        name = one.reads[0].name
        if name not in self.flight:
            yield i, f"waits for a transfer into {name}, of which none is in flight"
        _, other = self.flight.pop(name, (i, one))
        for ref in (*other.reads, *other.writes):
            self.touched.get(ref.name, {}).pop(name, None)

    def _free(self, i: int, one: Op) -> Iterator[Fault]:
        for ref in one.reads:
            yield from self._busy(i, ref, "frees")
            if ref.name not in self.live:
                yield i, f"frees {ref.name}, which is not live{self._since(ref.name)}"
            elif self.program.buffers[ref.name].kind in PERSISTENT:
                yield i, f"frees {ref.name}, which belongs to the state or the batch"
            self.live.discard(ref.name)
            self.freed[ref.name] = i

    def _ordinary(self, i: int, one: Op) -> Iterator[Fault]:
        for ref in one.reads:
            if ref.name not in self.live:
                yield i, f"reads {ref}, which is not live{self._since(ref.name)}"
            for name in self.touched.get(ref.name, ()):
                started, other = self.flight[name]
                if any(overlap(ref, w) for w in other.writes):
                    yield i, f"reads {ref} before the transfer into {name} (op {started}) is waited for"
            if one.kind != "gather" or ref.name != one.writes[0].name:
                for written in (self.written[w][0] for w in self.spans.over(ref)):
                    if written < i:
                        yield i, f"reads {ref}, which was donated: op {written} wrote its new value"
        for ref in one.writes:
            yield from self._busy(i, ref, "writes")
            if one.kind == "reduce" and ref is not one.writes[0] and ref.name in self.live:
                yield i, f"receives into {ref.name}, which is in use: free it first"
            if self.program.buffers[ref.name].kind in GIVEN:
                yield i, f"writes {ref}, which is the user's and read-only"
            self.live.add(ref.name)
        if one.kind in TRANSFERS:
            name = (one.writes or one.reads)[0].name
            if name in self.flight:
                yield i, f"starts a transfer into {name} while another is in flight"
            self.flight[name] = (i, one)
            for ref in (*one.reads, *one.writes):
                self.touched.setdefault(ref.name, {})[name] = None

    def _busy(self, i: int, ref: Ref, does: str) -> Iterator[Fault]:
        for name in self.touched.get(ref.name, ()):
            started, other = self.flight[name]
            if any(overlap(ref, r) for r in (*other.reads, *other.writes)):
                yield i, f"{does} {ref.name} while the transfer into {name} (op {started}) is in flight"

    def _since(self, name: str) -> str:
        return f": freed at op {self.freed[name]}" if name in self.freed else ": nothing wrote it"


def lifetimes(program: Program) -> Iterator[Fault]:
    """Reads are of live, waited-for buffers, transfers are waited for once, and nothing in use is freed or donated."""
    yield from _Walk(program).faults()


def places(program: Program) -> Iterator[Fault]:
    """What is alive at one moment lies apart in the arena, and every place is aligned."""
    items: list[tuple[int, int, int, int]] = []
    names: list[str] = []
    lives = lives_of(program)
    for name, buffer in program.buffers.items():
        if buffer.at is not None and (buffer.kind in PERSISTENT) > (buffer.kind == "batch"):
            yield -1, f"{name} has a place in the step's arena, but is held between steps"
        elif buffer.at is None and buffer.kind == "batch" and name in lives and "place" in program.passes:
            yield -1, f"{name} has no place in the step's arena: the batch is copied there"
        elif buffer.at is not None and name in lives:
            names.append(name)
            items.append((*lives[name], buffer.at, buffer.nbytes))
    for i, one in enumerate(program.ops):
        if one.get("at") is not None:
            names.append(f"the workspace of op {i}")
            items.append((i, i, int(one.get("at")), int(one.get("workspace", 0))))
        elif one.get("workspace") and "place" in program.passes:
            yield i, "its workspace has no place in the step's arena"
    for name, (_, _, low, _) in zip(names, items, strict=True):
        if low < 0 or low % ALIGN_BYTES:
            yield -1, f"{name} lies at byte {low} of the arena: not a multiple of {ALIGN_BYTES}"
    if (found := clash(items)) is not None:
        a, b = found
        yield max(items[a][0], items[b][0]), f"{names[a]} and {names[b]} share memory of the arena while both are alive"


def needed(program: Program) -> Iterator[Fault]:
    """Nothing brings again what nobody has read since it was brought."""
    unread: dict[str, int] = {}
    for i, one in enumerate(program.ops):
        target = one.writes[0].name if one.kind in TRANSFERS and one.writes else None
        for ref in one.reads:
            if one.kind != "wait" and ref.name != target:
                unread.pop(ref.name, None)
        if target is not None:
            if target in unread:
                yield i, f"brings {target} again: nothing read it since op {unread[target]}"
            unread[target] = i
