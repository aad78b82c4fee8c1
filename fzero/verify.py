"""verify: rules that every rank's program keeps, checked before anything runs and, in tests, after every pass.

Each rule is a generator of faults in `RULES`: (op number, what is wrong). The first fault is raised as a VerifyError
that names the rule, the rank, the op's line and the last pass. Rules that need final lifetimes wait for the pass that
makes them (`free`, `prefetch`). The last rule is the strongest: the program's meaning is that of the captured step
(`fzero.meaning`), whatever the other rules may have missed. `fzero.mutate` breaks programs to see what is caught.

Cost: one walk over the ops a rule; a 12-layer model takes some tens of milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from fzero import offsets, segments
from fzero.abstract import Abstract
from fzero.errors import VerifyError
from fzero.lifetimes import TRANSFERS, Fault, lifetimes, needed, places
from fzero.meaning import Undefined, term
from fzero.passes.prefetch import gathered_bytes
from fzero.passes.rewrite import overlap
from fzero.plan.memory import account
from fzero.program import ALIGN, DTYPE_NAMES, PERSISTENT, Op, Program, Ref, op_text


def verify(programs: Program | Mapping[int, Program], *, budget_bytes: int | None = None) -> None:
    """Raises VerifyError for the first rule that a program, or the ranks' programs together, break.

    `programs` is one program for every rank, or `{rank: program}`. `budget_bytes` bounds the planned peak per rank.
    """
    by_rank = {0: programs} if isinstance(programs, Program) else dict(programs)
    checked: list[Program] = []
    for rank, program in by_rank.items():
        if any(program is one for one in checked):
            continue
        checked.append(program)
        for name, rule in RULES.items():
            for at, what in rule(program):
                raise VerifyError(_message(name, rank, program, at, what, len(by_rank) > 1))
        if budget_bytes is not None and (peak := account(program)).peak > budget_bytes:
            what = f"{peak.peak:,} bytes live, the budget is {budget_bytes:,}"
            raise VerifyError(_message("budget", rank, program, peak.op, what, len(by_rank) > 1))
    if len(checked) > 1:
        _together(by_rank)


def _message(rule: str, rank: int, program: Program, at: int, what: str, several: bool) -> str:
    where = f"op {at}" if 0 <= at < len(program.ops) else "the end"
    line = f" `{op_text(program.ops[at])}`" if 0 <= at < len(program.ops) else ""
    who = f" of rank {rank}" if several else ""
    return f"[{rule}] {where}{who}{line}: {what} (after pass {program.passes[-1] if program.passes else 'none'})"


# --- places -----------------------------------------------------------------------------------------------------------


def partition(program: Program) -> Iterator[Fault]:
    """Slots are aligned and apart; shards of a bucket are its length over the ranks; references stay inside."""
    n = program.world_size
    for bucket in program.buckets.values():
        end = 0
        for slot in bucket.slots:
            if slot.start < end or slot.start % ALIGN or slot.stop > bucket.length:
                place = f"[{slot.start}:{slot.stop}] of {bucket.name}"
                yield -1, f"leaf {slot.path} lies at {place}: overlapping, unaligned or out"
            end = slot.stop
        if bucket.length % (n * ALIGN):
            yield -1, f"bucket {bucket.name} has {bucket.length} elements: not a multiple of {n} ranks x {ALIGN}"
    for buffer in program.buffers.values():
        if buffer.bucket is not None:
            length = program.buckets[buffer.bucket].length
            needed = ((length // n if buffer.shard else length) // buffer.per,)
            if ALIGN % buffer.per:
                yield -1, f"{buffer.name} has one element for each {buffer.per}: they do not part {ALIGN} evenly"
            if buffer.shape != needed:
                yield (
                    -1,
                    f"{buffer.name} has shape {buffer.shape}: a {'shard' if buffer.shard else 'whole'} has {needed}",
                )
    for i, one in enumerate(program.ops):
        for ref in (*one.reads, *one.writes):
            buffer = program.buffers[ref.name]
            if ref.start is not None and not 0 <= ref.start <= (ref.stop or 0) <= program.extent(buffer):
                yield i, f"{ref} lies outside of {buffer.name}, which has {program.extent(buffer)} elements"
            if ref.start is not None and (ref.start % buffer.per or (ref.stop or 0) % buffer.per):
                yield i, f"{ref} cuts through a block: {buffer.name} has one element for each {buffer.per}"
            if ref.mine and buffer.bucket is None:
                yield i, f"{ref}: {buffer.name} is in no bucket and has no own slice"
        yield from _cut_alike(program, i, one)


def _cut_alike(program: Program, i: int, one: Op) -> Iterator[Fault]:
    """Equal flat ranges of two buckets that one op works on hold leaves at the same places."""
    seen: dict[tuple[int, int | None], tuple[Ref, list[tuple[int, int]]]] = {}
    for ref in (*one.reads, *one.writes):
        bucket = program.buckets.get(program.buffers[ref.name].bucket or "")
        if bucket is None or ref.start is None or ref.shape is not None:
            continue
        inside = [(s.start, s.stop) for s in bucket.slots if ref.start <= s.start and s.stop <= (ref.stop or 0)]
        other, places = seen.setdefault((ref.start, ref.stop), (ref, inside))
        if places != inside:
            yield i, f"{ref} holds leaves at {inside}, {other} at {places}"


def aliasing(program: Program) -> Iterator[Fault]:
    """What a run writes is exactly what it reads, or apart from it; its writes are apart from one another."""
    for i, one in enumerate(program.ops):
        if one.kind not in ("run", "update"):
            continue
        for n, ref in enumerate(one.writes):
            for read in one.reads:
                if overlap(ref, read) and ref != read:
                    yield i, f"writes {ref}, which overlaps {read} that it reads"
            for other in one.writes[n + 1 :]:
                if overlap(ref, other):
                    yield i, f"writes {ref} and {other}, which overlap"


def calls(program: Program) -> Iterator[Fault]:
    """A run names a segment that is there, and gives it the tensors that it takes and returns."""
    for i, one in enumerate(program.ops):
        if one.kind not in ("run", "update"):
            continue
        gm = program.segments.get(str(one.get("segment")))
        if gm is None:
            yield i, f"segment {one.get('segment')} is not in the program: pass segments= to parse"
            continue
        results, takes = segments.outputs(gm.graph), segments.placeholders(gm.graph)
        fresh = len(results)
        given = len(one.reads) + len(one.writes) - fresh
        if fresh != int(one.get("fresh", 0)) or len(takes) != given:
            yield i, f"segment {one.get('segment')} takes {len(takes)} and returns {fresh}, the op gives {given}"
            continue
        owners = [segments.base(node) for node in results]
        if any(node.op == "placeholder" for node in owners) or len(set(owners)) < len(owners):
            yield i, f"segment {one.get('segment')} returns a tensor that shares its memory with another or an input"
        for ref in one.writes[:fresh]:
            if program.buffers[ref.name].kind in PERSISTENT:
                yield i, f"returns {ref} as a new tensor: {ref.name} is held between steps and must be written in place"
        for ref, node in zip((*one.writes[:fresh], *one.reads, *one.writes[fresh:]), (*results, *takes), strict=True):
            buffer, value = program.buffers[ref.name], node.meta["val"]
            shape = buffer.shape if ref.start is None else ref.shape
            if buffer.dtype is not value.dtype or (shape is not None and shape != tuple(value.shape)):
                form = f"{DTYPE_NAMES[value.dtype]}{list(value.shape)}"
                yield i, f"{ref} is {DTYPE_NAMES[buffer.dtype]}{list(shape or ())}: the segment has {form} there"


# --- transfers --------------------------------------------------------------------------------------------------------


def transfers(program: Program) -> Iterator[Fault]:
    """Collectives run over an axis of the mesh, on whole buffers of sizes that fit."""
    for i, one in enumerate(program.ops):
        if one.kind not in TRANSFERS:
            continue
        if one.axis not in dict(program.mesh):
            yield i, f"runs over axis {one.axis!r}: the mesh has {[axis for axis, _ in program.mesh]}"
            continue
        n = program.axis_size(one.axis)
        source, target = (
            program.buffers[ref.name] for ref in ((one.reads or one.writes)[0], (one.writes or one.reads)[0])
        )
        if one.kind == "gather":
            part = source.numel if source.shard else source.numel // n
            if part * n != target.numel:
                yield i, f"gathers {part} elements of {n} ranks into {target.numel}"
        elif one.kind == "reduce":
            yield from _reduction(program, i, one, n)


def _reduction(program: Program, i: int, one: Op, n: int) -> Iterator[Fault]:
    size, room = _length(program, one.reads[0]), _length(program, one.writes[0])
    mode = one.get("mode")
    needed_room = size // n if mode == "scatter" else size
    if mode not in ("scatter", "all", "exchange"):
        yield i, f"mode={mode} is none of scatter, all, exchange"
    elif room != needed_room:
        yield i, f"reduces {size} elements with mode={mode} into {room}: needed {needed_room}"
    elif one.get("via") == "p2p":
        scratch = _length(program, one.writes[1]) if len(one.writes) > 1 else 0
        part = size if mode == "exchange" else size // n
        if scratch < (n - 1) * part:
            yield i, f"receives {(n - 1) * part} elements into scratch of {scratch}"
    elif one.get("via") == "shared" and len(one.writes) > 1:
        yield i, f"has scratch {one.writes[1]}: via=shared adds what it reads in the other ranks' memory"


def _length(program: Program, ref: Ref) -> int:
    return program.buffers[ref.name].numel if ref.start is None else (ref.stop or 0) - ref.start


def inside(program: Program) -> Iterator[Fault]:
    """No op of a segment reads or writes outside its operands' memory."""
    checked: set[str] = set()
    for i, one in enumerate(program.ops):
        key = str(one.get("segment"))
        if key in program.segments and key not in checked:
            checked.add(key)
            for what in offsets.faults(program.segments[key]):
                yield i, what


