"""by_role: the step's program, cut into one for each role of a pipeline.

Each op gets the role or roles that run it: work of a region by its chunk (`chunks`), a gradient's sum or an update by
its bucket, and a small value where its inputs are, or wherever it is read. An op on buckets of several roles is cut by
its results. A role runs its region work in the order of the schedule, and a value that one role makes and another reads
becomes `send`, `recv` and `wait`.

    run x w0 -> x1;  run x1 w1 -> x2        with w0 on role 0 and w1 on role 1 becomes
    role 0: run x w0 -> x1;  send x1; wait x1        role 1: recv x1; wait x1;  run x1 w1 -> x2

A leaf that another role uses is sent to it once a step; its gradient is sent back for every microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fzero.errors import SpecError
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Buffer, Op, Ref, make_op
from fzero.passes.pipeline.chunks import pieces
from fzero.passes.pipeline.split_backward import Halves, split_backward
from fzero.pipeline import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule

AXIS = "pp"
aten = torch.ops.aten

Group = tuple[int, Action | None]  # (how many regions began before, the action; None: outside of regions)


@dataclass(frozen=True)
class Work:
    """An op, when it runs, and the roles that run it."""

    op: Op
    group: Group
    roles: frozenset[int]


def by_role(program: Program, schedule: Schedule, chunk_of: Mapping[str, int]) -> dict[int, Program]:
    """The programs of all roles. `chunk_of`: of each bucket of a numbered layer, its chunk.

    Raises SpecError where the cut does not follow the step, or an op needs leaves of several roles at once.
    """
    cut = _Cut(program, schedule, chunk_of)
    cut.place()
    messages = _messages(cut)
    builders = [_RoleBuilder(cut, messages, role) for role in range(schedule.roles)]
    received = {message: time for builder in builders for message, time in builder.receives().items()}
    return {builder.role: builder.program(received) for builder in builders}


@dataclass
class _Cut:
    """The ops of a program with their roles. `place` fills works, buffers, segments, lent and returned."""

    program: Program
    schedule: Schedule
    chunk_of: Mapping[str, int]
    works: list[Work] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)
    lent: dict[str, Work] = field(default_factory=dict)  # copies of leaves for other roles, by the copy's name

    @property
    def everywhere(self) -> frozenset[int]:
        return frozenset(range(self.schedule.roles))

    def place(self) -> None:
        """Gives every op its roles and its group."""
        self.buffers = dict(self.program.buffers)
        found = pieces(self.program, self.chunk_of)
        known: dict[str, Halves] = {}
        regions: list[str] = []
        drafts: list[tuple[Op, Group, frozenset[int] | None]] = []
        for number, op in enumerate(self.program.ops):
            if op.phase == "region" and op.region not in regions:
                regions.append(str(op.region))
            if number not in found:
                group: Group = (len(regions), None)
                drafts += [(part, group, roles) for part, roles in self._outer(op)]
                continue
            piece = found[number]
            role = self.schedule.role_of[piece.chunk]
            index = regions.index(str(op.region)) + 1
            for part, kind in self._halves(op, piece.forward, known):
                group = (index, Action(kind, piece.chunk, op.microbatch))
                drafts += [(each, group, roles) for each, roles in self._at_home(part, role)]
        first = next(i for i, (_, group, _) in enumerate(drafts) if group[1] is not None)
        lent = [(work.op, work.group, work.roles) for work in self.lent.values()]
        self.works = self._demanded([*drafts[:first], *lent, *drafts[first:]])
        self._exchange()

    def _halves(self, op: Op, forward: bool, known: dict[str, Halves]) -> list[tuple[Op, str]]:
        if forward:
            return [(op, FORWARD)]
        if not self.schedule.splits:
            return [(op, BACKWARD)]
        split = split_backward(self.program, op, known)
        self.buffers |= split.buffers
        self.segments |= split.segments
        return [(part, kind) for part, kind in ((split.first, INPUT), (split.second, WEIGHT)) if part is not None]

    def _role(self, ref: Ref) -> int | None:
        """The role that keeps the bucket of a reference."""
        bucket = self.buffers[ref.name].bucket
        return None if bucket is None else self.program.buckets[bucket].role

    def _at_home(self, op: Op, role: int) -> list[tuple[Op, frozenset[int]]]:
        """A region's op on its role. Leaves of other roles are read from a copy, and their gradients written to one,
        which the other role adds to its bucket's."""
        reads, writes, back = list(op.reads), list(op.writes), []
        for position, ref in enumerate(op.reads):
            if self._role(ref) in (None, role):
                continue
            name = f"{ref.name}.lent{ref.start}"
            reads[position] = Ref(name)
            if name not in self.lent:
                self.buffers[name] = Buffer(name, self.buffers[ref.name].dtype, ref.shape or (), "activation")
                copy = self._copy(Op("run"), [ref], [Ref(name)], f"for role {role}: {op.why}")
                self.lent[name] = Work(copy, (0, None), frozenset({self._role(ref) or 0}))
        for position, ref in enumerate(op.writes):
            home = self._role(ref)
            if home in (None, role):
                continue
            name = f"{ref.name}.back{ref.start}"
            like = self.buffers[ref.name]
            self.buffers[name] = Buffer(name, like.dtype, ref.shape or (), "activation")
            writes[position] = Ref(name)
            copy = self._copy(op, [Ref(name)], [ref], f"of the role that uses it: {op.why}")
            back.append((copy, frozenset({home or 0})))
        here = replace(op, reads=tuple(reads), writes=tuple(writes))
        return [(here, frozenset({role})), *back]

    def _copy(self, like: Op, sources: Sequence[Ref], targets: Sequence[Ref], why: str) -> Op:
        """A run that copies references to others, of equal shapes."""
        shapes = [source.shape if source.shape is not None else target.shape
                  for source, target in zip(sources, targets, strict=True)]  # fmt: skip
        dtype = self.buffers[sources[0].name].dtype
        gm = segments.copy_segment(*(torch.empty(shape or (), dtype=dtype, device="meta") for shape in shapes))
        copy = rewrite.run_op(like, gm, sources, targets)
        self.segments[copy.segment] = gm
        return replace(copy, why=why)

    def _outer(self, op: Op) -> list[tuple[Op, frozenset[int] | None]]:
        """An op outside of regions, with its roles where its buckets say them."""
        roles = {role for ref in (*op.reads, *op.writes) if (role := self._role(ref)) is not None}
        if not roles:
            return [(op, None)]
        if len(roles) == 1:
            return [(op, frozenset(roles))]
        return [(part, frozenset({role})) for part, role in self._by_results(op)]

    def _by_results(self, op: Op) -> list[tuple[Op, int]]:
        """A run on buckets of several roles as one run for each: its results are in destinations, each of one role."""
        gm = self.program.segments[op.segment] if op.computes else None
        if gm is None or op.num_outputs:
            raise SpecError(
                f"`{op.why}` needs leaves of several roles of the pipeline at once. Only sums over leaves, such as a "
                "norm, can be cut"
            )
        holders = fx_nodes.placeholders(gm.graph)
        inputs, dests = holders[: len(op.reads)], holders[len(op.reads) :]
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        value_of = {
            fx_nodes.operand(n): fx_nodes.operand(n, 1) for n in gm.graph.nodes if n.target is aten.copy_.default
        }
        by_role: dict[int, list[int]] = defaultdict(list)
        needs = [_ancestors(value_of[dest]) for dest in dests]
        for number, nodes in enumerate(needs):
            refs = [op.reads[i] for i, node in enumerate(inputs) if node in nodes] + [op.writes[number]]
            roles = {role for ref in refs if (role := self._role(ref)) is not None}
            if len(roles) != 1:
                raise SpecError(f"`{op.why}` needs leaves of roles {sorted(roles)} of the pipeline for one result")
            by_role[roles.pop()].append(number)
        parts = []
        for role, numbers in sorted(by_role.items()):
            nodes = set().union(*(needs[n] for n in numbers))
            used = [i for i, node in enumerate(inputs) if node in nodes]
            body = sorted((n for n in nodes if n.op == "call_function"), key=order.__getitem__)
            cut = segments.extract(
                body, [inputs[i] for i in used], [value_of[dests[n]] for n in numbers], [dests[n] for n in numbers]
            )
            part = rewrite.run_op(op, cut, [op.reads[i] for i in used], [op.writes[n] for n in numbers])
            part = replace(part, kind=op.kind)
            part = part.with_attrs(flat=1) if op.is_flat else part
            self.segments[part.segment] = cut
            parts.append((part, role))
        return parts

    def _demanded(self, drafts: Sequence[tuple[Op, Group, frozenset[int] | None]]) -> list[Work]:
        """Every draft with roles: one without buckets runs where its inputs were made, if that is one role, else on
        every role that reads its result. State that is in no bucket is updated on every role."""
        wanted: dict[str, frozenset[int]] = defaultdict(frozenset)
        for name in self.program.metrics.values():
            wanted[name] = self.everywhere
        readers: list[frozenset[int]] = []
        for op, _, roles in reversed(drafts):
            if roles is None:
                roles = frozenset().union(*(wanted[ref.name] for ref in (op.writes or op.reads)))
                if any(self.buffers[ref.name].kind in PERSISTENT for ref in op.writes):
                    roles = self.everywhere
            readers.append(roles)
            for ref in op.reads:
                wanted[ref.name] |= roles
        home: dict[str, frozenset[int]] = {}
        works = []
        for (op, group, fixed), roles in zip(drafts, reversed(readers), strict=True):
            if fixed is None and not any(self.buffers[ref.name].kind in PERSISTENT for ref in op.writes):
                sources = [home[ref.name] for ref in op.reads if ref.name in home]
                single = frozenset().union(*(source for source in sources if source != self.everywhere))
                roles = single if len(single) == 1 else roles
            if op.is_wait:
                roles = home.get(op.target, roles)
            for ref in op.writes:
                home[ref.name] = home.get(ref.name, frozenset()) | roles
            works.append(Work(op, group, roles))
        return works

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
        before: dict[int, list[Work]] = defaultdict(list)
        for name, parts in written.items():
            if len(makers[name]) == 1 or not reads[name]:
                continue
            first = reads[name][0]
            group, why = self.works[first].group, self.works[first].op.why
            for receiver in sorted(frozenset().union(*(self.works[i].roles for i in reads[name]))):
                for maker, refs in sorted(parts.items()):
                    if receiver == maker:
                        continue
                    packet = f"{name}.{maker}to{receiver}"
                    size = sum((ref.stop or 0) - (ref.start or 0) for ref in refs)
                    self.buffers[packet] = Buffer(packet, self.buffers[name].dtype, (size,), "scratch")
                    places = _in_a_row(packet, refs)
                    there = self._copy(Op("run"), refs, places, f"for role {receiver}: {why}")
                    here = self._copy(Op("run"), places, refs, f"of role {maker}: {why}")
                    before[first].append(Work(there, group, frozenset({maker})))
                    before[first].append(Work(here, group, frozenset({receiver})))
        for works in before.values():
            works.sort(key=lambda work: len(work.op.reads[0].name) > len(work.op.writes[0].name))  # sends come first
        self.works = [each for i, work in enumerate(self.works) for each in (*before[i], work)]


