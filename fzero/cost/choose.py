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
    """How many segments ahead gathers start.

    programs: one for each depth. The fastest is chosen, but the depth `rule` is kept unless another saves `GAIN`.
    """
    predicted = {depth: seconds(program, rates) for depth, program in programs.items()}
    best = min(predicted, key=lambda depth: (predicted[depth], depth))
    depth = best if predicted[best] < (1 - GAIN) * predicted[rule] else rule
    shown = ", ".join(f"{n}: {s:.3g} s" for n, s in predicted.items())
    return Choice(
        depth, f"prefetch={depth} by predicted seconds of a step ({shown}). Spec(prefetch=...) chooses otherwise"
    )


def bucket_costs(rates: Rates) -> dict[str, float]:
    """Seconds per GB by bucket size in bytes, for each of `BUCKETS`: of the kind of transfer that is slowest."""
    return {str(size): max(rates.transfer(kind, size) for kind in rates.latency) / size * 1e9 for size in BUCKETS}


def bucket_bytes(costs: Mapping[str, float]) -> int:
    """The smallest bucket that costs at most `LATENCY_SHARE` more a byte than the cheapest.

    Larger ones gain nothing; smaller ones start earlier and are freed sooner. `costs` is by size, as `bucket_costs`.

    >>> bucket_bytes({"8388608": 0.5, "33554432": 0.301, "134217728": 0.3})
    33554432
    """
    least = min(costs.values())
    return min(int(size) for size, cost in costs.items() if cost <= (1 + LATENCY_SHARE) * least)
