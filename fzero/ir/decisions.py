"""decisions: what was decided for a program, as data: each value with its reason and the runner-up.

A `Choice` is one entry. `RoleDecisions` are those that the last passes read, for the program of one role; `Decisions`
are all of a step. `fzero.compile.decide` makes them, and nothing else decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

T = TypeVar("T")
GIVEN, CHOSEN, BUDGET, IDLE = "given", "chosen", "budget", "idle"
TILE_BYTES = 16 << 20  # of a column held off the device, what elementwise work takes at once
SHOWN = 40  # characters of a value in the table


@dataclass(frozen=True)
class RunnerUp(Generic[T]):
    """What would have been taken instead. cost: in the unit of its choice; None where nothing was counted."""

    value: T
    cost: float | None = None


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision.

    reason: in words. how: "given" by the user; "chosen" by fzero; "budget" where a budget of bytes forced it; "idle"
    where nothing depends on it. cost: of the value, in `unit`. runner_up: None where there is no other.
    """

    value: T
    reason: str = ""
    how: str = CHOSEN
    cost: float | None = None
    runner_up: RunnerUp[T] | None = None
    unit: str = ""

    @staticmethod
    def given(value: Any, name: str) -> Choice[Any]:
        """The choice of a user who says `name` (`Spec(prefetch=...)`)."""
        return Choice(value, f"as {name} says", GIVEN)

    @staticmethod
    def least(costs: Mapping[Any, float], value: Any, reason: str, unit: str) -> Choice[Any]:
        """The choice of a value among costs; the cheapest of the others is the runner-up.

        >>> Choice.least({0: 3.0, 1: 1.0, 2: 2.0}, 1, "the fastest", "s").runner_up
        RunnerUp(value=2, cost=2.0)
        """
        others = [RunnerUp(other, cost) for other, cost in costs.items() if other != value]
        second = min(others, key=lambda other: (other.cost, others.index(other)), default=None)
        return Choice(value, reason, CHOSEN, costs[value], second, unit)

    def cells(self) -> tuple[str, str, str, str]:
        """Its value, how it came about, the runner-up and the reason, as text."""
        other = "-"
        if self.runner_up is not None:
            other = _shown(self.runner_up.value) + _cost(self.runner_up.cost, self.unit)
        return _shown(self.value) + _cost(self.cost, self.unit), self.how, other, self.reason


def _shown(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    if isinstance(value, tuple):
        text = ", ".join(map(str, value)) or "-"
        text = f"{len(value)} entries" if len(text) > SHOWN else text
    return text


def _cost(cost: float | None, unit: str) -> str:
    return "" if cost is None else f" ({cost:.4g} {unit})"


NO_COPIES: Choice[bool] = Choice(False, "no update writes 16-bit copies of parameters", IDLE)


@dataclass(frozen=True)
class RoleDecisions:
    """What the passes of one role's program read.

    prefetch: how many segments ahead gathers start. fetch_ahead: how many runs before its use a fetch from another
    space starts. update_on: where elementwise work on what is held off the device runs, "device" or "cpu". tile_bytes:
    of a column held there, the most that is brought at once. copies: whether 16-bit copies of parameters that updates
    write stay between steps; of all roles alike.
    """

    prefetch: Choice[int] = Choice(1)
    fetch_ahead: Choice[int] = Choice(1)
    update_on: Choice[str] = Choice("device")
    tile_bytes: Choice[int] = Choice(TILE_BYTES)
    copies: Choice[bool] = Choice(True)

    def but(self, **values: Any) -> RoleDecisions:
        """The same with other values, whose entries keep their reasons.

        >>> RoleDecisions().but(prefetch=3).prefetch.value
        3
        """
        return replace(self, **{name: replace(getattr(self, name), value=value) for name, value in values.items()})


@dataclass(frozen=True)
class Decisions:
    """All that was decided for a step; `print` shows a table.

    bucket_bytes: the size at which buckets are cut. cut: of each chunk of a pipeline but the first, its first layer.
    strategies: by mesh axis that cuts dims, the transfers that values make (`lowered.sharding` shows them in their
    place). matmul: by matrix product, the library that computes it. reduce: whether gradients of microbatches are
    reduced "each" or at the "end". roles: by role of a pipeline (0 without one), what its last passes read.
    """

    bucket_bytes: Choice[int]
    cut: Choice[tuple[str, ...]]
    strategies: Mapping[str, Choice[tuple[str, ...]]]
    matmul: Mapping[str, Choice[str]]
    reduce: Choice[str]
    roles: Mapping[int, RoleDecisions] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, Choice[Any]]]:
        """(name, entry) of each decision."""
        yield from self._of_all()
        for number, role in self.roles.items():
            for entry in fields(role):
                yield f"{entry.name}{self._of([number])}", getattr(role, entry.name)

    def _of_all(self) -> Iterator[tuple[str, Choice[Any]]]:
        """Those that all roles share."""
        yield "bucket_bytes", self.bucket_bytes
        yield "cut", self.cut
        yield from ((f"strategies {axis}", choice) for axis, choice in self.strategies.items())
        yield from self.matmul.items()
        yield "reduce", self.reduce

    def _of(self, roles: Sequence[int]) -> str:
        """Which roles, behind a name; nothing where there is one."""
        if len(self.roles) == 1:
            return ""
        if len(roles) > 1 and roles[-1] - roles[0] == len(roles) - 1:
            return f", roles {roles[0]} to {roles[-1]}"
        return f", role{'s' if len(roles) > 1 else ''} {', '.join(map(str, roles))}"

    def __str__(self) -> str:
        rows = [("decision", "value", "how", "runner-up", "reason")]
        rows += [(name, *choice.cells()) for name, choice in self._of_all()]
        for entry in fields(RoleDecisions):
            alike: dict[tuple[str, str, str, str], list[int]] = {}  # roles of which the same was decided
            for number, role in self.roles.items():
                alike.setdefault(getattr(role, entry.name).cells(), []).append(number)
            rows += [(f"{entry.name}{self._of(roles)}", *cells) for cells, roles in alike.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)
        return "\n".join(line.rstrip() for line in lines)