def _in_a_row(name: str, refs: Sequence[Ref]) -> list[Ref]:
    """References of these sizes and shapes to a buffer, one after another."""
    places, end = [], 0
    for ref in refs:
        size = (ref.stop or 0) - (ref.start or 0)
        places.append(Ref(name, end, end + size, ref.shape))
        end += size
    return places


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += one.all_input_nodes
    return found


@dataclass(frozen=True)
class Message:
    """A buffer that goes from one role to another, under a tag of its own."""

    name: str
    sender: int
    receiver: int
    tag: int


def _messages(cut: _Cut) -> dict[str, list[Message]]:
    """By buffer, its messages, receivers in order: of every buffer that a role reads and does not make itself."""
    makers: dict[str, frozenset[int]] = defaultdict(frozenset)
    readers: dict[str, frozenset[int]] = defaultdict(frozenset)
    for name in cut.program.metrics.values():
        readers[name] = cut.everywhere
    for work in cut.works:
        for ref in work.op.reads if not work.op.is_mark else ():
            readers[ref.name] |= work.roles
        for ref in work.op.writes:
            makers[ref.name] |= work.roles
    found: dict[str, list[Message]] = {}
    tag = 0
    for name in sorted(readers):
        if cut.buffers[name].kind in PERSISTENT:
            continue
        for receiver in sorted(readers[name] - makers[name]):
            found.setdefault(name, []).append(Message(name, min(makers[name]), receiver, tag))
            tag += 1
    return found