# --- training ---------------------------------------------------------------------------------------------------------


def reduced_once(program: Program) -> Iterator[Fault]:
    """Every gradient bucket of every microbatch reaches exactly one reduction, every slot of it written once."""
    if program.world_size == 1:
        return
    into: dict[str, str] = {}
    reductions: Counter[str] = Counter()
    wrote: Counter[tuple[str, int | None, int | None]] = Counter()
    for i, one in enumerate(program.ops):
        if one.kind == "reduce" and program.buffers[one.reads[0].name].kind == "grad":
            reductions[one.reads[0].name] += 1
            if reductions[one.reads[0].name] > 1:
                yield i, f"reduces {one.reads[0].name} a second time"
        elif one.kind == "run" and one.get("flat") and program.buffers[one.writes[0].name].kind == "grad":
            total = one.writes[0].name
            into.update({ref.name: total for ref in one.reads if ref.name != total})
        elif one.kind == "run":
            for ref in one.writes:
                if program.buffers[ref.name].kind == "grad":
                    key = (ref.name, ref.start, ref.stop)
                    wrote[key] += 1
                    if wrote[key] > 1:
                        yield i, f"writes the gradient {ref} a second time"
    for name in {name for name, _, _ in wrote}:
        end = name
        while end in into and reductions[end] == 0:
            end = into[end]
        if reductions[end] == 0:
            yield -1, f"the gradients in {name} are never reduced"


