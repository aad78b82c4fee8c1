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
    post = _Post(cut)
    return {role: _RoleBuilder(cut, post, role).program() for role in range(schedule.roles)}


@dataclass
class _Cut:
    """The ops of a program with their roles. `place` fills works, buffers, segments, lent and returned."""

    program: Program
    schedule: Schedule
    chunk_of: Mapping[str, int]
    works: list[Work] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)
    lent: dict[str, tuple[Ref, int]] = field(default_factory=dict)  # by the copy's name: the leaf and its role

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
        self.works = self._demanded(drafts)

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
            self.buffers[name] = Buffer(name, self.buffers[ref.name].dtype, ref.shape or (), "activation")
            self.lent[name] = ref, int(self._role(ref) or 0)
            reads[position] = Ref(name)
        for position, ref in enumerate(op.writes):
            home = self._role(ref)
            if home in (None, role):
                continue
            name = f"{ref.name}.back{ref.start}"
            like = self.buffers[ref.name]
            self.buffers[name] = Buffer(name, like.dtype, ref.shape or (), "activation")
            writes[position] = Ref(name)
            gm = segments.copy_segment(torch.empty(ref.shape or (), dtype=like.dtype, device="meta"))
            copy = rewrite.run_op(op, gm, [Ref(name)], [ref])
            self.segments[copy.segment] = gm
            back.append((replace(copy, why=f"from the chunk that uses it {op.why}"), frozenset({home or 0})))
        here = replace(op, reads=tuple(reads), writes=tuple(writes))
        return [(here, frozenset({role})), *back]

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
        value_of = {fx_nodes.operand(n): fx_nodes.operand(n, 1) for n in gm.graph.nodes if n.target is aten.copy_.default}
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
    """A value that goes from one role to another: what is read there and written here, under a tag of its own."""

    source: Ref
    target: Ref
    sender: int
    receiver: int
    tag: int


class _Post:
    """Every message of a step, the same list for all roles. Written by its constructor alone."""

    def __init__(self, cut: _Cut) -> None:
        self.makers: dict[str, set[int]] = defaultdict(set)
        self.readers: dict[str, set[int]] = defaultdict(set)
        for name in cut.program.metrics.values():
            self.readers[name] |= cut.everywhere
        for work in cut.works:
            for ref in work.op.reads if not work.op.is_mark else ():
                self.readers[ref.name] |= work.roles
            for ref in work.op.writes:
                self.makers[ref.name] |= work.roles
        self.pieces = self._pieces(cut)  # of buffers that several roles write in parts
        self.messages: dict[str, list[Message]] = {}
        tag = 0
        for name in sorted(self.readers):
            if cut.buffers[name].kind in PERSISTENT or cut.buffers[name].bucket is not None:
                continue
            if name in cut.lent:
                origins = [(cut.lent[name][0], Ref(name), cut.lent[name][1])]
            elif name in self.pieces:
                origins = [(ref, ref, role) for ref, role in self.pieces[name]]
            else:
                origins = [(Ref(name), Ref(name), min(self.makers[name]))]
                if not self.readers[name] - self.makers[name]:
                    continue
            for source, target, sender in origins:
                for receiver in sorted(self.readers[name] - {sender}):
                    if name not in self.pieces and receiver in self.makers[name]:
                        continue
                    message = Message(source, target, sender, receiver, tag)
                    self.messages.setdefault(name, []).append(message)
                    tag += 1

    def _pieces(self, cut: _Cut) -> dict[str, list[tuple[Ref, int]]]:
        """By buffer, the stretches of it that one role writes alone, with the role, in order."""
        written: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for work in cut.works:
            for ref in work.op.writes:
                apart = ref.start is not None and cut.buffers[ref.name].bucket is None and len(work.roles) == 1
                if apart and len(self.makers[ref.name]) > 1:
                    written[ref.name].append((ref.start or 0, ref.stop or 0, next(iter(work.roles))))
        pieces: dict[str, list[tuple[Ref, int]]] = {}
        for name, spans in written.items():
            runs: list[tuple[int, int, int]] = []
            for start, stop, role in sorted(spans):
                if runs and runs[-1][1:] == (start, role):
                    start = runs.pop()[0]
                runs.append((start, stop, role))
            pieces[name] = [(Ref(name, start, stop, (stop - start,)), role) for start, stop, role in runs]
        return pieces


