"""Fits a machine's efficiencies to published steps of at most 64 devices, and says how far each is off.

    python -m benchmarks.calibration                      # fits both devices: error by row, and by family left out
    python -m benchmarks.calibration --table rows.csv     # predicts other rows with the presets, and the fastest layout

A step is put together from a layer's work (`benchmarks.published`), priced by fzero's rates of a machine. It is the
slowest role of a pipeline for each microbatch, a bubble of the other roles over the chunks, gathers and reductions of
data parallelism beside what they may hide behind, and the update. The fit is a random search from a fixed seed. It
starts at, and is held near, figures that are usual (`KNOWN`), so a figure that no row speaks of stays there. It stays
within what is possible (`BOUNDS`): a stream reaches 80 to 95 % of the memory's speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.published import TABLE, Part, Published, parts, published
from fzero.cost.node_work import seconds
from fzero.cost.rates import Rates
from fzero.hardware import Hardware, load
from fzero.ir.mesh import Mesh

Figures = dict[str, float]
# low and high end of each figure: parts of the peak, columns, seconds a second. eager: of the speed of products
BOUNDS = {
    "products": (0.55, 0.95), "fp8": (0.4, 0.9), "small_side": (0.0, 500.0), "attention": (0.2, 0.75),
    "memory": (0.8, 0.95), "network": (0.4, 0.95), "tax": (1.0, 2.5), "eager": (0.6, 1.0),
}  # fmt: skip
USUAL = {
    "products": 0.75, "fp8": 0.6, "small_side": 250.0, "memory": 0.85, "network": 0.7, "tax": 1.6, "eager": 0.85,
}  # fmt: skip
# attention: what FlashAttention-2's paper finds, forward and backward of long sequences
KNOWN = {"h100": {**USUAL, "attention": 0.3}, "a100": {**USUAL, "attention": 0.6}}
RECORD = machine.ROOT / "benchmarks" / "results" / "calibration.json"
NEAR, STEPS, SEED = 0.02, 1500, 0
BUCKET = 40e6  # parameters: Megatron's default
HOST = 60e-6  # seconds of Python for a fused kernel, which is two or three of eager's: set with vTrain's rows in view
LIMIT = 0.3  # an error beyond it counts no more than its square: such a row is of another kind


def device_of(row: Published) -> str:
    """The key of `KNOWN` of a row's device."""
    return "a100" if "A100" in row.device else "h100"


def preset_of(row: Published) -> str:
    """The preset of a row's device."""
    if "A100" not in row.device:
        return "h100"
    return "a100-40gb" if "40GB" in row.device else "a100-80gb"


def with_figures(base: Hardware, figures: Figures) -> Hardware:
    """A machine with other efficiencies."""
    low = dict.fromkeys(("bf16", "fp16", "fp32"), figures["products"])
    device = replace(
        base.device, efficiency={**base.device.efficiency, **low, "fp8": figures["fp8"]},
        small_side=figures["small_side"], attention=figures["attention"], memory_efficiency=figures["memory"],
    )  # fmt: skip
    inner = replace(base.levels[0], tax=figures["tax"])
    outer = [replace(level, efficiency=figures["network"], tax=figures["tax"]) for level in base.levels[1:]]
    return replace(base, device=device, levels=(inner, *outer))


def predicted(row: Published, here: Hardware, eager: float) -> float:
    """Seconds of a row's step. eager: the part of the products' speed that is left where Python starts each kernel."""
    shape, shards = row.shape, row.dp * row.cp
    rates = here.rates(Mesh((("pp", row.pp), ("dp", shards), ("tp", shape.tp))))
    rates = replace(rates, attention=rates.attention * row.stack.attention)
    if row.stack.eager:
        rates = replace(rates, flops={width: eager * speed for width, speed in rates.flops.items()})
    narrow = {**rates.flops, 2: here.device.reached("fp8")} if row.fp8 else rates.flops
    layer, rest = parts(shape)
    a_layer = _seconds(layer, row, replace(rates, flops=narrow))
    layers, slowest = row.layers / row.pp * a_layer, _slowest(row, a_layer, _seconds(rest, row, rates))
    computing = row.microbatches * slowest
    waiting = (row.pp - 1) / row.chunks * layers + _messages(row, rates)
    of_layers = layer.updated * row.layers / row.pp + rest.updated
    update = of_layers / rates.memory_bytes / (shards if row.zero else 1)
    return computing + waiting + _reduced(row, rates, slowest) + update


