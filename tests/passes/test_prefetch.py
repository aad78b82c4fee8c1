"""prefetch: how far ahead a gather starts, and what holds it back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from helpers import Run, run
from short_programs import shown, written
from torch import Tensor

import fzero
from fzero.ir.liveness import gathered_bytes
from fzero.ir.program import Level, Program
from fzero.passes.prefetch import prefetch

TEXT = "".join(
    f"bucket b{n} length=64 w{n}[0:64:64]\n"
    f"buffer p{n} f32[32] param bucket=b{n} sharded=dp\n"
    f"buffer f{n} f32[64] gathered bucket=b{n}\n"
    for n in range(4)
) + """
    buffer h f32[8] activation
    buffer m f32[64] scratch bucket=b0
    run h -> h  region=r0
    all_gather p0 -> f0  axis=dp
    wait f0
    run f0 -> h  region=r0
    all_gather p1 -> f1  axis=dp
    wait f1
    run f1 -> h  region=r0
    all_gather p2 -> f2  axis=dp
    wait f2
    run f2 f1 -> h  region=r0
    all_gather p0 -> m  axis=dp
    wait m
    update m -> p3
    all_gather p3 -> f3  axis=dp
    wait f3
    run f3 -> h  region=r0  # last
"""  # fmt: skip
ONE = 64 * 4  # bytes of one that is gathered


def starts(text: str = TEXT, *options: int | None) -> list[str]:
    """The gathers and the runs, in order, by what they bring and what they read."""
    program = prefetch(written(text), *options)
    return [line.split()[3] if "gather" in line else line.split()[1] for line in shown(program.ops)
            if "wait" not in line]  # fmt: skip


def test_a_program_without_ops_needs_nothing() -> None:
    assert prefetch(written("buffer h f32[8] activation"), 1, 0).ops == ()


def test_a_gather_passes_as_many_runs_as_the_depth() -> None:
    """Not a write to its source; and none that fills what is no parameter's moves at all."""
    assert starts(TEXT, 0) == ["h", "f0", "f0", "f1", "f1", "f2", "f2", "m", "m", "f3", "f3"]
    assert starts() == ["f0", "h", "f1", "f0", "f2", "f1", "f2", "m", "m", "f3", "f3"]
    assert starts(TEXT, 2) == ["f0", "f1", "h", "f2", "f0", "f1", "f2", "m", "m", "f3", "f3"]
    assert starts(TEXT, 9) == ["f0", "f1", "f2", "h", "f0", "f1", "f2", "m", "m", "f3", "f3"]
    assert [line for line in shown(prefetch(written(TEXT)).ops) if "wait" in line] == [
        line for line in shown(written(TEXT).ops) if "wait" in line
    ]


def test_sums_over_microbatches_hide_nothing() -> None:
    """They are short: a gather that passed one instead of a layer was not hidden."""
    text = TEXT.replace("    all_gather p1", "    run s h -> s  flat=1\n    all_gather p1").replace(
        "    buffer h", "    buffer s f32[8] grad\n    buffer h"
    )
    assert [line for line in starts(text) if line != "s"] == starts()
    assert starts(text)[1:5] == ["h", "f1", "f0", "s"]


def test_in_a_pipeline_what_stays_gathered_starts_at_the_beginning() -> None:
    """In the order of the uses, ahead of the wait for the first microbatch, and behind what makes a source."""
    records, first_run, ops = TEXT.replace("length=64", "length=64 gathered=kept").partition("    run h -> h")
    text = f"{records} recv -> h  axis=pp peer=0 tag=1\n wait h\n{first_run}{ops}"
    program = replace(written(text, mesh="pp=2 dp=2"), role=1)
    first = shown(prefetch(program, 1).ops)
    assert [line.split()[3] for line in first[:3]] == ["f0", "f1", "f2"]
    assert first[3].startswith("recv")
    assert first[-3:] == ["all_gather p3 -> f3  axis=dp", "wait f3", "run f3 -> h"], "an update writes its source"
    assert shown(prefetch(program, 0).ops)[0].startswith("recv"), "where as little as possible is asked for"
    assert prefetch(program, 1, 2 * ONE).gather_cap_bytes == 2 * ONE
    dropped = replace(written(TEXT, mesh="pp=2 dp=2"), role=1)
    assert shown(prefetch(dropped, 1).ops)[:2] == ["all_gather p0 -> f0  axis=dp", "run h -> h"]


def test_what_stays_gathered_passes_what_does_not() -> None:
    """Of two stages: the gathers of the other stay near their uses, and hold up none that is made once."""
    text = TEXT.replace("b1 length=64", "b1 length=64 gathered=kept").replace(
        "b2 length=64", "b2 length=64 gathered=kept"
    )
    first = shown(prefetch(replace(written(text, mesh="pp=2 dp=2"), role=1), 1).ops)
    assert [line.split()[3] for line in first[:3]] == ["f1", "f2", "f0"]


