"""assign_roles: the role or roles that run each op, and when: what `by_role` makes programs of.

Work of a region goes by its chunk (`chunks`), a gradient's sum or an update by its bucket, a small value where its
inputs are, or wherever it is read. An op on buckets of several roles is cut by its results. A leaf that another role
uses is copied for it before the regions, and its gradient copied into its bucket after the region; or the last work on
that gradient is done there, where this sends less (`last_work`). Of a buffer that roles write in parts, such as the
terms of a norm, each role sends its part to the others before the first read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fzero.errors import SpecError
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Buffer, Ref
from fzero.passes.pipeline.chunks import pieces
from fzero.passes.pipeline.last_work import At, by_home
from fzero.passes.pipeline.region_parts import RegionParts, region_parts
from fzero.passes.pipeline.split_backward import Halves
from fzero.pipeline import FORWARD, Action, Schedule

aten = torch.ops.aten
LATE = 2.0  # times of an action

Group = tuple[int, Action | None]  # (how many regions began before, the action; None: outside of regions)
Draft = tuple[Op, Group, frozenset[int] | None]  # None: the roles follow from who reads its results


class AcrossRolesError(SpecError):
    """A value, outside of the regions, that no role can make alone."""


@dataclass(frozen=True)
class RoleWork:
    """An op, when it runs, and the roles that run it."""

    op: Op
    group: Group
    roles: frozenset[int]


@dataclass
class Assigned:
    """The ops of a program with their roles. Only its methods write the other fields."""

    program: Program
    schedule: Schedule
    works: list[RoleWork] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)
    lent: dict[str, RoleWork] = field(default_factory=dict)  # copies of leaves for other roles, by the copy's name
    from_batch: set[str] = field(default_factory=set)  # values that follow from the batch alone
    makers: dict[str, int] = field(default_factory=dict)  # of values of regions, the role
    regions: RegionParts = field(default_factory=RegionParts)
    late: set[str] = field(default_factory=set)  # terms of gradients that are made where the leaf is kept
    parts: dict[tuple[object, ...], Halves | None] = field(default_factory=dict)  # of runs whose last work may move
    copies: dict[tuple[object, ...], fx.GraphModule] = field(default_factory=dict)  # by dtype and shapes

    @property
    def everywhere(self) -> frozenset[int]:
        return frozenset(range(self.schedule.roles))

    def place(self) -> None:
        """Gives every op its roles and its group."""
        self.buffers = dict(self.program.buffers)
        found = pieces(self.program)
        read_in: dict[str, set[int]] = defaultdict(set)  # of each buffer, the chunks that read it
        for number, piece in found.items():
            for ref in self.program.ops[number].reads:
                read_in[ref.name].add(piece.chunk)
        self.regions = parts = region_parts(self.program, self.schedule, found, self._role)
        self.buffers |= parts.buffers
        self.segments |= parts.segments
        regions: list[str] = []
        drafts: list[Draft] = []
        group: Group
        started: dict[str, Group] = {}  # of each transfer of a region's values
        for number, op in enumerate(self.program.ops):
            if op.in_region and op.region not in regions:
                regions.append(str(op.region))
            if number not in found:
                group = (len(regions), None)
                drafts += [(part, group, roles) for part, roles in self._outer(op)]
                continue
            piece = found[number]
            role = self.schedule.role_of[piece.chunk]
            if op.is_wait:
                drafts.append((op, started[op.target], frozenset({role})))
                continue
            index = regions.index(str(op.region)) + 1
            for part, kind in parts.each[number]:
                action = Action(kind, piece.chunk, op.microbatch)
                for run, home in self._last_work(part, role):
                    here, back = self._at_home(run, home)
                    group = (index, action if home == role else self.schedule.after(action, home, LATE))
                    drafts.append((here, group, frozenset({home})))
                    drafts += [(copy, (index, None), frozenset({to})) for copy, to in back]
                    self.makers.update(dict.fromkeys((ref.name for ref in here.writes), home))
                    self.late |= {ref.name for ref in here.writes if home != role}
                started |= {op.target: (index, action)} if op.transfers else {}
            if piece.forward and op.computes:
                drafts += self._made_anew(op, index, role, read_in)
        first = next(i for i, (_, group, _) in enumerate(drafts) if group[1] is not None)
        lent = [(work.op, work.group, work.roles) for work in self.lent.values()]
        self.works = _demanded(self.program, self.buffers, self.everywhere, [*drafts[:first], *lent, *drafts[first:]])
        self._exchange()

    def _last_work(self, op: Op, role: int) -> Iterator[tuple[Op, int]]:
        """A region's op as those that its role runs, and others for it, where they write gradients of their leaves."""

        def at(ref: Ref, home: int) -> At:
            known, maker, kept = self._is_known(ref.name), self.makers.get(ref.name), self._role(ref)
            here = known or maker == role or kept is not None or self.regions.num_reads[ref.name, role] > 1
            return At(here, known or home in (kept, maker), ref.name in self.late)

        def keeps(ref: Ref) -> int | None:
            return self.regions.bound.get(ref.name, self._role(ref))

        gm = (self.segments.get(op.segment) or self.program.segments[op.segment]) if op.computes else None
        for split, part, home in by_home(op, role, gm, keeps, at, self.parts):
            self.buffers |= split.buffers
            self.segments |= split.segments
            yield part, home

    def _made_anew(self, op: Op, index: int, role: int, read_in: Mapping[str, set[int]]) -> list[Draft]:
        """Runs of what other roles read of a forward op, where it follows from the batch alone (masks, positions,
        angles): each such role makes it for itself, and nothing is sent."""
        gm = self.program.segments[op.segment]
        inputs = fx_nodes.placeholders(gm.graph)[: len(op.reads)]
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        known = {node for node, ref in zip(inputs, op.reads, strict=True) if self._is_known(ref.name)}
        outs = list(zip(op.writes[: op.num_outputs], fx_nodes.outputs(gm.graph), strict=True))
        needs = {ref: fx_nodes.ancestors(node) for ref, node in outs}
        plain = {ref: node for ref, node in outs if needs[ref] & set(inputs) <= known}
        self.from_batch |= {ref.name for ref in plain}
        drafts: list[Draft] = []
        chunks: dict[int, dict[Ref, int]] = defaultdict(dict)  # by role, of each value the first chunk that reads it
        for ref in plain:
            for chunk in sorted(read_in[ref.name], reverse=True):
                chunks[self.schedule.role_of[chunk]][ref] = chunk
        for other, refs in chunks.items():
            if other == role:
                continue
            nodes = set().union(*(needs[ref] for ref in refs))
            used = [i for i, node in enumerate(inputs) if node in nodes]
            body = sorted((n for n in nodes if n.op == "call_function"), key=order.__getitem__)
            cut = segments.extract(body, [inputs[i] for i in used], [plain[ref] for ref in refs])
            first = min(refs.values())
            run = rewrite.run_op(op, cut, [op.reads[i] for i in used], list(refs)).with_attrs(chunk=first)
            self.segments[run.segment] = cut
            drafts.append((run, (index, Action(FORWARD, first, op.microbatch)), frozenset({other})))
        return drafts

    def _is_known(self, name: str) -> bool:
        """Whether every role has a value, or can make it: of the batch, and of state in no bucket."""
        buffer = self.buffers[name]
        return name in self.from_batch or (buffer.kind in PERSISTENT and buffer.bucket is None)

    def _role(self, ref: Ref) -> int | None:
        """The role that keeps the bucket of a reference."""
        bucket = self.buffers[ref.name].bucket
        return None if bucket is None else self.program.buckets[bucket].role

    def _at_home(self, op: Op, role: int) -> tuple[Op, list[tuple[Op, int]]]:
        """(a region's op on its role, copies of gradients into buckets of other roles, each with its role).

        Leaves of other roles are read from a copy, and their gradients written to one. After the region the role that
        keeps the leaf copies the gradient into its bucket.
        """
        reads, writes = list(op.reads), list(op.writes)
        back: list[tuple[Op, int]] = []
        for position, ref in enumerate(op.reads):
            if self._role(ref) in (None, role):
                continue
            name = f"{ref.name}.lent{ref.start}"
            reads[position] = Ref(name)
            if name not in self.lent:
                dtype = self.buffers[ref.name].dtype
                self.buffers[name] = Buffer(name, dtype, ref.shape or (), "activation", lent=ref.name)
                copy = self._copy(Op("run"), [ref], [Ref(name)], f"for role {role}: {op.why}")
                self.lent[name] = RoleWork(copy, (0, None), frozenset({self._role(ref) or 0}))
        for position, ref in enumerate(op.writes):
            home = self._role(ref)
            if home in (None, role):
                continue
            name = f"{ref.name}.back{ref.start}"
            like = self.buffers[ref.name]
            self.buffers[name] = Buffer(name, like.dtype, ref.shape or (), "activation")
            writes[position] = Ref(name)
            copy = self._copy(op, [Ref(name)], [ref], f"of the role that uses it: {op.why}")
            back.append((copy, home or 0))
        return replace(op, reads=tuple(reads), writes=tuple(writes)), back

    def _copy(self, like: Op, sources: Sequence[Ref], targets: Sequence[Ref], why: str) -> Op:
        """A run that copies references to others, of equal shapes."""
        shapes = [source.shape if source.shape is not None else target.shape
                  for source, target in zip(sources, targets, strict=True)]  # fmt: skip
        dtype = self.buffers[sources[0].name].dtype
        form = dtype, *(tuple(shape or ()) for shape in shapes)
        if form not in self.copies:
            likes = (torch.empty(shape or (), dtype=dtype, device="meta") for shape in shapes)
            self.copies[form] = segments.copy_segment(*likes)
        gm = self.copies[form]
        copy = rewrite.run_op(like, gm, sources, targets)
        self.segments[copy.segment] = gm
        return replace(copy, why=why)

    def _outer(self, op: Op) -> list[tuple[Op, frozenset[int] | None]]:
        """An op outside of regions, with its roles where its buckets say them."""
        roles = {role for ref in (*op.reads, *op.writes) if (role := self._role(ref)) is not None}
        if len(roles) < 2:
            return [(op, frozenset(roles) or None)]
        return [(part, frozenset({role})) for part, role in self._by_results(op)]

    def _by_results(self, op: Op) -> list[tuple[Op, int]]:
        """A run on buckets of several roles as one run for each. Raises SpecError where one result needs several."""
        if not op.computes:
            raise SpecError(f"`{op.why}` moves leaves of several roles of the pipeline at once")
        gm = self.program.segments[op.segment]
        holders = fx_nodes.placeholders(gm.graph)
        inputs, dests = holders[: len(op.reads)], holders[len(op.reads) :]
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        copied = {n.args[0]: fx_nodes.operand(n, 1) for n in gm.graph.nodes if n.target is aten.copy_.default}
        results = [*fx_nodes.outputs(gm.graph), *(copied[dest] for dest in dests)]  # as `op.writes`
        needs = [fx_nodes.ancestors(node) for node in results]
        by_role: dict[int, list[int]] = defaultdict(list)
        for number, nodes in enumerate(needs):
            refs = [op.reads[i] for i, node in enumerate(inputs) if node in nodes] + [op.writes[number]]
            roles = {role: ref for ref in refs if (role := self._role(ref)) is not None}
            if len(roles) > 1:
                raise _across(op, roles, self.program)
            by_role[min(roles, default=0)].append(number)
        parts = []
        for role, numbers in sorted(by_role.items()):
            nodes = set().union(*(needs[n] for n in numbers))
            used = [i for i, node in enumerate(inputs) if node in nodes]
            body = sorted((n for n in nodes if n.op == "call_function"), key=order.__getitem__)
            into = [n for n in numbers if n >= op.num_outputs]
            fresh = [n for n in numbers if n < op.num_outputs]
            cut = segments.extract(
                body,
                [inputs[i] for i in used],
                [results[n] for n in (*into, *fresh)],
                [dests[n - op.num_outputs] for n in into],
            )
            part = rewrite.run_op(op, cut, [op.reads[i] for i in used], [op.writes[n] for n in (*fresh, *into)])
            part = replace(part, kind=op.kind)
            part = part.with_attrs(flat=1) if op.is_flat else part
            self.segments[part.segment] = cut
            parts.append((part, role))
        return parts

    def _exchange(self) -> None:
        """A buffer that several roles write in parts, such as the terms of a norm: before it is first read, each role
        sends its part to every other that reads, in a buffer of its own for each."""
        written: dict[str, dict[int, list[Ref]]] = defaultdict(lambda: defaultdict(list))
        makers: dict[str, frozenset[int]] = defaultdict(frozenset)
        reads: dict[str, list[int]] = defaultdict(list)
        for number, work in enumerate(self.works):
            for ref in work.op.reads if not work.op.is_mark else ():
                reads[ref.name].append(number)
            for ref in work.op.writes:
                makers[ref.name] |= work.roles
                if ref.start is not None and self.buffers[ref.name].bucket is None and len(work.roles) == 1:
                    written[ref.name][next(iter(work.roles))].append(ref)
        before: dict[int, list[RoleWork]] = defaultdict(list)
        for name, parts in written.items():
            if len(makers[name]) == 1 or not reads[name]:
                continue
            first = reads[name][0]
            receivers = sorted(frozenset().union(*(self.works[i].roles for i in reads[name])))
            pairs = [(maker, receiver) for maker in sorted(parts) for receiver in receivers if maker != receiver]
            packets = [self._packet(name, parts[maker], maker, to, self.works[first]) for maker, to in pairs]
            before[first] += [there for there, _ in packets]  # all parts leave before any is awaited
            before[first] += [here for _, here in packets]
        self.works = [each for i, work in enumerate(self.works) for each in (*before[i], work)]

    def _packet(
        self, name: str, refs: Sequence[Ref], maker: int, receiver: int, reader: RoleWork
    ) -> tuple[RoleWork, RoleWork]:
        """(the copy into a buffer that travels, the copy out of it) of one role's part of a buffer."""
        packet = f"{name}.{maker}to{receiver}"
        size = sum((ref.stop or 0) - (ref.start or 0) for ref in refs)
        self.buffers[packet] = Buffer(packet, self.buffers[name].dtype, (size,), "scratch")
        places = _in_a_row(packet, refs)
        there = self._copy(Op("run"), refs, places, f"for role {receiver}: {reader.op.why}")
        here = self._copy(Op("run"), places, refs, f"of role {maker}: {reader.op.why}")
        return RoleWork(there, reader.group, frozenset({maker})), RoleWork(here, reader.group, frozenset({receiver}))


