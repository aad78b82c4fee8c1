"""pipeline: in which order the roles of a pipeline work. A schedule is data, with a text form that can be read back.

The model is cut into chunks, numbered in the order of the forward. Each chunk lies on one role, a coordinate of the
mesh axis `pp`. A role runs its actions one after another:

    F2.5  the forward of chunk 2 for microbatch 5
    B2.5  its backward; or the backward in two halves:
    I2.5  the gradient of what the chunk was given, for which the chunk before it waits
    W2.5  the gradients of its parameters, for which nobody waits

Every schedule keeps the order of microbatches in each chunk, so sums of gradients have the bits of no pipeline.

| schedule | chunks a role | idle share, for equal F, I and W | microbatches held by role r |
|---|---|---|---|
| "gpipe" | 1 | (p-1) / (m+p-1) | m |
| "1f1b" | 1 | (p-1) / (m+p-1) | p - r |
| "interleaved" | V | (p-1) / (Vm+p-1) | (2(p-r-1) + (V-1)p + 1) / V |
| "zb-h1" | 1 | (p-1) / (3m+p-1) | p |
| "zb-v" | 2 | (p-1) / (6m+p-1) | p |

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved (arXiv 2104.04473), zero bubble H1 and V (arXiv 2401.10241,
2405.15362).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

from fzero.errors import SpecError
from fzero.tree import suggest

N = TypeVar("N", int, float)
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
EQUAL = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}  # seconds of a whole role's share of the model


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One entry of a schedule: `kind` is "F", "B", "I" or "W"; `chunk` and `microbatch` count from 0."""

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class TimedAction:
    """When an action runs: seconds from the start of the step."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """The order of work of every role. Immutable; `check` raises SpecError where it cannot run.

    name: for the reader. role_of: of each chunk, the role that holds it. orders: of each role, its actions in order.

    >>> schedule = make_schedule("1f1b", roles=2, microbatches=3)
    >>> print(schedule)
    schedule 1f1b chunks 0 1
    role 0 F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    role 1 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    >>> schedule.idle_share(), schedule.held
    (0.25, (2, 1))
    >>> Schedule.parse(str(schedule)) == schedule
    True
    """

    name: str
    role_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def roles(self) -> int:
        """How many roles work."""
        return len(self.orders)

    @property
    def chunks(self) -> int:
        """How many chunks the model is cut into, over all roles."""
        return len(self.role_of)

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return 1 + max((a.microbatch for order in self.orders for a in order), default=-1)

    @cached_property
    def splits(self) -> bool:
        """Whether the backward runs in two halves."""
        return any(a.kind == INPUT for order in self.orders for a in order)

    @property
    def held(self) -> tuple[int, ...]:
        """Of each role, the most (chunk, microbatch) pairs whose activations it holds at one time: from F to B or W."""
        return self.most_held([1] * self.chunks)

    def most_held(self, sizes: Sequence[N]) -> tuple[N, ...]:
        """Of each role, the most that it holds at one time. sizes: of what each chunk keeps of a microbatch."""

        def change(action: Action) -> N:
            return sizes[action.chunk] * {FORWARD: 1, INPUT: 0}.get(action.kind, -1)

        return tuple(max(accumulate(map(change, order)), default=0) for order in self.orders)

    @property
    def transfers(self) -> int:
        """Activations and their gradients that are sent in a step, over all roles: none between chunks of one role."""
        return 2 * self.microbatches * sum(a != b for a, b in pairwise(self.role_of))

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions whose results `action` reads."""
        backward = INPUT if self.splits else BACKWARD
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind == FORWARD:
            if chunk:
                yield Action(FORWARD, chunk - 1, microbatch)
            return
        if kind == WEIGHT:
            yield Action(INPUT, chunk, microbatch)
            return
        yield Action(FORWARD, chunk, microbatch)
        if chunk + 1 < self.chunks:
            yield Action(backward, chunk + 1, microbatch)

    def timeline(self, seconds: Mapping[str, float] = EQUAL, send: float = 0.0) -> list[list[TimedAction]]:
        """When each action runs, by role.

        seconds: of "F", "B", "I", "W" for all that a role holds of the model; a chunk takes its part of it. send:
        between two roles. Raises SpecError where roles wait for one another for ever.
        """
        per_role = Counter(self.role_of)
        done: dict[Action, tuple[float, int]] = {}
        slots: list[list[TimedAction]] = [[] for _ in self.orders]
        todo = [list(reversed(order)) for order in self.orders]
        while any(todo):
            moved = False
            for role, rest in enumerate(todo):
                while rest and all(need in done for need in self.needs(rest[-1])):
                    action = rest.pop()
                    ready = [done[n][0] + (send if done[n][1] != role else 0.0) for n in self.needs(action)]
                    start = max([slots[role][-1].stop if slots[role] else 0.0, *ready])
                    stop = start + seconds[action.kind] / per_role[role]
                    slots[role].append(TimedAction(action, start, stop))
                    done[action] = (stop, role)
                    moved = True
            if not moved:
                waits = "; ".join(
                    f"role {role} at {rest[-1]} waits for {next(n for n in self.needs(rest[-1]) if n not in done)}"
                    for role, rest in enumerate(todo)
                    if rest
                )
                raise SpecError(f"schedule {self.name!r}: the roles wait for one another: {waits}")
        return slots

    @cached_property
    def slots(self) -> list[list[TimedAction]]:
        """The timeline where all actions take as long, which nobody changes."""
        return self.timeline()

    def after(self, action: Action, role: int, late: float) -> Action | None:
        """The first action of a role that begins so much time after another action has ended; None if none does.

        The roles' own time is not quite that of `slots`: with some time between, nobody waits for a message.
        """
        end = late + next(slot.stop for row in self.slots for slot in row if slot.action == action)
        return next((slot.action for slot in self.slots[role] if slot.start >= end), None)

    def idle_share(self, seconds: Mapping[str, float] = EQUAL, send: float = 0.0) -> float:
        """The share of the roles' time, from the start of the step to its end, in which they do nothing."""
        slots = self.timeline(seconds, send)
        length = max((row[-1].stop for row in slots if row), default=0.0)
        busy = sum(slot.stop - slot.start for row in slots for slot in row)
        return 1 - busy / (length * self.roles) if length else 0.0

    def check(self) -> Schedule:
        """Itself. Raises SpecError for a role without work, an action that is missing, twice, or on another role than
        its chunk, microbatches of a chunk out of order, and roles that wait for one another."""
        where = f"schedule {self.name!r}"
        seen: set[Action] = set()
        last: dict[tuple[str, int], int] = {}
        for role, order in enumerate(self.orders):
            if not order:
                raise SpecError(f"{where}: role {role} has no action")
            for action in order:
                if not 0 <= action.chunk < self.chunks or self.role_of[action.chunk] != role:
                    raise SpecError(f"{where}: role {role} has {action}, which is of no chunk of its own")
                if action in seen:
                    raise SpecError(f"{where}: role {role} has {action} twice")
                seen.add(action)
                before = last.get((action.kind, action.chunk), -1)
                if action.microbatch != before + 1:
                    missing = Action(action.kind, action.chunk, before + 1)
                    raise SpecError(
                        f"{where}: role {role} has {action} where {missing} is due: each chunk takes its microbatches "
                        "in order, so that sums keep their bits"
                    )
                last[action.kind, action.chunk] = action.microbatch
        kinds = (FORWARD, INPUT, WEIGHT) if self.splits else (FORWARD, BACKWARD)
        wanted = {Action(k, c, m) for k in kinds for c in range(self.chunks) for m in range(self.microbatches)}
        for action in sorted(wanted ^ seen):
            what = "is missing" if action in wanted else "mixes whole and split backwards"
            raise SpecError(f"{where}: {action} {what}")
        self.timeline()
        return self

    def __str__(self) -> str:
        rows = [f"role {role} " + " ".join(map(str, order)) for role, order in enumerate(self.orders)]
        return "\n".join([f"schedule {self.name} chunks {' '.join(map(str, self.role_of))}", *rows])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule of a text: a header with the role of each chunk, then one line for each role. Raises SpecError
        where the text is none, and as `check` does."""
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        head = re.fullmatch(r"schedule (\S+) chunks((?: \d+)+)", lines[0]) if lines else None
        if head is None:
            raise SpecError(
                f"a schedule starts with 'schedule NAME chunks 0 1 ...' (the role of each chunk), not {lines[:1]!r}"
            )
        orders = []
        for role, line in enumerate(lines[1:]):
            row = re.fullmatch(r"role (\d+)((?: [FBIW]\d+\.\d+)*)", line)
            if row is None or int(row[1]) != role:
                raise SpecError(f"schedule {head[1]!r}: expected 'role {role} F0.0 ...', not {line[:60]!r}")
            pairs = re.findall(r"([FBIW])(\d+)\.(\d+)", row[2])
            orders.append(tuple(Action(kind, int(chunk), int(m)) for kind, chunk, m in pairs))
        role_of = tuple(map(int, head[2].split()))
        if sorted(set(role_of)) != list(range(len(orders))):
            raise SpecError(f"schedule {head[1]!r}: chunks lie on roles {sorted(set(role_of))}, rows are {len(orders)}")
        return cls(head[1], role_of, tuple(orders)).check()


# --- the schedules of the papers --------------------------------------------------------------------------------------


def _gpipe(roles: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards."""
    rows = [[Action(kind, role, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]
            for role in range(roles)]  # fmt: skip
    return _schedule("gpipe", range(roles), rows)


def _one_forward_one_backward(roles: int, microbatches: int, chunks: int) -> Schedule:
    """Role r runs p - r - 1 forwards ahead, then one forward and one backward in turn."""
    rows = []
    for role in range(roles):
        ahead = min(microbatches, roles - role - 1)
        row = [Action(FORWARD, role, m) for m in range(ahead)]
        for m in range(microbatches):
            row += [Action(FORWARD, role, m + ahead)] if m + ahead < microbatches else []
            row.append(Action(BACKWARD, role, m))
        rows.append(row)
    return _schedule("1f1b", range(roles), rows)


def _interleaved(roles: int, microbatches: int, chunks: int) -> Schedule:
    """Role r holds chunks r, p + r, 2p + r, ...; microbatches travel in groups of p, chunk by chunk."""
    if microbatches % roles:
        raise SpecError(
            f"Spec(pipeline='interleaved', microbatches={microbatches}): {roles} roles need a multiple of {roles} "
            f"microbatches. Take {roles * -(-microbatches // roles)}, or '1f1b'"
        )
    total, span = microbatches * chunks, roles * chunks

    def entry(role: int, k: int, backward: bool) -> Action:
        group, within = divmod(k, span)
        turn, m = divmod(within, roles)
        turn = chunks - 1 - turn if backward else turn
        return Action(BACKWARD if backward else FORWARD, turn * roles + role, group * roles + m)

    rows = []
    for role in range(roles):
        ahead = min(total, 2 * (roles - role - 1) + (chunks - 1) * roles)
        row = [entry(role, k, False) for k in range(ahead)]
        for k in range(total):
            row += [entry(role, ahead + k, False)] if ahead + k < total else []
            row.append(entry(role, k, True))
        rows.append(row)
    return _schedule("interleaved", [v % roles for v in range(roles * chunks)], rows)


def _zero_bubble_h1(roles: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B with the backward in halves: role r puts r weight halves off, and fills its idle time with them."""
    rows = []
    for role in range(roles):
        ahead = min(microbatches, roles - role - 1)
        row = [Action(FORWARD, role, m) for m in range(ahead)]
        weights = 0
        for m in range(microbatches):
            row += [Action(FORWARD, role, m + ahead)] if m + ahead < microbatches else []
            row.append(Action(INPUT, role, m))
            if m >= role:
                row.append(Action(WEIGHT, role, weights))
                weights += 1
        row += [Action(WEIGHT, role, m) for m in range(weights, microbatches)]
        rows.append(row)
    return _schedule("zb-h1", range(roles), rows)


def _zero_bubble_v(roles: int, microbatches: int, chunks: int) -> Schedule:
    """Two chunks a role, r and 2p - 1 - r: the first and the last chunk of the model lie on role 0."""
    full = max(microbatches, 2 * roles - 1)  # the order for fewer is that for these, without the others
    rows = []
    for role in range(roles):
        ahead = 2 * roles - role - 1  # forwards of the first chunk before its first backward
        legs = ["F0"] * (2 * (roles - role) - 1) + ["F1", "F0"] * role + ["F1", "I1", "W1"] * (roles - role)
        legs += ["F0", "I0", "W0", "F1", "I1", "W1"] * (full - ahead)
        legs += ["I0", "W0", "F1", "I1", "W1"] * (ahead - roles)
        legs += ["I0", "I1"] * role + ["I0", "W0"] * (roles - role) + ["W1"] * role + ["W0"] * role
        chunk_of = {"0": role, "1": 2 * roles - 1 - role}
        count: Counter[str] = Counter()
        row = []
        for leg in legs:
            row.append(Action(leg[0], chunk_of[leg[1]], count[leg]))
            count[leg] += 1
        rows.append([action for action in row if action.microbatch < microbatches])
    return _schedule("zb-v", [*range(roles), *reversed(range(roles))], rows)


def _schedule(name: str, role_of: Sequence[int], rows: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(name, tuple(role_of), tuple(map(tuple, rows)))


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
}
CHUNKS = {"interleaved": 2, "zb-v": 2}  # chunks a role, where none are given


def make_schedule(name: str, roles: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule of the papers for `roles` roles; `chunks` a role, of "interleaved".

    Raises SpecError for a name that is none, and for microbatches or chunks that the schedule cannot use.
    """
    if name not in SCHEDULES:
        hint = suggest(name, SCHEDULES)
        raise SpecError(
            f"pipeline schedule {name!r}: there is {', '.join(SCHEDULES)}, or your own fzero.Schedule.{hint}"
        )
    chunks = CHUNKS.get(name, 1) if chunks is None else chunks
    if name != "interleaved" and chunks != CHUNKS.get(name, 1):
        raise SpecError(
            f"pipeline schedule {name!r} has {CHUNKS.get(name, 1)} chunks a role, not {chunks}: 'interleaved' has any"
        )
    return SCHEDULES[name](roles, microbatches, chunks).check()


@dataclass(frozen=True)
class Pipeline:
    """How the step is cut along the mesh axis `pp`.

    schedule: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-v", or a `Schedule` of your own. chunks: pieces of the
    model a role holds, with "interleaved" (2 if not given). cut: for each chunk but the first, the first layer in it,
    as ["blocks/6"]. None: so that the largest chunk of numbered layers, and the head, has the fewest elements.

    >>> Pipeline("interleaved").order(roles=2, microbatches=2).chunks
    4
    """

    schedule: str | Schedule = "1f1b"
    chunks: int | None = None
    cut: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, (str, Schedule)):
            raise SpecError(f"Pipeline({self.schedule!r}): needed a schedule's name or an fzero.Schedule")
        if self.chunks is not None and (type(self.chunks) is not int or self.chunks < 1):
            raise SpecError(f"Pipeline(chunks={self.chunks!r}): needed a positive int, the chunks that a role holds")
        if isinstance(self.cut, str) or not isinstance(self.cut, (Sequence, type(None))):
            listed = [self.cut] if isinstance(self.cut, str) else ["blocks/6"]
            raise SpecError(f"Pipeline(cut={self.cut!r}): needed a list of layers, as cut={listed}")

    def order(self, roles: int, microbatches: int) -> Schedule:
        """The schedule for so many roles and microbatches. Raises SpecError where there is none."""
        if isinstance(self.schedule, str):
            return make_schedule(self.schedule, roles, microbatches, self.chunks)
        own = self.schedule.check()
        if (own.roles, own.microbatches) != (roles, microbatches):
            raise SpecError(
                f"Spec(pipeline=): the schedule {own.name!r} is for {own.roles} roles and {own.microbatches} "
                f"microbatches; the mesh has pp={roles}, microbatches={microbatches}"
            )
        return own