class _RoleBuilder:
    """The program of one role, being written. `ops` and `sent` grow; nothing else changes after the constructor.

    sent: messages whose send has not been waited for. final: by buffer, the work of this role that last writes it.
    """

    def __init__(self, cut: _Cut, post: _Post, role: int) -> None:
        self.cut, self.post, self.role = cut, post, role
        self.ops: list[Op] = []
        self.sent: list[Message] = []
        self.received: set[str] = set()
        self.final: dict[str, Work] = {}
        for work in cut.works:
            if role in work.roles:
                self.final |= {ref.name: work for ref in (work.op.reads if work.op.is_wait else work.op.writes)}

    def program(self) -> Program:
        """The role's program."""
        cut, program = self.cut, self.cut.program
        groups: dict[Group, list[Work]] = defaultdict(list)
        for work in cut.works:
            groups[work.group] += [work] if self.role in work.roles else []
        for index in range(1 + max(index for index, _ in groups)):
            for action in cut.schedule.orders[self.role] if index else ():
                self._group(groups[index, action])
            self._group(groups[index, None])
            if index == 0:
                self._lend()
        for name in program.metrics.values():
            self._receive(name)
        self._wait_for(self.sent)
        named = {ref.name for op in self.ops for ref in (*op.reads, *op.writes)}
        buffers = {name: b for name, b in cut.buffers.items() if name in named or self._keeps(b)}
        done = rewrite.finish(program, "by_role", ops=self.ops, buffers=buffers, new_segments=cut.segments)
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

    def _group(self, works: Sequence[Work]) -> None:
        """The ops of one action, with messages before and after each. Sends of earlier groups are waited for at its
        end: by then the other role has had an action's time to receive."""
        before, self.sent = self.sent, []
        for work in works:
            for ref in work.op.reads if not work.op.is_mark else ():
                self._receive(ref.name)
            self.ops.append(work.op)
            for ref in work.op.reads if work.op.is_wait else work.op.writes:
                started = work.op.transfers and not work.op.is_wait
                if self.final.get(ref.name) is work and not started:
                    self._send(self.post.messages.get(ref.name, ()))
        self._wait_for(before)

    def _lend(self) -> None:
        """At the start of a step, the leaves that another role uses: every role takes part in one order."""
        for name in sorted(self.cut.lent):
            for message in self.post.messages[name]:
                if message.sender == self.role:
                    self._send([message])
                    self._wait_for(self.sent[-1:])
                    self.sent.pop()
                elif message.receiver == self.role:
                    self._take(message)
            self.received.add(name)

    def _send(self, messages: Sequence[Message]) -> None:
        """Sends a value; to several roles one after another, for a buffer is in one transfer at a time."""
        own = [message for message in messages if message.sender == self.role]
        for number, message in enumerate(own):
            why = f"to role {message.receiver}"
            self.ops.append(
                make_op("send", [message.source], axis=AXIS, peer=message.receiver, tag=message.tag, why=why)
            )
            if number + 1 < len(own):
                self._wait_for([message])
            else:
                self.sent.append(message)

    def _receive(self, name: str) -> None:
        """Before the first read: receives what other roles made of a buffer."""
        if name in self.received:
            return
        self.received.add(name)
        for message in self.post.messages.get(name, ()):
            if message.receiver == self.role:
                self._take(message)

    def _take(self, message: Message) -> None:
        why = f"from role {message.sender}"
        self.ops.append(
            make_op("recv", writes=[message.target], axis=AXIS, peer=message.sender, tag=message.tag, why=why)
        )
        self.ops.append(make_op("wait", [Ref(message.target.name)], why=why))

    def _wait_for(self, messages: Iterable[Message]) -> None:
        self.ops += [make_op("wait", [Ref(m.source.name)], why=f"to role {m.receiver}") for m in messages]