def test_the_programs_cap_is_what_this_depth_needs() -> None:
    """From its start to its last use a gathered buffer counts."""
    for depth, held in ((0, 2), (1, 2), (2, 3), (9, 3)):
        done = prefetch(written(TEXT), depth)
        assert done.gather_cap_bytes == held * ONE, depth
        assert done.level == Level.CAPPED
    assert prefetch(written("buffer h f32[8] activation\nrun h -> h")).gather_cap_bytes == 0


def test_a_gather_starts_only_where_there_is_room_for_it() -> None:
    assert starts(TEXT, 9, 2 * ONE) == ["f0", "f1", "h", "f0", "f2", "f1", "f2", "m", "m", "f3", "f3"]
    assert prefetch(written(TEXT), 9, 2 * ONE).gather_cap_bytes == 2 * ONE
    assert starts(TEXT, 9, 3 * ONE) == starts(TEXT, 9)
    assert starts(TEXT, 9, 3 * ONE - 1) == starts(TEXT, 9, 2 * ONE)


def test_a_cap_below_what_one_run_needs_is_refused() -> None:
    with pytest.raises(fzero.SpecError, match=rf"gather_bytes={2 * ONE - 1} is less.*The smallest cap is {2 * ONE}"):
        prefetch(written(TEXT), 1, 2 * ONE - 1)


def test_soft_bytes_hold_back_early_starts_and_refuse_nothing() -> None:
    assert starts(TEXT, 9, None, 1) == starts(TEXT, 9, 2 * ONE)
    assert prefetch(written(TEXT), 9, None, 1).gather_cap_bytes == 2 * ONE
    assert prefetch(written(TEXT), 9, None, 5 * ONE).gather_cap_bytes == 5 * ONE
    assert prefetch(written(TEXT), 9, 3 * ONE, 5 * ONE).gather_cap_bytes == 3 * ONE
    assert prefetch(written(TEXT), 9, 5 * ONE, 1).gather_cap_bytes == 2 * ONE


def drawn(numbers: random.Random, layers: int = 6) -> Program:
    """Layers of different sizes, of which some runs use two, and sums of a value over microbatches."""
    sizes = [32 * numbers.randint(1, 4) for _ in range(layers)]
    records = "".join(
        f"bucket b{n} length={size} w{n}[0:{size}:{size}]\n"
        f"buffer p{n} f32[{size // 2}] param bucket=b{n} sharded=dp\nbuffer f{n} f32[{size}] gathered bucket=b{n}\n"
        for n, size in enumerate(sizes)
    )
    ops = "".join(
        f"all_gather p{n} -> f{n}  axis=dp\nwait f{n}\n"
        f"run f{n} f{max(n - numbers.randint(0, 2), 0)} -> h  region=r0\n{'run s h -> s' * numbers.randint(0, 1)}\n"
        for n in range(layers)
    )
    return written(records + "buffer h f32[8] activation\nbuffer s f32[8] activation\nrun h -> h  region=r0\n" + ops)


@pytest.mark.parametrize("seed", range(8))
def test_each_gather_starts_as_early_as_depth_and_cap_allow(seed: int) -> None:
    """No gather of the result could start one run earlier."""
    numbers = random.Random(seed)
    before, depth = drawn(numbers), numbers.randint(1, 3)
    least, most = (prefetch(before, deep).gather_cap_bytes for deep in (0, depth))
    cap = numbers.randint(least, most)
    done = prefetch(before, depth, cap)
    assert max(gathered_bytes(done.ops, done.buffers)) <= cap
    for at, op in enumerate(done.ops):
        runs = [i for i, each in enumerate(done.ops[:at]) if each.in_region]
        users = (i for i, each in enumerate(done.ops) if each.is_run and op.target in {ref.name for ref in each.reads})
        first = next(users, at)
        passed = sum(each.in_region for each in done.ops[at:first])
        if op.gathers and runs and passed < depth:
            ops = [*done.ops[: runs[-1]], op, *done.ops[runs[-1] : at], *done.ops[at + 1 :]]
            assert max(gathered_bytes(replace(done, ops=tuple(ops)).ops, done.buffers)) > cap, op


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.sampled(2)
def test_gathered_bytes_stay_under_the_cap_and_more_depth_needs_more(depth: int) -> None:
    program = cases.lowered(params=cases.layers(depth=8), prefetch=depth).program
    held = max(gathered_bytes(program.ops, program.buffers))
    layer = program.buckets["layers.0"].length * 4
    assert held <= program.gather_cap_bytes
    assert held <= (depth + 1) * layer + sum(
        b.length * 4 for n, b in program.buckets.items() if not n.startswith("layers")
    )
    if depth:
        assert held > layer