class _RoleBuilder:
    """The program of one role, being written: only its methods write its fields.

    groups: its work in order; ends: when each group ends in the schedule's own time; needs: the messages that each is
    the first to read. final: by buffer, the work of this role that last writes it. queued: by buffer, messages that
    wait until the one before them has gone. sent: sends that have not been waited for. posted: receives that have not.
    begun: what was posted at any time.
    """

    def __init__(self, cut: _Cut, messages: Mapping[str, Sequence[Message]], role: int) -> None:
        self.cut, self.messages, self.role = cut, messages, role
        self.groups, self.ends = self._groups()
        self.needs = self._needs()
        self.ops: list[Op] = []
        self.sent: list[Message] = []
        self.queued: dict[str, list[Message]] = {}
        self.posted: dict[str, Message] = {}
        self.begun: set[str] = set()
        self.final: dict[str, Work] = {}
        for work in cut.works:
            if role in work.roles:
                self.final |= {ref.name: work for ref in (work.op.reads if work.op.is_wait else work.op.writes)}

    def receives(self) -> dict[Message, float]:
        """When it begins to receive each message: at the end of the group before the first that reads it."""
        ends = [0.0, *self.ends]
        return {message: ends[i] for i, messages in enumerate(self.needs) for message in messages}

    def program(self, received: Mapping[Message, float]) -> Program:
        """The role's program. `received`: when each message begins to be received."""
        cut, program = self.cut, self.cut.program
        for number, works in enumerate(self.groups):
            self._group(works, self.needs[number])
            for message in self.needs[number + 1]:
                self._post(message)
            for message in list(self.sent):
                if received[message] <= self.ends[number]:
                    self._wait_for(message)
            if number == 0:
                self._lend()
        for name in list(self.posted):
            self._arrived(name)
        while self.sent:
            self._wait_for(self.sent[0])
        named = {ref.name for op in self.ops for ref in (*op.reads, *op.writes)}
        done = rewrite.finish(program, "by_role", ops=self.ops, buffers=cut.buffers, new_segments=cut.segments)
        buffers = {name: b for name, b in done.buffers.items() if name in named or self._keeps(b)}
        used = {b.bucket for b in buffers.values()}
        buckets = {name: bucket for name, bucket in program.buckets.items() if name in used}
        trainable = tuple(slot for slot in program.trainable if self._owns(slot.rpartition(":")[0]))
        return replace(done, role=self.role, buffers=buffers, buckets=buckets, trainable=trainable)

    def _owns(self, bucket: str) -> bool:
        return self.cut.program.buckets[bucket].role == self.role

    def _keeps(self, buffer: Buffer) -> bool:
        """Whether the role holds a buffer between steps."""
        return buffer.kind in PERSISTENT and (buffer.bucket is None or self._owns(buffer.bucket))

    def _groups(self) -> tuple[list[list[Work]], list[float]]:
        """(this role's work in order, when each group ends): what is outside of regions, and each region's in the order
        of the schedule."""
        by_group: dict[Group, list[Work]] = defaultdict(list)
        for work in self.cut.works:
            by_group[work.group] += [work] if self.role in work.roles else []
        slots = self.cut.schedule.timeline()
        length = 1 + max(row[-1].stop for row in slots)
        groups, ends = [by_group[0, None]], [0.0]
        for index in range(1, 1 + max(index for index, _ in by_group)):
            for slot in slots[self.role]:
                groups.append(by_group[index, slot.action])
                ends.append((index - 1) * length + slot.stop)
            groups.append(by_group[index, None])
            ends.append(index * length)
        return groups, ends

    def _needs(self) -> list[list[Message]]:
        """Of each group, the messages that it is the first to read; after the last group, those of the metrics."""
        own = {name: m for name, sent in self.messages.items() for m in sent if m.receiver == self.role}
        for name in self.cut.lent:
            own.pop(name, None)
        needs = []
        for works in self.groups:
            names = dict.fromkeys(ref.name for work in works for ref in work.op.reads if not work.op.is_mark)
            needs.append([own.pop(name) for name in names if name in own])
        return [*needs, list(own.values())]

    def _group(self, works: Sequence[Work], needs: Sequence[Message]) -> None:
        """The ops of one group: a receive is waited for before its first read, a send follows the last write."""
        for message in needs:
            self._post(message)
        for work in works:
            for ref in work.op.reads if not work.op.is_mark else ():
                self._arrived(ref.name)
            self.ops.append(work.op)
            refs = work.op.reads if work.op.is_wait else () if work.op.transfers else work.op.writes
            for name in dict.fromkeys(ref.name for ref in refs):
                if self.final[name] is work and name not in self.cut.lent:
                    self._send([m for m in self.messages.get(name, ()) if m.sender == self.role])

    def _lend(self) -> None:
        """At the start of a step, the leaves that another role uses: every role takes part in one order."""
        for name in sorted(self.cut.lent):
            for message in self.messages[name]:
                if message.sender == self.role:
                    self._send([message])
                    self._wait_for(message)
                elif message.receiver == self.role:
                    self._post(message)
                    self._arrived(name)

    def _send(self, messages: Sequence[Message]) -> None:
        """Sends a buffer to the first of several roles. The others follow, each when the one before it has gone."""
        if not messages:
            return
        message, *rest = messages
        why = f"to role {message.receiver}"
        self.ops.append(
            make_op("send", [Ref(message.name)], axis=AXIS, peer=message.receiver, tag=message.tag, why=why)
        )
        self.sent.append(message)
        self.queued[message.name] = rest

    def _wait_for(self, message: Message) -> None:
        """Waits for a send."""
        self.ops.append(make_op("wait", [Ref(message.name)], why=f"to role {message.receiver}"))
        self.sent.remove(message)
        self._send(self.queued.pop(message.name, ()))

    def _post(self, message: Message) -> None:
        """Begins to receive, once."""
        if message.name in self.begun:
            return
        self.begun.add(message.name)
        why = f"from role {message.sender}"
        self.ops.append(
            make_op("recv", writes=[Ref(message.name)], axis=AXIS, peer=message.sender, tag=message.tag, why=why)
        )
        self.posted[message.name] = message

    def _arrived(self, name: str) -> None:
        """Waits for a receive that was posted, before the first read."""
        message = self.posted.pop(name, None)
        if message is not None:
            self.ops.append(make_op("wait", [Ref(name)], why=f"from role {message.sender}"))