def microbatches(program: Program) -> Iterator[Fault]:
    """Every region runs all its segments for every microbatch."""
    runs: dict[str, Counter[int]] = {}
    for one in program.ops:
        if one.get("phase") == "region":
            runs.setdefault(str(one.get("region")), Counter())[int(one.get("microbatch", 0))] += 1
    for region, found in runs.items():
        if len(set(found.values())) > 1 or sorted(found) != list(range(max(found) + 1)):
            yield -1, f"{region} runs {dict(sorted(found.items()))} segments by microbatch: they must be equal"


def updated_once(program: Program) -> Iterator[Fault]:
    """Every trainable slot of a parameter is written by exactly one update; no state is written twice."""
    count: Counter[tuple[str, int]] = Counter()
    for i, one in enumerate(program.ops):
        if one.kind != "update":
            continue
        for ref in one.writes:
            buffer = program.buffers[ref.name]
            bucket = program.buckets.get(buffer.bucket or "")
            slots = (
                range(1) if bucket is None else [n for n, s in enumerate(bucket.slots) if _covers(ref, s.start, s.stop)]
            )
            for slot in slots:
                count[(ref.name, slot)] += 1
                if count[(ref.name, slot)] > 1:
                    yield i, f"updates {ref} a second time"
    if any(one.kind == "update" for one in program.ops):
        for spot in program.trainable:
            bucket_name, _, slot_text = spot.rpartition(":")
            columns = [n for n, b in program.buffers.items() if b.bucket == bucket_name and b.kind in PERSISTENT]
            if columns and not any(count[(name, int(slot_text))] for name in columns):
                path = program.buckets[bucket_name].slots[int(slot_text)].path
                yield -1, f"{path} has a gradient and is never updated"


