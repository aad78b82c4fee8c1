"""by_role: the step's program, cut into one for each role of a pipeline.

Every op has roles (`assign_roles`). A role runs its region work in the order of the schedule, and a value that one role
makes and another reads becomes `send`, `recv` and `wait`.

    run x w0 -> x1;  run x1 w1 -> x2        with w0 on role 0 and w1 on role 1 becomes
    role 0: run x w0 -> x1;  send x1; wait x1        role 1: recv x1; wait x1;  run x1 w1 -> x2

Between the actions of a region a receive is posted EARLY actions before the one that reads it, or earlier where the
sender's order asks for it: the message travels while this role computes. A send is waited for EARLY actions later, once
the schedule's own time says that the other role has posted its receive. Each costs the memory of one message.

All other messages (leaves that are lent, a mean's divisor, parts of a norm, metrics) are in *exchanges*: places in the
one order that all roles have outside of regions. There a role starts all its messages of the exchange before it waits
for any. A role that waits in one thus needs no more than that the others come to it, and before it all have the same
exchanges: so no two roles wait for each other, however little a transport buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import inf

from fzero.ir import rewrite
from fzero.ir.mesh import PIPELINE
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Buffer, Ref
from fzero.passes.pipeline.assign_roles import Assigned, Group, RoleWork
from fzero.pipeline import Schedule

EARLY = 1  # whole actions between the start of a message and the wait for it


def by_role(program: Program, schedule: Schedule) -> dict[int, Program]:
    """The programs of all roles.

    Raises SpecError where the cut does not follow the step, or an op needs leaves of several roles at once.
    """
    cut = Assigned(program, schedule)
    cut.place()
    flows, works = _ordered(cut.works, _messages(cut))
    own: dict[int, list[RoleWork | Exchange]] = {role: [] for role in range(schedule.roles)}
    for work in works:
        for role in cut.everywhere if isinstance(work, Exchange) else work.roles:
            own[role].append(work)
    regions = max(index for index, _ in (work.group for work in works))
    builders = [_RoleBuilder(cut, own[role], flows, role, regions) for role in range(schedule.roles)]
    received = {message: time for builder in builders for message, time in builder.receives().items()}
    for sent in flows.values():
        sent.sort(key=received.__getitem__)
    return _received_in_order({builder.role: builder.program(received) for builder in builders})


@dataclass(frozen=True)
class Message:
    """A buffer that goes from one role to another, under a tag of its own."""

    name: str
    sender: int
    receiver: int
    tag: int


@dataclass(frozen=True)
class Exchange:
    """Messages outside of regions, in rounds. No round has one buffer twice: each of its messages can be in flight."""

    group: Group
    rounds: tuple[tuple[Message, ...], ...]

    @classmethod
    def of(cls, group: Group, messages: Iterable[Message]) -> Exchange:
        """Every message in the first round that does not have its buffer."""
        by_name: dict[str, list[Message]] = defaultdict(list)
        for message in messages:
            by_name[message.name].append(message)
        rounds = zip_longest(*by_name.values())
        return cls(group, tuple(tuple(m for m in each if m is not None) for each in rounds))


def _ordered(
    works: Sequence[RoleWork], messages: Mapping[str, Sequence[Message]]
) -> tuple[dict[str, list[Message]], list[RoleWork | Exchange]]:
    """(the messages of regions by buffer, all work with the exchanges of the others).

    A message of a region is made by an action, and first read in the same region or in the work between it and the
    next. An exchange stands before the first work that needs one of its messages, with all that are ready there, and
    at the end of the work between two regions.
    """
    last = {(ref.name, role): i for i, work in enumerate(works) for ref in work.op.writes for role in work.roles}
    first: dict[tuple[str, int], int] = {}
    for i, work in enumerate(works):
        for ref in work.op.reads if not work.op.is_mark else ():
            for role in work.roles:
                first.setdefault((ref.name, role), i)
    flows: dict[str, list[Message]] = defaultdict(list)
    made: dict[int, list[Message]] = defaultdict(list)  # by the number of the work, what it makes for an exchange
    for message in chain(*messages.values()):
        end, use = last[message.name, message.sender], first.get((message.name, message.receiver))
        if works[end].group[1] is not None and use is not None and works[use].group[0] == works[end].group[0]:
            flows[message.name].append(message)
        else:
            made[end].append(message)
    ordered: list[RoleWork | Exchange] = []
    for index in range(1 + max(work.group[0] for work in works)):
        ready: dict[Message, None] = {}
        for i, work in enumerate(works):
            if work.group[0] != index:
                continue
            names = {ref.name for ref in work.op.reads} if work.group[1] is None else set()
            if any(m.name in names and m.receiver in work.roles for m in ready):
                ordered.append(Exchange.of((index, None), ready))
                ready = {}
            ordered.append(work)
            ready |= dict.fromkeys(made[i])
        if ready:
            ordered.append(Exchange.of((index, None), ready))
    return flows, ordered


def _messages(cut: Assigned) -> dict[str, list[Message]]:
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


def _received_in_order(programs: Mapping[int, Program]) -> dict[int, Program]:
    """The programs with some receives posted earlier: each role's from another in the order in which that one sends.

    NCCL has no tags: it matches the messages between two ranks by their number.
    """
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for role, program in programs.items():
        for op in program.ops:
            if op.is_send:
                sends[role, op.peer].append(op.tag)
    made = {}
    for role, program in programs.items():
        receives = {op.tag: op for op in program.ops if op.is_recv}
        due = {sender: iter(tags) for (sender, receiver), tags in sends.items() if receiver == role}
        posted: set[int] = set()
        ops: list[Op] = []
        for op in program.ops:
            if not op.is_recv:
                ops.append(op)
                continue
            while op.tag not in posted:
                tag = next(due[op.peer])
                posted.add(tag)
                ops.append(receives[tag])
        made[role] = replace(program, ops=tuple(ops))
    return made


class _RoleBuilder:
    """The program of one role, being written: only its methods write its fields.

    groups: its work in order; starts, ends: when each group begins and ends in the schedule's own time; needs: the
    messages of regions that each is the first to read. final: by buffer, the work of this role that last writes it.
    queued: by buffer, messages that wait until the one before them has gone. sent: sends that have not been waited for.
    posted: receives that have not. begun: what was posted at any time. slot: the action of the schedule whose ops are
    being written, as text.
    """

    def __init__(
        self,
        cut: Assigned,
        own: Sequence[RoleWork | Exchange],
        flows: Mapping[str, Sequence[Message]],
        role: int,
        regions: int,
    ) -> None:
        self.cut, self.flows, self.role = cut, flows, role
        self.groups, self.slots, self.starts, self.ends = self._groups(own, regions)
        self.needs = self._needs()
        self.ops: list[Op] = []
        self.sent: list[Message] = []
        self.queued: dict[str, list[Message]] = {}
        self.posted: dict[str, Message] = {}
        self.begun: set[str] = set()
        self.slot = ""
        self.final: dict[str, RoleWork] = {}
        for work in (work for work in own if isinstance(work, RoleWork)):
            for ref in work.op.reads if work.op.is_wait else work.op.writes:
                self.final[ref.name] = work

    def receives(self) -> dict[Message, float]:
        """When it begins to receive each message of a region: at the end of a group, EARLY whole groups before the
        first that reads it."""
        ends = [0.0] * (1 + EARLY) + self.ends
        return {message: ends[i] for i, messages in enumerate(self.needs) for message in messages}

    def program(self, received: Mapping[Message, float]) -> Program:
        """The role's program. `received`: when each message of a region begins to be received."""
        cut, program = self.cut, self.cut.program
        for number, works in enumerate(self.groups):
            self.slot = self.slots[number]
            self._follow(received, self.starts[number] if self.slot else inf)
            earlier = list(self.sent) if EARLY else self.sent
            self._group(works, self.needs[number])
            for message in chain(*self.needs[number + 1 : number + 2 + EARLY]):
                self._post(message)
            for message in list(earlier):
                if message in self.sent and received[message] <= self.ends[number]:
                    self._wait_for(message)
        assert not [*self.sent, *self.posted], "a message in flight at the end of a step"
        named = {ref.name for op in self.ops for ref in (*op.reads, *op.writes)}
        done = rewrite.finish(program, "by_role", ops=self.ops, buffers=cut.buffers, new_segments=cut.segments)
        buffers = {name: b for name, b in done.buffers.items() if name in named or self._keeps(b)}
        used = {b.bucket for b in buffers.values()}
        buckets = {name: bucket for name, bucket in program.buckets.items() if name in used}
        trainable = tuple(slot for slot in program.trainable if self._owns(slot.bucket))
        return replace(done, role=self.role, buffers=buffers, buckets=buckets, trainable=trainable)

    def _owns(self, bucket: str) -> bool:
        return self.cut.program.buckets[bucket].role == self.role

    def _keeps(self, buffer: Buffer) -> bool:
        """Whether the role holds a buffer between steps."""
        return buffer.kind in PERSISTENT and (buffer.bucket is None or self._owns(buffer.bucket))

    def _groups(
        self, own: Sequence[RoleWork | Exchange], regions: int
    ) -> tuple[list[list[RoleWork | Exchange]], list[str], list[float], list[float]]:
        """(this role's work in order, the action of each group, when it begins, when it ends): what is outside of
        regions, and each region's in the order of the schedule."""
        by_group: dict[Group, list[RoleWork | Exchange]] = defaultdict(list)
        for work in own:
            by_group[work.group].append(work)
        slots = self.cut.schedule.slots
        length = 1 + max(row[-1].stop for row in slots)
        groups, named, starts, ends = [by_group[0, None]], [""], [0.0], [0.0]
        for index in range(1, 1 + regions):
            for slot in slots[self.role]:
                groups.append(by_group[index, slot.action])
                named.append(f"{slot.action} ")
                starts.append((index - 1) * length + slot.start)
                ends.append((index - 1) * length + slot.stop)
            groups.append(by_group[index, None])
            named.append("")
            starts.append(index * length)
            ends.append(index * length)
        return groups, named, starts, ends

    def _needs(self) -> list[list[Message]]:
        """Of each group, the messages of regions that it is the first to read."""
        own = {name: m for name, sent in self.flows.items() for m in sent if m.receiver == self.role}
        needs = []
        for works in self.groups:
            reads = chain(*(work.op.reads for work in works if isinstance(work, RoleWork) and not work.op.is_mark))
            names = dict.fromkeys(ref.name for ref in reads)
            needs.append([own.pop(name) for name in names if name in own])
        return needs

    def _group(self, works: Sequence[RoleWork | Exchange], needs: Sequence[Message]) -> None:
        """The ops of one group: a receive is waited for before its first read, a send follows the last write."""
        for message in needs:
            self._post(message)
        for work in works:
            if isinstance(work, Exchange):
                self._exchange(work)
                continue
            for ref in work.op.reads if not work.op.is_mark else ():
                self._arrived(ref.name)
            self.ops.append(replace(work.op, why=f"{self.slot}{work.op.why}"))
            refs = work.op.reads if work.op.is_wait else () if work.op.transfers else work.op.writes
            for name in dict.fromkeys(ref.name for ref in refs):
                if self.final[name] is work:
                    self._send([m for m in self.flows.get(name, ()) if m.sender == self.role])

    def _exchange(self, exchange: Exchange) -> None:
        """This role's messages of an exchange: all of a round are started, then all are waited for."""
        for messages in exchange.rounds:
            own = [m for m in messages if self.role in (m.sender, m.receiver)]
            for message in own:
                if message.receiver == self.role:
                    self._post(message)
                    continue
                for flow in [m for m in self.sent if m.name == message.name]:  # of a region: it is being received
                    self._wait_for(flow)
                self._send([message])
            for message in own:
                self._arrived(message.name)
            for message in own:
                if message.sender == self.role:
                    self._wait_for(message)

    def _follow(self, received: Mapping[Message, float], time: float) -> None:
        """What was queued behind messages that are being received by a time is on its way. Whoever waits for it then
        may be one whom the work at that time needs. After a region all follow: receives of a region are posted in it,
        so nothing here waits for what comes after."""
        while gone := [m for m in self.sent if self.queued.get(m.name) and received[m] <= time]:
            self._wait_for(gone[0])

    def _send(self, messages: Sequence[Message]) -> None:
        """Sends a buffer to the role that first receives it. Others follow, each when the one before it has gone."""
        if not messages:
            return
        message, *rest = messages
        why = f"{self.slot}to role {message.receiver}"
        self.ops.append(
            make_op("send", [Ref(message.name)], axis=PIPELINE, peer=message.receiver, tag=message.tag, why=why)
        )
        self.sent.append(message)
        self.queued[message.name] = rest

    def _wait_for(self, message: Message) -> None:
        """Waits for a send."""
        self.ops.append(make_op("wait", [Ref(message.name)], why=f"{self.slot}to role {message.receiver}"))
        self.sent.remove(message)
        self._send(self.queued.pop(message.name, ()))

    def _post(self, message: Message) -> None:
        """Begins to receive, once."""
        if message.name in self.begun:
            return
        self.begun.add(message.name)
        why = f"{self.slot}from role {message.sender}"
        self.ops.append(
            make_op("recv", writes=[Ref(message.name)], axis=PIPELINE, peer=message.sender, tag=message.tag, why=why)
        )
        self.posted[message.name] = message

    def _arrived(self, name: str) -> None:
        """Waits for a receive that was posted, before the first read."""
        message = self.posted.pop(name, None)
        if message is not None:
            self.ops.append(make_op("wait", [Ref(name)], why=f"{self.slot}from role {message.sender}"))