def _slowest(row: Published, layer: float, ends: float) -> float:
    """Of the roles' seconds of a microbatch, the most. Where the roles do not divide the layers, the one that has the
    ends too has fewer of them."""
    if row.layers % row.pp == 0:
        return row.layers // row.pp * layer + ends
    counts = ((own, math.ceil((row.layers - own) / (row.pp - 1))) for own in range(row.layers // row.pp + 1))
    return min(max(own * layer + ends, others * layer) for own, others in counts)


def _seconds(part: Part, row: Published, rates: Rates) -> float:
    """Of a part's forward and backward, of one microbatch: of the device, or of the host that starts its kernels."""
    products = sum(n * seconds(work, rates) for work, n in part.products.items())
    moved = part.moved[row.stack.fused] / rates.memory_bytes
    sent = sum(n * rates.transfer(kind, size, "tp", row.shape.tp) for (kind, size), n in part.sent.items())
    device = (products + moved + row.stack.exposed * sent) / row.cp
    host = 0.0 if row.stack.eager else part.calls * HOST  # an eager row's products are slower by as much
    return math.cbrt(device**3 + host**3)  # the longer, and more where both are as long


def _messages(row: Published, rates: Rates) -> float:
    """Activations and their gradients between roles."""
    if row.pp == 1:
        return 0.0
    whole = 2 * row.shape.rows * row.shape.length * row.shape.width // row.cp
    return 2 * row.microbatches * rates.transfer("send", whole // (row.shape.tp if row.shape.sequence else 1), "pp", 2)


def _reduced(row: Published, rates: Rates, computing: float) -> float:
    """What data parallelism adds to a step. computing: of a microbatch. Beside a transfer compute takes longer; what is
    left of the transfer is waited for. Stage 3 gathers twice in each microbatch, and reduces in bf16."""
    shards = row.dp * row.cp
    if shards == 1:
        return 0.0
    layer, rest = row.params
    params = (layer * row.layers / row.pp + rest) / row.shape.tp
    # FSDP's unit is a layer, Megatron's bucket at least so many parameters
    pieces = row.layers if row.zero == 3 else math.ceil(params / BUCKET)
    gather = pieces * rates.transfer("all_gather", int(2 * params / pieces), "dp", shards)
    grads = int((2 if row.zero == 3 else 4) * params / pieces)
    reduce = pieces * rates.transfer("reduce_scatter", grads, "dp", shards)
    if row.zero == 3:
        wire, beside = row.microbatches * (2 * gather + reduce), row.microbatches * computing
        first_and_last = (gather + reduce) / pieces
    else:
        wire, beside, first_and_last = gather + reduce, computing, 0.0
    hidden = min(wire, beside * rates.tax)
    return hidden * (1 - 1 / rates.tax) + wire - hidden + first_and_last


def errors(rows: Sequence[Published], figures: Figures | None) -> list[float]:
    """Of each row, predicted over measured, less 1. figures: None for the presets as they are."""
    found = []
    for row in rows:
        here = _machine(preset_of(row), tuple((figures or {}).items()))
        eager = (figures or _recorded(device_of(row)))["eager"]
        found.append(predicted(row, here, eager) / row.seconds - 1)
    return found


@cache
def _recorded(device: str) -> Figures:
    return json.loads(RECORD.read_text())[device]["figures"]


@lru_cache(maxsize=8)
def _machine(preset: str, figures: tuple[tuple[str, float], ...]) -> Hardware:
    return with_figures(load(preset), dict(figures)) if figures else load(preset)


def fitted(rows: Sequence[Published], known: Figures) -> Figures:
    """The figures with which the rows are least off, near those that are known."""

    def loss(figures: Figures) -> float:
        off = [math.log1p(error) for error in errors(rows, figures)]
        away = sum(((figures[k] - known[k]) / (high - low)) ** 2 for k, (low, high) in BOUNDS.items())
        return sum(min(abs(x), LIMIT) + x * x / 2 for x in off) / len(off) + NEAR * away

    draw, best, width = random.Random(SEED), dict(known), 0.3
    least = loss(best)
    for step in range(STEPS):
        tried = dict(best)
        for name in draw.sample(list(BOUNDS), draw.choice((1, 1, 2, 3))):
            low, high = BOUNDS[name]
            tried[name] = min(high, max(low, tried[name] + draw.gauss(0, width * (high - low))))
        if (found := loss(tried)) < least:
            best, least = tried, found
        width *= 0.6 if step % (STEPS // 7) == STEPS // 7 - 1 else 1.0
    return best


def shown(console: Console, rows: Sequence[Published], found: Sequence[float], title: str) -> float:
    """Prints each row's error, and returns their mean."""
    console.print(f"\n{title}")
    for row, error in zip(rows, found, strict=True):
        where = f"{row.world} x {row.device}, tp {row.shape.tp}, pp {row.pp}, length {row.shape.length}"
        console.print(f"  {error:+7.1%}  {row.seconds:9.4g} s  {row.name} on {where}", highlight=False)
    mean = statistics.mean(map(abs, found))
    console.print(f"  mean {mean:.1%}, bias {statistics.mean(found):+.1%}, {len(rows)} rows", highlight=False)
    return mean


def choices(console: Console, rows: Sequence[Published], found: Sequence[float]) -> None:
    """Prints, of rows that differ in how one step is laid out, which one is foretold to be the fastest, what it took of
    the seconds of the one that was, and how alike both orders are (Kendall's tau)."""
    groups: dict[tuple[Any, ...], list[tuple[float, Published]]] = defaultdict(list)
    for row, error in zip(rows, found, strict=True):
        step = row.name, row.device, row.world, row.shape.length, row.dp * row.microbatches * row.shape.rows
        groups[step].append((row.seconds * (1 + error), row))
    for (name, device, world, length, _), those in groups.items():
        if len(those) < 3:
            continue
        _, one = min(those, key=operator.itemgetter(0))
        pairs = [(x - y) * (a.seconds - b.seconds) for (x, a), (y, b) in itertools.combinations(those, 2)]
        tau = sum((pair > 0) - (pair < 0) for pair in pairs) / len(pairs)
        least = min(row.seconds for _, row in those)
        layout = f"tp {one.shape.tp}, pp {one.pp}, {one.shape.rows} a microbatch"
        where = f"{name} on {world} x {device}, length {length}"
        console.print(
            f"  {one.seconds / least:.3f} of the fastest of {len(those)}, tau {tau:.2f}: {layout}, {where}",
            highlight=False,
        )


def calibrated(console: Console, rows: Sequence[Published], device: str) -> dict[str, Any]:
    """Fits a device's figures to all rows, and to all but each family's."""
    known = KNOWN[device]
    figures = fitted(rows, known)
    console.print(f"\n{device}: { ({name: round(value, 3) for name, value in figures.items()}) }", highlight=False)
    own = shown(console, rows, errors(rows, figures), "fitted to all rows")
    left_out: list[float] = []
    for family in sorted({row.shape.family for row in rows}):
        theirs = [row for row in rows if row.shape.family == family]
        without = fitted([row for row in rows if row.shape.family != family], known)
        left_out += (off := errors(theirs, without))
        shown(console, theirs, off, f"fitted without {family}: { ({k: round(v, 3) for k, v in without.items()}) }")
    mean = statistics.mean(map(abs, left_out))
    console.print(f"\n{device}: {own:.1%} on the average, {mean:.1%} with the row's family left out", highlight=False)
    return {"figures": figures, "error": own, "family_left_out": mean, "rows": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="rows to predict with the presets, nothing is fitted")
    given, console = parser.parse_args(), Console(width=140)
    if given.table is not None:
        rows = list(published(given.table))
        shown(console, rows, found := errors(rows, None), f"{given.table}, by the presets")
        choices(console, rows, found)
        return
    rows, record = list(published(TABLE)), {}
    for device in KNOWN:
        own = [row for row in rows if device_of(row) == device]
        usual = [row for row in own if "HBM2e" not in row.device]  # that card has other memory and half of the power
        record[device] = calibrated(console, usual, device)
        if other := [row for row in own if row not in usual]:
            shown(console, other, errors(other, record[device]["figures"]), "another card, not fitted to")
    RECORD.write_text(json.dumps({"machine": machine.describe(), **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