def _covers(ref: Ref, start: int, stop: int) -> bool:
    return ref.start is None or (ref.start <= start and stop <= (ref.stop or 0))


# --- bytes and meaning ------------------------------------------------------------------------------------------------


def cap(program: Program) -> Iterator[Fault]:
    """Gathered parameters alive at one time stay under the cap."""
    if "prefetch" not in program.passes:
        return
    for i, held in enumerate(gathered_bytes(program, list(program.ops))):
        if held > program.gather_cap_bytes:
            yield i, f"{held:,} bytes are gathered at once, the cap is {program.gather_cap_bytes:,}"


class _Speaking(Abstract):
    """What a rank sends is part of its meaning: others compute with it."""

    def run(self) -> str:
        self.sent: list[tuple[str, object]] = []
        state = super().run()
        return term(state, sorted(self.sent, key=str)) if self.sent else state

    def step(self, one: Op) -> None:
        if one.kind == "send":
            self.sent.append((f"{one.axis} {one.get('peer')} {one.get('tag', 0)}", self.read(one.reads[0])))
        super().step(one)


def meaning_of(program: Program) -> str:
    """The meaning of the state that a program leaves behind and of what it sends; raises `Undefined` where none is."""
    return _Speaking(program).run()


def meaning(program: Program) -> Iterator[Fault]:
    """The state it leaves behind is what the captured step computes."""
    try:
        found = meaning_of(program)
    except Undefined as error:
        yield -1, str(error)
        return
    if found != program.meaning:
        yield -1, f"the step computes something else than what was captured ({found}, not {program.meaning})"


RULES: dict[str, Callable[[Program], Iterator[Fault]]] = {
    "lifetimes": lifetimes,
    "needed": needed,
    "partition": partition,
    "aliasing": aliasing,
    "calls": calls,
    "inside": inside,
    "transfers": transfers,
    "reduced once": reduced_once,
    "microbatches": microbatches,
    "updated once": updated_once,
    "cap": cap,
    "places": places,
    "meaning": meaning,
}


# --- all ranks --------------------------------------------------------------------------------------------------------


def _together(programs: Mapping[int, Program]) -> None:
    """All ranks issue the same collectives in the same order per axis; sends match receives."""
    issued = {rank: _collectives(program) for rank, program in programs.items()}
    first = min(issued)
    for rank, calls_ in issued.items():
        for axis in {*issued[first], *calls_}:
            ours, theirs = issued[first].get(axis, []), calls_.get(axis, [])
            for n, ((_, a), (j, b)) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    what = f"collective {n} over {axis} differs from rank {first}'s, `{a}`"
                    raise VerifyError(_message("same order", rank, programs[rank], j, what, True))
            if len(ours) != len(theirs):
                what = f"{len(theirs)} collectives over {axis}, rank {first} has {len(ours)}"
                raise VerifyError(_message("same order", rank, programs[rank], len(programs[rank].ops), what, True))
    sent: Counter[tuple[str | None, int, int, int, int]] = Counter()
    for rank, program in programs.items():
        for one in program.ops:
            if one.kind in ("send", "recv"):
                peer = int(one.get("peer"))
                ends = (rank, peer) if one.kind == "send" else (peer, rank)
                ref = (one.reads or one.writes)[0]
                size = _length(program, ref) * program.buffers[ref.name].dtype.itemsize
                sent[(one.axis, *ends, int(one.get("tag", 0)), size)] += 1 if one.kind == "send" else -1
    for (over, sender, receiver, tag, size), count in sent.items():
        if count:
            more = "sent and not received" if count > 0 else "received and not sent"
            raise VerifyError(
                f"[sends] {size} bytes from rank {sender} to {receiver} over {over} (tag {tag}) are {more}"
            )


def _collectives(program: Program) -> dict[str, list[tuple[int, str]]]:
    """By axis, each collective as text, buffers named: two of one size must not meet each other."""
    found: dict[str, list[tuple[int, str]]] = {}
    for i, one in enumerate(program.ops):
        if one.kind in ("gather", "reduce"):
            found.setdefault(str(one.axis), []).append((i, op_text(one)))
    return found
