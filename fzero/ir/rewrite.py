"""rewrite: helpers of passes: finding the ops that read or write a buffer, renaming references, and `Edits`, ops put
before, behind or in the place of others. Nothing here decides."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import fx

from fzero.ir import fx_nodes, segments
from fzero.ir.op import Op
from fzero.ir.program import Level, Program
from fzero.ir.records import PERSISTENT, Buffer, Ref


def finish(
    program: Program,
    name: str,
    *,
    ops: Iterable[Op],
    buffers: Mapping[str, Buffer] | None = None,
    new_segments: Mapping[str, fx.GraphModule] | None = None,
    level: Level = Level.NAIVE,
) -> Program:
    """The program with these ops, without the buffers and segments that no op names any more, `name` noted as run.
    level: that the pass reaches, if it makes anything final."""
    ops = tuple(ops)
    named = {ref.name for op in ops for ref in op.reads} | {ref.name for op in ops for ref in op.writes}
    named |= set(program.metrics.values())
    every = program.buffers if buffers is None else buffers
    kept = {n: b for n, b in every.items() if n in named or b.kind in PERSISTENT}
    used = {op.segment for op in ops if op.segment}
    pool = {**program.segments, **(new_segments or {})}
    return replace(
        program,
        ops=ops,
        buffers=kept,
        segments={key: gm for key, gm in pool.items() if key in used},
        passes=(*program.passes, name),
        level=max(program.level, level),
    )


def reads_of(ops: Iterable[Op]) -> dict[str, list[tuple[int, Ref]]]:
    """(op number, reference) of every real read of a buffer, by its name: a wait or a free of it is none."""
    return _by_name((i, ref) for i, op in enumerate(ops) if not op.is_mark for ref in op.reads)


def writes_of(ops: Iterable[Op]) -> dict[str, list[tuple[int, Ref]]]:
    """(op number, reference) of every write to a buffer, by its name."""
    return _by_name((i, ref) for i, op in enumerate(ops) for ref in op.writes)


def reason_for(op: Op, buffers: Mapping[str, Buffer]) -> str:
    """Why an op's operand is brought: for the op, or for what a gather or a copy for another role serves itself."""
    lends = any(buffers[ref.name].lent is not None for ref in op.writes)
    serves = op.gathers and buffers[op.target].kind == "gathered"
    return op.why if serves or lends else f"for {op.why}"


def _by_name(refs: Iterable[tuple[int, Ref]]) -> dict[str, list[tuple[int, Ref]]]:
    refs_of: dict[str, list[tuple[int, Ref]]] = {}
    for index, ref in refs:
        refs_of.setdefault(ref.name, []).append((index, ref))
    return refs_of


def renamed(op: Op, change: Callable[[Ref], Ref]) -> Op:
    """The op with every reference changed."""
    return replace(op, reads=tuple(map(change, op.reads)), writes=tuple(map(change, op.writes)))


def moved(op: Op, names: Mapping[str, str]) -> Op:
    """The op on other buffers: those that `names` has for its own."""
    if not names or names.keys().isdisjoint(ref.name for ref in (*op.reads, *op.writes)):
        return op
    return renamed(op, lambda ref: replace(ref, name=names[ref.name]) if ref.name in names else ref)


@dataclass
class Edits:
    """What a pass does to ops, by their numbers: it fills the fields, and `apply` makes the program.

    before, after: ops put there, in this order; `before[len(ops)]` comes behind the last op. instead: what takes the
    place of an op; an empty one drops it. rename: of an op, or of what takes its place, buffers by their other names.
    buffers, segments: those that are new, or that replace others.
    """

    before: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    instead: dict[int, Sequence[Op]] = field(default_factory=dict)
    rename: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    buffers: dict[str, Buffer] = field(default_factory=dict)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)

    def spliced(self, ops: Sequence[Op]) -> list[Op]:
        """The ops with these edits."""
        edited: list[Op] = []
        for index, op in enumerate(ops):
            edited += self.before.get(index, ())
            edited += [moved(each, self.rename.get(index, {})) for each in self.instead.get(index, (op,))]
            edited += self.after.get(index, ())
        return [*edited, *self.before.get(len(ops), ())]

    def apply(
        self, program: Program, name: str, ops: Sequence[Op] | None = None, level: Level = Level.NAIVE
    ) -> Program:
        """The program with these edits, `name` noted as run. ops: those that the numbers count, if not its own."""
        return finish(
            program, name, ops=self.spliced(program.ops if ops is None else ops),
            buffers={**program.buffers, **self.buffers}, new_segments=self.segments, level=level,
        )  # fmt: skip


class Spans:
    """References, sorted by name and range, so that those which overlap another are found without a look at each."""

    def __init__(self, refs: Iterable[Ref]) -> None:
        self.refs = tuple(refs)
        numbers: dict[str, list[int]] = {}
        for number, ref in enumerate(self.refs):
            numbers.setdefault(ref.name, []).append(number)
        # by name: the references in order, where each begins, and how far it or one before it reaches
        self.by_name: dict[str, tuple[list[int], list[float], list[float]]] = {}
        for name, own in numbers.items():
            own.sort(key=lambda number: _ends(self.refs[number])[0])
            ends = [_ends(self.refs[number]) for number in own]
            self.by_name[name] = own, [low for low, _ in ends], list(accumulate((high for _, high in ends), max))

    def over(self, ref: Ref) -> list[int]:
        """The positions of the references that `ref` may share elements with."""
        own, lows, reach = self.by_name.get(ref.name, ((), (), ()))
        low, high = _ends(ref)
        overlapping = []
        position = bisect_left(lows, high)
        while position and reach[position - 1] > low:
            position -= 1
            if ref.overlaps(self.refs[own[position]]):
                overlapping.append(own[position])
        return sorted(overlapping)


def _ends(ref: Ref) -> tuple[float, float]:
    return (-math.inf, math.inf) if ref.start is None else (ref.start, ref.stop or 0)


def run_op(
    like: Op,
    gm: fx.GraphModule,
    reads: Iterable[Ref],
    writes: Iterable[Ref],
    **attrs: int | str,
) -> Op:
    """A run of a segment in the place of `like`: its `segment` is the digest of `gm`."""
    reads, writes = tuple(reads), tuple(writes)
    key = segments.digest(gm)
    num_outputs = len(writes) - (len(fx_nodes.placeholders(gm.graph)) - len(reads))
    kept = {k: v for k, v in like.attrs if k not in ("segment", "fresh", "flat")}
    done = replace(like, kind="run", reads=reads, writes=writes, attrs=())
    return done.with_attrs(**kept, segment=key, **({"fresh": num_outputs} if num_outputs else {}), **attrs)
