"""choose: decisions by predicted cost, with reasons: how far ahead gathers start, and the size of a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fzero.cost.rates import Rates
from fzero.cost.step_time import seconds
from fzero.ir.program import Program

DEPTHS = (0, 1, 2, 4)
GAIN = 0.005  # a choice other than the rule's must be predicted to save this part of a step
BUCKETS = tuple(n << 20 for n in (8, 16, 32, 64, 128))
LATENCY_SHARE = 0.02


T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision and its reason in words; "" where there was nothing to choose."""

    value: T
    reason: str = ""


def prefetch_depth(programs: Mapping[int, Program], rule: int, rates: Rates) -> Choice[int]:
    """How many segments ahead gathers start: the fastest of these programs by depth, `rule`'s unless
    another saves `GAIN`."""
    found = {depth: seconds(program, rates) for depth, program in programs.items()}
    best = min(found, key=lambda depth: (found[depth], depth))
    depth = best if found[best] < (1 - GAIN) * found[rule] else rule
    shown = ", ".join(f"{n}: {s:.3g} s" for n, s in found.items())
    return Choice(
        depth, f"prefetch={depth} by predicted seconds of a step ({shown}). Spec(prefetch=...) chooses otherwise"
    )


def bucket_costs(rates: Rates) -> dict[str, float]:
    """Seconds a GB of transfers of each of `BUCKETS`, of the kind for which that is most."""
    return {str(size): max(rates.transfer(kind, size) for kind in rates.latency) / size * 1e9 for size in BUCKETS}


def bucket_bytes(costs: Mapping[str, float]) -> int:
    """The smallest bucket that costs at most `LATENCY_SHARE` more a byte than the cheapest: larger ones gain nothing,
    smaller ones start earlier and are freed sooner.

    >>> bucket_bytes({"8388608": 0.5, "33554432": 0.301, "134217728": 0.3})
    33554432
    """
    least = min(costs.values())
    return min(int(size) for size, cost in costs.items() if cost <= (1 + LATENCY_SHARE) * least)
