"""by_cost: choices by predicted or measured cost, else by a rule: how far ahead gathers and fetches start, the size of
buckets and tiles, the way to compute a matrix product."""

from __future__ import annotations

from collections.abc import Mapping

from fzero import backend
from fzero.cost.kept_costs import Figures
from fzero.cost.rates import Rates
from fzero.cost.step_time import seconds
from fzero.ir.decisions import CHOSEN, IDLE, TILE_BYTES, Choice, RunnerUp
from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.program import Program
from fzero.passes import Options
from fzero.passes.offload.to_spaces import copies_of
from fzero.passes.prefetch import prefetch
from fzero.plan.layout import BUCKET_BYTES

DEPTHS = (0, 1, 2, 4)
GAIN = 0.005  # a choice other than the rule's must be predicted to save this part of a step
LATENCY_SHARE = 0.02  # of a bucket's time: more is lost to latency by a smaller one
TILES = 16  # of a bucket, of which few are on the device at once
MARGIN = 1.1  # of two libraries: a tie stays with torch's default


def prefetch_depth(program: Program, options: Options, rates: Rates | None) -> Choice[int]:
    """How many segments ahead gathers start: by predicted seconds of a step, else by a rule.

    program: before `prefetch`. rates: as measured; None where nothing was.
    """
    rule = 0 if program.transport == "shared" else 1
    if not any(op.gathers and program.buffers[op.target].kind == "gathered" for op in program.ops):
        return Choice(rule, "no parameter is gathered", IDLE)
    if rates is not None and options.overlap:
        caps = options.gather_bytes, options.prefetch_bytes
        return fastest({n: prefetch(program, n, *caps) for n in sorted({rule, *DEPTHS})}, rule, rates)
    if rule:
        return Choice(rule, "prefetch=1: one segment ahead; nothing was measured")
    return Choice(rule, "prefetch=0: ranks copy from one another's memory when they wait, so nothing would be hidden")


def fastest(programs: Mapping[int, Program], rule: int, rates: Rates) -> Choice[int]:
    """The depth of the fastest program, but the depth `rule` is kept unless another saves `GAIN`.

    programs: one for each depth.
    """
    predicted = {depth: seconds(program, rates) for depth, program in programs.items()}
    best = min(predicted, key=lambda depth: (predicted[depth], depth))
    depth = best if predicted[best] < (1 - GAIN) * predicted[rule] else rule
    shown = ", ".join(f"{n}: {s:.3g} s" for n, s in predicted.items())
    reason = f"prefetch={depth} by predicted seconds of a step ({shown}). Spec(prefetch=...) chooses otherwise"
    return Choice.least(predicted, depth, reason, "s")


def fetch_ahead(program: Program) -> Choice[int]:
    """How many runs before its use a fetch from the host starts (`fzero.backend`)."""
    ahead = backend.of_transport(program.transport).fetch_ahead
    if ahead > 1:
        return Choice(ahead, "the device computes while both lanes to the host move", runner_up=RunnerUp(1))
    return Choice(ahead, "one run ahead: the processor that computes also moves", runner_up=RunnerUp(0))


def tile_bytes(program: Program, least: int = TILE_BYTES, tiles: int = TILES) -> Choice[int]:
    """The most of a column held off the device that is brought at once: `least`, or more where a bucket is so large
    that it would be cut into more than `tiles`."""
    held = (program.buffers[name] for name in copies_of(program).values())
    largest = max((b.nbytes for b in held if b.bucket is not None), default=0)
    if largest <= tiles * least:
        return Choice(least, "large enough that the fixed costs of a move do not show")
    reason = f"{tiles} tiles of the largest bucket: smaller ones are more ops, and hide nothing more"
    return Choice(-(-largest // (tiles * PAGE_BYTES)) * PAGE_BYTES, reason, CHOSEN, runner_up=RunnerUp(least))


def bucket_bytes(costs: Mapping[str, float], share: float = LATENCY_SHARE) -> Choice[int]:
    """The smallest bucket that costs at most `share` more a byte than the cheapest; a fixed size without costs.

    Larger ones gain nothing; smaller ones start earlier and are freed sooner. costs: `fzero.cost.bucket_costs`.

    >>> found = bucket_bytes({"8388608": 0.5, "33554432": 0.301, "134217728": 0.3})
    >>> found.value, found.runner_up
    (33554432, RunnerUp(value=134217728, cost=0.3))
    """
    if not costs:
        return Choice(BUCKET_BYTES, "nothing was measured: 32 MiB")
    least = min(costs.values())
    size = min(int(size) for size, cost in costs.items() if cost <= (1 + share) * least)
    reason = f"the smallest that costs at most {share:.0%} more a byte than the cheapest"
    return Choice.least({int(n): cost for n, cost in costs.items()}, size, reason, "s a GB")


WAYS = {"torch": "torch's own", "onednn": "oneDNN", "fp32": "in fp32"}


def product(question: str, figures: Figures | None) -> Choice[str]:
    """The way to compute a matrix product by measured speed: "torch", "onednn", or in 16 bits "fp32".

    figures: GFLOP/s of torch's own and of one other way.
    """
    if figures is None:
        return Choice(
            "torch", f"{question}: torch's own, for nothing was measured here (a first step on this machine measures)"
        )
    (other,) = (way for way in WAYS if way != "torch" and way in figures)
    taken, second = (other, "torch") if figures[other] >= MARGIN * figures["torch"] else ("torch", other)
    shown = ", ".join(f"{WAYS[way]} {figures[way]:.3g}" for way in (other, "torch"))
    reason = f"{question}: {WAYS[taken]} by speed (GFLOP/s: {shown})"
    return Choice(taken, reason, CHOSEN, figures[taken], RunnerUp(second, figures[second]), "GFLOP/s")
