"""Bytes on the wire, counted from the program: 2P for stages 0, 1 and 2, at most 3P for 3, each difference itemised."""

from __future__ import annotations

import math
from collections import Counter

import cases
import pytest

import fzero
from fzero.ir.program import Program, wire_bytes


def program(zero: int, world: int, depth: int) -> tuple[Program, int]:
    """A GPT's program, and P: the bytes of its parameters."""
    init, loss = cases.gpt(vocab=2048, width=256, depth=depth)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=zero, clip_norm=1.0)
    lowered = fzero.lower(spec, init, cases.tokens(2, 64, 2048), world_size=world)
    params = [leaf for leaf in lowered.plan.leaves if leaf.path.startswith("params/")]
    numel = sum(math.prod(leaf.shape) for leaf in params)
    return lowered.program, 4 * numel


def itemised(one: Program) -> Counter[str]:
    """Bytes by what they are: gathers of parameters, of updated ones, reductions, scalars."""
    found: Counter[str] = Counter()
    for op in one.ops:
        what = op.kind
        if op.gathers:
            what = "gather" if one.buffers[op.writes[0].name].kind == "gathered" else "gather updated"
        elif op.reduces:
            what = op.kind
        found[what] += wire_bytes(one, op)
    return found


def gathered(one: Program, world: int, depth: int) -> list[tuple[int, int]]:
    """(times gathered, bytes sent each time) of every bucket: layers twice, and less where the backward needs none."""
    times = Counter(op.reads[0].name for op in one.ops if op.gathers)
    assert {times[f"params:blocks.{i}"] for i in range(depth)} == {2}
    assert times["params:wpe"] == 1  # its gradient needs no value of it
    return [
        (count, one.buckets[one.buffers[name].bucket or ""].length * 4 * (world - 1) // world)
        for name, count in times.items()
    ]


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(1)
def test_bytes_per_stage(zero: int, world: int, whole: bool) -> None:
    depth = 12 if whole else 4
    one, params = program(zero, world, depth)
    share = params * (world - 1) / world
    found = itemised(one)
    scalars = found["all_reduce_small"]
    padding = sum(b.padding for b in one.buckets.values()) * 4
    assert scalars + padding < 0.01 * params, (scalars, padding)
    total = sum(found.values()) - scalars
    if zero == 0:
        expected = {"all_reduce": 2}
    elif zero in (1, 2):
        expected = {"reduce_scatter": 1, "gather updated": 1}
    else:
        expected = {"reduce_scatter": 1}
        assert found["gather"] == sum(times * size for times, size in gathered(one, world, depth))
        assert 1.9 * share < found["gather"] <= 2 * (share + padding)
    for what, times in expected.items():
        assert found[what] == pytest.approx(times * share, rel=0.01), (what, found)
    assert total <= (3 if zero == 3 else 2) * (share + padding)


def test_accumulation_reduces_once_at_the_end_or_each_time() -> None:
    for reduce, times in (("end", 1), ("each", 4)):
        init, loss = cases.gpt(vocab=512, width=128, depth=2)
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), zero=2, microbatches=4, reduce=reduce)
        one = fzero.lower(spec, init, cases.tokens(8, 32, 512), world_size=2).program
        bucket_bytes = sum(b.length for b in one.buckets.values()) * 4
        assert itemised(one)["reduce_scatter"] == times * bucket_bytes // 2