def _demanded(
    program: Program, buffers: Mapping[str, Buffer], everywhere: frozenset[int], drafts: Sequence[Draft]
) -> list[RoleWork]:
    """Every draft with roles: one without buckets runs where its inputs were made, if that is one role, else on
    every role that reads its result. State that is in no bucket is updated on every role."""
    wanted: dict[str, frozenset[int]] = defaultdict(frozenset)
    for name in program.metrics.values():
        wanted[name] = everywhere
    readers: list[frozenset[int]] = []
    for op, _, roles in reversed(drafts):
        if roles is None:
            roles = frozenset().union(*(wanted[ref.name] for ref in (op.writes or op.reads)))
            if any(buffers[ref.name].kind in PERSISTENT for ref in op.writes):
                roles = everywhere
        readers.append(roles)
        for ref in op.reads:
            wanted[ref.name] |= roles
    home: dict[str, frozenset[int]] = {}
    works = []
    for (op, group, fixed), roles in zip(drafts, reversed(readers), strict=True):
        if fixed is None and not any(buffers[ref.name].kind in PERSISTENT for ref in op.writes):
            sources = [home[ref.name] for ref in op.reads if ref.name in home]
            single = frozenset().union(*(source for source in sources if source != everywhere))
            roles = single if len(single) == 1 else roles
        if op.is_wait:
            roles = home.get(op.target, roles)
        for ref in op.writes:
            home[ref.name] = home.get(ref.name, frozenset()) | roles
        works.append(RoleWork(op, group, roles))
    return works


def _across(op: Op, of_roles: Mapping[int, Ref], program: Program) -> AcrossRolesError:
    """The error about an op that needs leaves of these roles, each a reference into a bucket's buffer."""

    def leaf(ref: Ref) -> str:
        bucket = program.buckets[str(program.buffers[ref.name].bucket)]
        return next((slot.path for slot in bucket.slots if slot.stop > (ref.start or 0)), ref.name)

    named = " and ".join(f"{leaf(ref)} of role {role}" for role, ref in sorted(of_roles.items()))
    return AcrossRolesError(
        f"`{op.why}` needs leaves of several roles of the pipeline for one value: {named}. Only sums over leaves, such "
        "as x.square().sum() of each for a norm, are taken apart by role. Write such a sum, make it of leaves of one "
        "role, put these on one (Pipeline(cut=...); without a number in its path a leaf named as an embedding is on "
        "the first role, another on the last), or leave the axis `pp` out"
    )


def _in_a_row(name: str, refs: Sequence[Ref]) -> list[Ref]:
    """References of these sizes and shapes to a buffer, one after another."""
    places, end = [], 0
    for ref in refs:
        size = (ref.stop or 0) - (ref.start or 0)
        places.append(Ref(name, end, end + size, ref.shape))
        end += size
    return places
