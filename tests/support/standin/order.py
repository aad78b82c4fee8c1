"""order: which use of memory comes before which, by the events, waits and synchronisations between streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch


class RaceError(AssertionError):
    """A use of memory that nothing puts after an earlier one by another stream."""


class CaptureError(RuntimeError):
    """What CUDA refuses while a graph is captured."""


@dataclass(eq=False)
class Agent:
    """The host, or a stream. `clock` holds, for each agent, the number of its last use that is over for this one."""

    name: str
    device: int | None = None  # None: the host
    clock: dict[Agent, int] = field(default_factory=dict)

    def learn(self, clock: dict[Agent, int]) -> None:
        for agent, time in clock.items():
            if time > self.clock.get(agent, 0):
                self.clock[agent] = time

    def tick(self) -> int:
        """The number of a new use by this agent. What the host knows to be over is over for what it issues."""
        if self is not HOST:
            self.learn(HOST.clock)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]


HOST = Agent("the host")


@dataclass
class Use:
    agent: Agent
    time: int
    low: int
    high: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.agent.name} {'writes' if self.writes else 'reads'} bytes {self.low}-{self.high}"


def check(ledger: list[Use], op: Use) -> None:
    """Puts a use on the ledger of a piece of memory. Raises RaceError where it may meet an earlier one."""
    kept = []
    for old in ledger:
        known = op.agent.clock.get(old.agent, 0) >= old.time
        apart = old.high <= op.low or op.high <= old.low
        if not apart and not known and (old.writes or op.writes):
            raise RaceError(f"{op}, which nothing puts after: {old}")
        inside = op.low <= old.low and old.high <= op.high
        if not (inside and known and (op.writes or not old.writes)):
            kept.append(old)
    ledger[:] = [*kept, op]


VIOLATIONS: list[str] = []  # found where nothing can be raised: memory given back too early


class Memory:
    """One allocation of a device, or of pinned host memory (`home` is then the host)."""

    budget: ClassVar[int] = 0  # bytes of each device; 0: as many as the machine has
    num_bytes: ClassVar[dict[int, int]] = {}
    peak_bytes: ClassVar[dict[int, int]] = {}

    def __init__(self, nbytes: int, home: Agent) -> None:
        self.nbytes, self.home, self.ledger = -(-nbytes // 512) * 512, home, list[Use]()
        self.kept = False  # in a graph's own pool
        if home.device is not None:
            now = Memory.num_bytes.get(home.device, 0) + self.nbytes
            if Memory.budget and now > Memory.budget:
                raise torch.OutOfMemoryError(f"{nbytes:,} more bytes: the budget is {Memory.budget:,}")
            Memory.num_bytes[home.device] = now
            Memory.peak_bytes[home.device] = max(now, Memory.peak_bytes.get(home.device, 0))

    def __del__(self) -> None:
        """The allocator gives it to the next who asks on the stream that it was allocated on, and waits for none."""
        if self.home.device is None:
            return
        Memory.num_bytes[self.home.device] -= self.nbytes
        if self.kept:
            return
        self.home.learn(HOST.clock)
        late = [use for use in self.ledger if self.home.clock.get(use.agent, 0) < use.time]
        VIOLATIONS.extend(f"memory was given back before its last use is over: {use}" for use in late)