def test_a_cap_holds_back_the_prefetch_and_one_too_small_is_refused() -> None:
    wide = cases.lowered(params=cases.layers(depth=4), prefetch=3).program
    least = cases.lowered(params=cases.layers(depth=4), prefetch=0).program.gather_cap_bytes
    capped = cases.lowered(params=cases.layers(depth=4), prefetch=3, gather_bytes=least).program
    assert max(gathered_bytes(capped.ops, capped.buffers)) <= least < max(gathered_bytes(wide.ops, wide.buffers))
    with pytest.raises(fzero.SpecError, match=f"The smallest cap is {least}"):
        cases.lowered(params=cases.layers(depth=4), gather_bytes=least - 1)


def test_bytes_to_which_gathers_start_early_are_never_too_few() -> None:
    """1 byte is the smallest cap; a cap that is smaller stays one, and is still refused where it is too small."""
    params = cases.layers(depth=4)
    none, wide = (cases.lowered(params=params, prefetch=depth).program for depth in (0, 3))
    least = none.gather_cap_bytes
    capped = cases.lowered(params=params, prefetch=3, gather_bytes=least).program
    assert list(cases.lowered(params=params, prefetch=3, prefetch_bytes=1).program.ops) == list(capped.ops)
    enough = cases.lowered(params=params, prefetch=3, prefetch_bytes=wide.gather_cap_bytes).program
    assert list(enough.ops) == list(wide.ops)
    assert (
        cases.lowered(params=params, prefetch=3, prefetch_bytes=1, gather_bytes=least).program.gather_cap_bytes == least
    )
    with pytest.raises(fzero.SpecError, match=f"The smallest cap is {least}"):
        cases.lowered(params=params, prefetch_bytes=1, gather_bytes=least - 1)


AGAIN = (
    "".join(f"buffer g{n} f32[64] gathered bucket=b{n}\n" for n in range(4))
    + """
    all_gather p0 -> f0  axis=dp
    wait f0
    run f0 -> h  phase=forward
    all_gather p1 -> f1  axis=dp
    wait f1
    run f1 -> h  phase=forward
    all_gather p0 -> g0  axis=dp
    wait g0
    run g0 -> h  phase=forward
    all_gather p1 -> g1  axis=dp
    wait g1
    run g1 -> h  phase=forward
"""
)


def reused(text: str, *options: int | None) -> list[str]:
    """The same of a program whose parameters are used again, with the weights' records of TEXT."""
    return starts(TEXT.partition("    run h -> h")[0] + text, *options)


def test_what_is_used_again_within_the_depth_is_not_gathered_again() -> None:
    apart = ["f0", "f0", "f1", "f1", "g0", "g0", "g1", "g1"]
    assert reused(AGAIN, 0) == apart
    assert reused(AGAIN, 1) == ["f0", "f1", "f0", "f1", "f0", "f1"]


def test_but_where_it_was_written_in_another_phase_or_over_the_cap() -> None:
    def again(text: str, *options: int | None) -> bool:
        return "g0" in reused(text, *options)

    assert not again(AGAIN, 1, 2 * ONE)
    assert again(AGAIN, 1, ONE), "two at once are over the cap"
    assert again(AGAIN.replace("run g0 -> h  phase=forward", "run g0 -> h  phase=backward"), 1)
    assert again(AGAIN.replace("    all_gather p0 -> g0", "    update m -> p0\n    all_gather p0 -> g0"), 1)
    more = "    run h -> h  phase=forward\n    all_gather p0 -> g0"
    assert again(AGAIN.replace("    all_gather p0 -> g0", more), 1)
    assert not again(AGAIN.replace("    all_gather p0 -> g0", more), 2)


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2])
def test_layers_that_share_their_weights(prefetch_depth: int) -> None:
    """Eight times the same two products: with two buckets each was gathered eight times in each direction."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        x = batch
        for _ in range(8):
            x = x + torch.tanh(x @ params["w"]) @ params["v"]
        return (x @ params["head"]).square().mean()

    draw = torch.Generator().manual_seed(0)
    params = {
        k: torch.randn(*s, generator=draw) / 8 for k, s in {"w": (64, 256), "v": (256, 64), "head": (64, 64)}.items()
    }
    batch = torch.randn(4, 64, generator=draw)

    def ran(**options: Any) -> Run:
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), mesh={"dp": 2}, **options)
        return run(spec, params, lambda rank, step: batch + rank, world=2, steps=2)

    found, plain = ran(zero=3, bucket_bytes=70_000, prefetch=prefetch_depth), ran(zero=0)
    gathers = [op for op in found.lowered.program.ops if op.gathers]
    assert len(gathers) == [32, 6, 5][prefetch_depth]
    assert all(torch.equal(found.final[path], plain.final[path]) for path in plain.final)
