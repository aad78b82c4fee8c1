"""abstract: runs a program on terms instead of tensors; verify compares the result with the meaning of the captured
step.
"""

from __future__ import annotations

from typing import Any

from fzero.ir import fx_nodes
from fzero.ir.collectives import Collective
from fzero.ir.mesh import DATA, parts_of, within
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import GIVEN, PERSISTENT, VARYING, Ref
from fzero.verify.abstract_memory import AbstractMemory
from fzero.verify.contents import Content, Tiles
from fzero.verify.terms import (
    NOWHERE,
    PartialTerm,
    Undefined,
    digest,
    evaluate,
    exchanged,
    gathered,
    metric,
    moved,
    reduced,
    term,
)


class Abstract(AbstractMemory):
    """A program run on terms."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.sent: list[tuple[str, object]] = []  # messages: other ranks compute with them, so they are meant too
        everywhere = frozenset(axis for axis, size in program.mesh if size > 1 and axis in DATA)
        for name, buffer in program.buffers.items():
            if buffer.kind in PERSISTENT:
                over = everywhere if buffer.kind in VARYING or buffer.per_rank else NOWHERE
                what = name
                if buffer.kind == "rank":
                    over = frozenset(a for a in parts_of(buffer.axis) if program.mesh.size(a) > 1)
                    what = f"rank:{buffer.axis}"
                keys = self._keys(buffer)
                terms = {key: term("input", program.copies.get(name, what), slot).over(over) for slot, key in keys}
                self.memory[name] = Content(terms if name not in program.copies else self.casts(name, terms))

    def run(self) -> str:
        """The meaning of the state that the program leaves behind."""
        for index, op in enumerate(self.program.ops):
            try:
                self.step(op)
            except Undefined as error:
                raise Undefined(str(error), index) from None
        kept = digest(*self.results())
        return term(kept, sorted(self.sent, key=str)) if self.sent else kept

    def results(self) -> tuple[dict[tuple[str, int | None], Any], dict[str, Any]]:
        """(the state by buffer and slot, the metrics by name), as terms, at the end. Raises `Undefined` where a part is
        missing."""
        state: dict[tuple[str, int | None], Any] = {}
        for name, buffer in self.program.buffers.items():
            if buffer.kind in PERSISTENT and buffer.kind not in GIVEN and name not in self.program.copies:
                content = self._content(name)
                for slot, key in self._keys(buffer):
                    if key in content.own_slices:
                        raise Undefined(f"{name} keeps only one rank's slice of {key}: it was not gathered")
                    state[(name, slot)] = self._term(content, key, Ref(name))
        self.check_copies()
        metrics = {name: self.program.buffers[buffer] for name, buffer in self.program.metrics.items()}
        return state, {name: metric(self.read(Ref(b.name)), b.dtype, b.shape) for name, b in metrics.items()}

    def step(self, op: Op) -> None:
        """Runs one op on terms: changes `memory`. Raises `Undefined` where the op has no meaning."""
        if op.computes:
            gm = self.program.segments[op.segment]
            num_dest = len(fx_nodes.placeholders(gm.graph)) - len(op.reads)
            dests = op.writes[len(op.writes) - num_dest :]
            values = [self.read(ref) for ref in op.reads]
            first: dict[Ref, int] = {}
            shared = {i: first[ref] for i, ref in enumerate((*op.reads, *dests)) if first.setdefault(ref, i) != i}
            outs, written = evaluate(gm, [*values, *map(self._held, dests)], shared)
            for ref, value in zip(op.writes, outs, strict=False):
                self.write(ref, value)
            for position, value in written.items():
                reads_too = position < len(op.reads)
                self.write(op.reads[position] if reads_too else dests[position - len(op.reads)], value)
        elif op.moves and op.reads[0].start is None and op.writes[0].start is None:
            self.bring(op.reads[0], op.writes[0])
        elif op.row.copies:
            self.write(op.writes[0], self.read(op.reads[0]))
        elif op.row.runs is not None:
            for i, ref in enumerate(op.writes):
                self.write(ref, term(op.kind, i, op.attrs, *map(self.read, op.reads)))
        elif (record := op.row.collective) is not None:
            self.collective(op, record)
        elif op.is_free:
            for ref in op.reads:
                self.memory.pop(ref.name, None)
        elif op.is_send:
            self.sent.append((f"{op.axis} {op.peer} {op.tag}", self.read(op.reads[0])))
        elif op.is_recv:
            over = frozenset((str(op.axis),))
            self.write(op.writes[0], term("recv", op.axis, op.peer, op.tag).over(over))
        elif not op.is_mark:
            raise Undefined(f"{op.kind} of {', '.join(map(str, op.reads))} has no meaning")

    def _held(self, ref: Ref) -> Any:
        """The term of a destination before it is written, for ops that work in place on it; `Undefined` where it holds
        nothing."""
        try:
            return self.read(ref)
        except Undefined as error:
            return error

    def collective(self, op: Op, record: Collective) -> None:
        """A transfer among the ranks of an axis: of a value that lies in parts, or of a bucket (`Collective.term`)."""
        if self.program.buffers[op.reads[0].name].bucket is None and not op.row.small:
            self.move(op)
        elif record.term == "reduced":
            self.reduce(op)
        elif record.term == "gathered":
            self.gather(op.reads[0], op.writes[0], op.axis)
        elif record.term == "exchanged":
            self.exchange(op, record)
        else:
            raise Undefined(f"{op.kind} of {', '.join(map(str, op.reads))} has no meaning")

    def move(self, op: Op) -> None:
        """A transfer of a value that lies in parts, in no bucket. Raises `Undefined` for anything but whole buffers."""
        source, dest = op.reads[0], op.writes[0]
        if op.axis is None or op.axis not in self.program.mesh:
            raise Undefined(f"there is no axis {op.axis!r}")
        if source.start is not None or dest.start is not None or self.program.buffers[dest.name].bucket is not None:
            raise Undefined(f"a {op.kind} of a value takes all of it to a value, not {source} to {dest}")
        for scratch in op.writes[1:]:
            self.memory.pop(scratch.name, None)
        world = self.program.mesh.size(op.axis)
        if op.divisor != 1 or (op.reduction != "sum" and op.kind != "all_reduce"):
            raise Undefined(f"a {op.kind} of a value takes a {op.reduction} divided by {op.divisor}")
        self.write(dest, moved(op.kind, self.read(source), op.axis, world, op.reduction))

    def bring(self, source: Ref, dest: Ref) -> None:
        """All of a buffer is moved to one of its form. Raises `Undefined` where they are not of one form."""
        a, b = self.program.buffers[source.name], self.program.buffers[dest.name]
        forms = [(x.bucket, x.sharded, x.per, x.parts, x.tile, x.numel) for x in (a, b)]
        if forms[0] != forms[1]:
            raise Undefined(f"{source.name} and {dest.name} do not have the same leaves at the same places")
        held = self._content(source.name)
        content = self.memory[dest.name] = Content(held.terms)
        content.own_slices = set(held.own_slices)

    def gather(self, source: Ref, dest: Ref, axis: str | None) -> None:
        """`dest` becomes all of the bucket whose own slice `source` is.

        Raises `Undefined` for anything but a whole slice, and for a value that differs between ranks: its slices,
        gathered, are no rank's value.
        """
        if axis is None or axis not in self.program.mesh:
            raise Undefined(f"there is no axis {axis!r}")
        origin, buffer = self.program.buffers[source.name], self.program.buffers[dest.name]
        bucket = self._bucket(origin)
        whole = source.start is None or (source.start, source.stop) == (0, bucket.length)
        if not whole or dest.start is not None or within(self.program.cut(source), buffer.sharded) != axis:
            raise Undefined(f"a gather takes a whole slice to what it is a slice of, not {source} to {dest}")
        if (buffer.bucket, buffer.per, buffer.parts, origin.parts) != (origin.bucket, origin.per, 1, 1):
            raise Undefined(f"{source.name} and {dest.name} are of different buckets")
        content = self._content(source.name)
        held = content.terms
        if buffer.tile or origin.tile or any(isinstance(value, Tiles) for value in held.values()):
            raise Undefined(f"{source} is gathered, of which only tiles are there")
        if content.own_slices and self.program.cut(source) == origin.sharded:
            raise Undefined(f"{source} is gathered, of which only a part was written")
        if held and all(value.varies & {*parts_of(axis)} for value in held.values()):
            raise Undefined(f"{source} differs from rank to rank: its slices, gathered, are no rank's value")
        self.memory[dest.name] = Content({key: gathered(value, axis) for key, value in held.items()})

    def exchange(self, op: Op, record: Collective) -> None:
        """The target becomes the source of every rank, or the own slice of it, a stretch for each.

        Raises `Undefined` where source and target do not fit.
        """
        source, dest = op.reads[0], op.writes[0]
        buffer, target = self.program.buffers[source.name], self.program.buffers[dest.name]
        if op.axis is None or op.axis not in self.program.mesh:
            raise Undefined(f"there is no axis {op.axis!r}")
        world, content = self.program.mesh.size(op.axis), self._content(source.name)
        if source.start is not None or dest.start is not None or content.own_slices or buffer.tile or target.tile:
            raise Undefined(f"an exchange takes a whole bucket, not {source} to {dest}")
        if any(isinstance(value, (PartialTerm, Tiles)) for value in content.terms.values()):
            raise Undefined(f"{source} is exchanged, of which only a part is there")
        forms = (buffer.bucket, buffer.per, 1, world, op.axis if record.source == "whole" else "", 1)
        cut = within(target.sharded, buffer.sharded)
        if forms != (target.bucket, target.per, buffer.parts, target.parts, cut, op.divisor):
            raise Undefined(f"{source} and {dest} do not fit: {op.kind} over {op.axis}")
        if {*parts_of(op.axis)} & {*parts_of(buffer.sharded)}:
            raise Undefined(f"{source} is a slice along {buffer.sharded}: over {op.axis} other slices would meet")
        self.memory[dest.name] = Content({k: exchanged(v, op.axis, world) for k, v in content.terms.items()})

    def reduce(self, op: Op) -> None:
        """The target becomes the sum over the ranks of the source, or the largest; whole, or the own slice of it.

        Raises `Undefined` where source and target do not fit the kind.
        """
        source, dest = op.reads[0], op.writes[0]
        if op.axis is None or op.axis not in self.program.mesh:
            raise Undefined(f"there is no axis {op.axis!r}")
        world = self.program.mesh.size(op.axis)
        for scratch in op.writes[1:]:
            self.memory.pop(scratch.name, None)

        def over(value: Any) -> Any:
            how, divisor = op.reduction, op.divisor
            if isinstance(value, PartialTerm):
                if (how, divisor) != ("sum", 1) or {*parts_of(op.axis)} != {*parts_of(value.axis)}:
                    raise Undefined(f"a sum over slices along {value.axis} must be summed over that axis, once")
                return gathered(value.of, op.axis or "")
            return reduced(value, how, op.axis or "", world, divisor)

        buffer, target = self.program.buffers[source.name], self.program.buffers[dest.name]
        if op.row.small:
            if source.start is not None:
                self.write(dest, over(self.read(source)))
                return
            content = self._content(source.name)
            self.memory[dest.name] = Content({k: over(v) for k, v in content.terms.items()})
            return
        content = self._content(source.name)
        tiled = buffer.tile or target.tile or any(isinstance(value, Tiles) for value in content.terms.values())
        tiled = tiled or buffer.parts > 1 or target.parts > 1
        if source.start is not None or dest.start is not None or content.own_slices or tiled:
            raise Undefined(f"a reduction takes a whole bucket, not {source} to {dest}")
        cut = within(target.sharded, buffer.sharded)
        if buffer.bucket != target.bucket or cut != (op.axis if op.row.scatters else ""):
            raise Undefined(f"{source} and {dest} do not fit: {op.kind}")
        if {*parts_of(op.axis)} & {*parts_of(buffer.sharded)}:
            raise Undefined(f"{source} is a slice along {buffer.sharded}: over {op.axis} other slices would be added")
        self.memory[dest.name] = Content({k: over(v) for k, v in content.terms.items()})


def program_meaning(program: Program) -> str:
    """The meaning of the state that a program leaves behind, and of the messages it sends.

    Raises `Undefined` where it has none.
    """
    return Abstract(program).run()
