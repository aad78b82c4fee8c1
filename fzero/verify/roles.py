"""roles: the programs of a pipeline's roles, run on terms together: what one sends is what another receives.

Together they must mean what the captured step means. A message is a queue of its own: axis, sender, receiver, tag. A
wait for a receive goes on when the other role has sent, and a wait for a send when the other has begun to receive: what
ends under this rule ends with every transport, however little it buffers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import GIVEN, PERSISTENT, Ref
from fzero.verify.abstract import Abstract
from fzero.verify.contents import Content
from fzero.verify.terms import Undefined, digest

Key = tuple[str, int, int, int]  # axis, sender, receiver, tag


class RolesUndefined(Undefined):
    """`Undefined`, with the role whose op it is."""

    def __init__(self, message: str, role: int, op: int) -> None:
        super().__init__(message, op)
        self.role = role


class _Mail:
    """The messages of a step. Roles write it as they run.

    sent: by message, the terms in flight. started: sends begun. posted: receives begun.
    """

    def __init__(self) -> None:
        self.sent: dict[Key, deque[dict[tuple[int, int], Any]]] = defaultdict(deque)
        self.started: dict[Key, int] = defaultdict(int)
        self.posted: dict[Key, int] = defaultdict(int)


class _Role:
    """One role while all run: its memory of terms, and the transfers that it has started.

    position: the next op. pending: by target, the message of a transfer in flight, and its number among those alike.
    """

    def __init__(self, program: Program, role: int, mail: _Mail) -> None:
        self.program, self.role, self.mail = program, role, mail
        self.abstract = Abstract(program)
        self.position = 0
        self.pending: dict[str, tuple[Op, Key, int]] = {}

    @property
    def done(self) -> bool:
        return self.position == len(self.program.ops)

    def ready(self) -> bool:
        """Whether the next op can go on."""
        op = self.program.ops[self.position]
        if not op.is_wait or op.target not in self.pending:
            return True
        transfer, key, number = self.pending[op.target]
        return bool(self.mail.sent[key]) if transfer.is_recv else self.mail.posted[key] > number

    def waits_for(self) -> str:
        """Where it stands, for a message."""
        target = self.program.ops[self.position].target
        transfer, key, _ = self.pending[target]
        other = f"from role {key[1]}" if transfer.is_recv else f"to role {key[2]}"
        return f"role {self.role} at op {self.position} waits for {target} {other}"

    def step(self) -> None:
        """Runs the next op."""
        op = self.program.ops[self.position]
        try:
            if op.is_send:
                key = (str(op.axis), self.role, int(op.peer), op.tag)
                self.mail.sent[key].append(self._terms(op.reads[0]))
                self.pending[op.target] = op, key, self.mail.started[key]
                self.mail.started[key] += 1
            elif op.is_recv:
                key = (str(op.axis), int(op.peer), self.role, op.tag)
                self.mail.posted[key] += 1
                self.pending[op.target] = op, key, 0
            elif op.is_wait and op.target in self.pending:
                transfer, key, _ = self.pending.pop(op.target)
                if transfer.is_recv:
                    self._put(transfer.writes[0], self.mail.sent[key].popleft())
            else:
                self.abstract.step(op)
        except Undefined as error:
            raise RolesUndefined(str(error), self.role, self.position) from None
        self.position += 1

    def _terms(self, ref: Ref) -> dict[tuple[int, int], Any]:
        """What a reference holds, by ranges from its start."""
        buffer = self.program.buffers[ref.name]
        if buffer.bucket is not None:
            raise Undefined(f"{ref} is in a bucket: a message comes from a buffer of its own")
        if ref.name not in self.abstract.memory:
            raise Undefined(f"{ref.name} holds nothing")
        low, high = (0, buffer.numel) if ref.start is None else (ref.start, ref.stop or 0)
        terms = self.abstract.memory[ref.name].terms
        found = {(a - low, b - low): value for (a, b), value in sorted(terms.items()) if low <= a and b <= high}
        if sum(b - a for a, b in found) != high - low:
            raise Undefined(f"{ref} was not computed as a whole")
        return found

    def _put(self, ref: Ref, terms: Mapping[tuple[int, int], Any]) -> None:
        buffer = self.program.buffers[ref.name]
        low, high = (0, buffer.numel) if ref.start is None else (ref.start, ref.stop or 0)
        if max((b for _, b in terms), default=0) != high - low:
            raise Undefined(f"{ref} receives {max((b for _, b in terms), default=0)} elements")
        if buffer.bucket is not None:
            raise Undefined(f"{ref} is in a bucket: a message goes to a buffer of its own")
        content = self.abstract.memory.setdefault(ref.name, Content())
        for (a, b), value in terms.items():
            content.put((low + a, low + b), value)


def joint_meaning(programs: Mapping[int, Program]) -> str:
    """The meaning of the state that all roles leave behind together. `programs`: by role.

    Raises RolesUndefined where there is none: a role reads what was not computed, two roles keep different values of
    one leaf, or the roles wait for one another.
    """
    mail = _Mail()
    roles = {role: _Role(program, role, mail) for role, program in programs.items()}
    while any(not role.done for role in roles.values()):
        moved = False
        for role in roles.values():
            while not role.done and role.ready():
                role.step()
                moved = True
        if not moved:
            stuck = [role for role in roles.values() if not role.done]
            where = "; ".join(role.waits_for() for role in stuck)
            raise RolesUndefined(f"the roles wait for one another: {where}", stuck[0].role, stuck[0].position)
    left = [key for key, queue in mail.sent.items() if queue]
    if left:
        axis, sender, receiver, tag = left[0]
        what = f"a message over {axis} to role {receiver} (tag {tag}) is never received"
        raise RolesUndefined(what, sender, -1)
    state: dict[tuple[str, int | None], Any] = {}
    metrics: dict[str, Any] = {}
    for number, role in roles.items():
        try:
            own, shown = role.abstract.results()
        except Undefined as error:
            raise RolesUndefined(str(error), number, error.op) from None
        _agree(state, own, number)
        _agree(metrics, shown, number)
    return digest(state, metrics)


def _agree(kept: dict[Any, Any], found: Mapping[Any, Any], role: int) -> None:
    for name, value in found.items():
        if kept.setdefault(name, value) != value:
            raise RolesUndefined(f"{name} is another value than on an earlier role", role, -1)


def kept_by(programs: Mapping[int, Program]) -> dict[str, list[int]]:
    """By the name of a buffer of a bucket, the roles that hold it between steps."""
    found: dict[str, list[int]] = defaultdict(list)
    for role, program in programs.items():
        for name, buffer in program.buffers.items():
            if buffer.kind in PERSISTENT and buffer.kind not in GIVEN and buffer.bucket is not None:
                found[name].append(role)
    return dict(found)
