"""schedule_reductions: where a reduction starts, and where it is waited for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import cases
import pytest
from short_programs import lines, shown, written

import fzero
from fzero.ir.liveness import live_bytes
from fzero.ir.program import Program
from fzero.passes.schedule_reductions import schedule_reductions

BUFFERS = "".join(
    f"""
    bucket {name} length=64 w{name}[0:64:64]
    buffer g:{name} f32[64] grad bucket={name}
    buffer g2:{name} f32[64] grad bucket={name}
    buffer r:{name} f32[32] grad bucket={name} sharded=dp
    buffer o:{name} f32[32] grad bucket={name} sharded=dp
    buffer p:{name} f32[32] param bucket={name} sharded=dp
    buffer s:{name} f32[32] scratch bucket={name}
    """
    for name in "abc"
) + """
    buffer h f32[8] activation
    buffer n f32[1] activation
    buffer m f32[1] activation
"""  # fmt: skip
STEP = """
    run h -> g:a  region=r0
    run h -> g:b[0:32:32]  region=r0
    run h -> g:b[32:64:32]  region=r0
    run h -> g:c  region=r0
    all_reduce_small n -> m  axis=dp
    wait m
    reduce_scatter g:a -> r:a  axis=dp
    wait r:a
    reduce_scatter g:b -> r:b  axis=dp
    wait r:b
    reduce_scatter g:c -> r:c  axis=dp
    wait r:c
    run r:a r:b r:c m -> p:a  phase=outer
"""


def receiving(text: str) -> str:
    """The same ops with a buffer for what each reduction receives."""
    return re.sub(r"(reduce_scatter \S+ -> r:)(\w)", r"\1\2 s:\2", text)


def scheduled(text: str, *, overlap: bool = True, end: str = "", mesh: str = "dp=2") -> list[str]:
    """The ops of a step. end: the buckets that are reduced at the end."""
    records = BUFFERS
    for name in end:
        records = records.replace(f"bucket {name} length=64", f"bucket {name} length=64 reduced=end")
    program: Program = written(records + text, mesh=mesh)
    return shown(schedule_reductions(program, overlap).ops)


def test_no_more_than_a_layer_is_in_flight() -> None:
    """Of buckets as large as a layer that is one: the one before is waited for where the next starts."""
    assert scheduled(STEP) == lines(
        """
        run h -> g:a
        reduce_scatter g:a -> r:a  axis=dp
        run h -> g:b[0:32:32]
        run h -> g:b[32:64:32]
        wait r:a
        reduce_scatter g:b -> r:b  axis=dp
        run h -> g:c
        wait r:b
        reduce_scatter g:c -> r:c  axis=dp
        all_reduce_small n -> m  axis=dp
        wait m
        wait r:c
        run r:a r:b r:c m -> p:a
        """
    )


def test_the_buckets_of_a_layer_are_in_flight_together() -> None:
    """Two buckets of one layer, and the first of the next: the oldest is waited for."""
    records = BUFFERS.replace("wa[0:64:64]", "l/0/wa[0:64:64]").replace("wb[0:64:64]", "l/0/wb[0:64:64]")
    records = records.replace("wc[0:64:64]", "l/1/wc[0:64:64]")
    ops = shown(schedule_reductions(written(records + STEP, mesh="dp=2")).ops)
    assert ops[5:8] == lines("run h -> g:c\nwait r:a\nreduce_scatter g:c -> r:c  axis=dp")
    assert ops[-3:-1] == ["wait r:b", "wait r:c"]


def test_one_with_a_receive_buffer_is_waited_for_behind_the_next_segment() -> None:
    assert scheduled(receiving(STEP)) == lines(
        receiving(
            """
            run h -> g:a
            reduce_scatter g:a -> r:a  axis=dp
            run h -> g:b[0:32:32]
            wait r:a
            run h -> g:b[32:64:32]
            reduce_scatter g:b -> r:b  axis=dp
            run h -> g:c
            reduce_scatter g:c -> r:c  axis=dp
            wait r:c
            wait r:b
            all_reduce_small n -> m  axis=dp
            wait m
            run r:a r:b r:c m -> p:a
            """
        )
    )


def test_a_wait_comes_before_the_next_start() -> None:
    """However the reductions follow one another in the step."""
    text = """
        run h -> g:a  region=r0
        run h -> g:b  region=r0
        run h -> g:c  region=r0
        reduce_scatter g:b -> r:b  axis=dp
        wait r:b
        reduce_scatter g:a -> r:a  axis=dp
        wait r:a
    """
    expected = lines("run h -> g:b\nwait r:a\nreduce_scatter g:b -> r:b  axis=dp\nrun h -> g:c")
    assert scheduled(text)[2:6] == expected
    assert scheduled(receiving(text))[2:6] == lines(receiving("\n".join(expected)))


def test_at_stage_1_the_shares_of_a_layer_are_in_flight() -> None:
    """Of two ranks those of two: what is reduced has its room in any case."""
    done = scheduled(STEP, end="abc")
    first, *following = (f"reduce_scatter g:{name} -> r:{name}  axis=dp" for name in "abc")
    assert done[1] == first
    assert done[4:8] == [following[0], "run h -> g:c", "wait r:a", following[1]]
    assert done[-3:] == lines("wait r:b\nwait r:c\nrun r:a r:b r:c m -> p:a")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_at_stage_1_nccl_needs_no_more_than_a_layer_beside_whole_gradients(ranks: int) -> None:
    program = cases.lowered(ranks, zero=1, params=cases.layers(depth=6), device="cuda").program
    sizes = [bucket.length * 4 for bucket in program.buckets.values()]
    assert program.transport == "nccl"
    assert max(live_bytes(program.ops, program.buffers, lambda b: b.kind == "grad")) <= sum(sizes) + max(sizes)


def test_the_buckets_of_a_chunk_are_in_flight_together() -> None:
    """They are waited for where the first of the next chunk starts: in a pipeline others wait for a role that waits."""
    text = STEP.replace("g:a  region=r0", "g:a  region=r0 chunk=1").replace("]  region=r0", "]  region=r0 chunk=1")
    text = text.replace("g:c  region=r0", "g:c  region=r0 chunk=0")
    expected = lines("run h -> g:c  chunk=0\nwait r:a\nwait r:b\nreduce_scatter g:c -> r:c  axis=dp")
    program = written(BUFFERS + text, mesh="pp=2 dp=2")
    ops = shown(schedule_reductions(replace(program, role=0)).ops)
    assert ops[5:9] == expected
    sums = "".join(f"run g:{name} g2:{name} -> g:{name}  flat=1\n" for name in "abc")  # over microbatches, of no chunk
    program = written(BUFFERS + text.replace("all_reduce_small", f"{sums} all_reduce_small"), mesh="pp=2 dp=2")
    ops = shown(schedule_reductions(replace(program, role=0)).ops)
    assert ops[7:12] == [expected[0], "run g:c g2:c -> g:c", *expected[1:]]


def test_without_overlap_it_is_waited_for_at_once() -> None:
    assert scheduled(STEP, overlap=False)[:3] == ["run h -> g:a", "reduce_scatter g:a -> r:a  axis=dp", "wait r:a"]


def test_what_the_next_segment_reads_is_waited_for_at_once() -> None:
    text = STEP.replace("run h -> g:b[0:32:32]", "run r:a -> g:b[0:32:32]")
    text = text.replace(
        "run h -> g:a  region=r0", "run h -> g:a  region=r0\n reduce_scatter g:a -> r:a  axis=dp\n wait r:a"
    )
    text = text.replace("    reduce_scatter g:a -> r:a  axis=dp\n    wait r:a\n", "")
    assert scheduled(text)[1:4] == ["reduce_scatter g:a -> r:a  axis=dp", "wait r:a", "run r:a -> g:b[0:32:32]"]


def test_those_at_the_end_overlap_one_another() -> None:
    step = receiving(STEP)
    assert scheduled(step, end="abc")[4:] == lines(
        receiving("""
        all_reduce_small n -> m  axis=dp
        wait m
        reduce_scatter g:a -> r:a  axis=dp
        reduce_scatter g:b -> r:b  axis=dp
        wait r:a
        reduce_scatter g:c -> r:c  axis=dp
        wait r:b
        wait r:c
        run r:a r:b r:c m -> p:a
        """)
    )
    last = step.partition("    run r:a")[0]
    assert scheduled(last, end="abc")[-4:] == scheduled(step, end="abc")[-5:-1]
    apart = scheduled(step, end="abc", overlap=False)
    assert apart[-4:-1] == lines(receiving("wait r:b\nreduce_scatter g:c -> r:c  axis=dp\nwait r:c"))
    mixed = scheduled(step, end="ac")
    assert mixed[-5:-1] == lines(
        receiving("reduce_scatter g:a -> r:a  axis=dp\nreduce_scatter g:c -> r:c  axis=dp\nwait r:a\nwait r:c")
    )


def test_the_sum_over_a_further_axis_waits_for_the_first() -> None:
    """What it sums up is what the one before brings; nothing else follows from its order."""
    text = receiving(STEP).replace("wait r:a", "wait r:a\n all_reduce r:a -> o:a  axis=dp_out\n wait o:a")
    done = scheduled(text, end="abc", mesh="dp_out=2 dp=2")
    first, following = (receiving(f"reduce_scatter g:{name} -> r:{name}  axis=dp") for name in "ab")
    assert done[6:10] == [first, "wait r:a", "all_reduce r:a -> o:a  axis=dp_out", following]
    early = scheduled(text, mesh="dp_out=2 dp=2")
    assert early[1:4] == [first, "run h -> g:b[0:32:32]", "wait r:a"]
    assert early.index("all_reduce r:a -> o:a  axis=dp_out") > early.index("wait m"), "it stays where it was"


@pytest.mark.parametrize("end", ["", "abc"])
def test_the_sum_over_a_further_axis_starts_when_the_first_has_arrived(end: str) -> None:
    """The wire of each axis works beside the other and beside compute."""
    text = STEP
    for name in "abc":
        text = text.replace(
            f"wait r:{name}", f"wait r:{name}\n all_reduce r:{name} -> o:{name}  axis=dp_out\n wait o:{name}"
        )
    text = text.replace("run r:a r:b r:c m", "run o:a o:b o:c m")
    done = scheduled(text, end=end, mesh="dp_out=2 dp=2")
    places = [done.index(f"all_reduce r:{name} -> o:{name}  axis=dp_out") for name in "abc"]
    assert all(done.index(f"wait r:{name}") < at for name, at in zip("abc", places, strict=True))
    assert (places[0] < done.index("run h -> g:c")) == (end == "")
    assert [op for op in done if op.startswith("wait o")] == ["wait o:a", "wait o:b", "wait o:c"]
    assert done.index("wait o:a") > places[0] + 1 or end


@pytest.mark.parametrize("end", ["", "abc"])
def test_so_does_one_whose_source_is_coded_anew(end: str) -> None:
    """What an op makes of the first sum is sent as early, and at stage 1 it is no gradient of another microbatch."""
    text = STEP.replace("run r:a r:b r:c m", "run o:a o:b o:c m")
    for name in "abc":
        coded = f"wait r:{name}\n run r:{name} -> g2:{name}[0:32:32] flat=1\n"
        text = text.replace(f"wait r:{name}", f"{coded} all_to_all g2:{name} -> o:{name}  axis=dp_out\n wait o:{name}")
    done = scheduled(text, end=end, mesh="dp_out=2 dp=2")
    last = done.index("run h -> g:c")
    assert (done.index("wait r:a") < last) == (end == "")
    assert (done.index("all_to_all g2:a -> o:a  axis=dp_out") < last) == (end == "")


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_to_all", "all_reduce"])
def test_every_kind_that_brings_gradients_together_moves(kind: str) -> None:
    assert f"{kind} g:a -> r:a  axis=dp" == scheduled(STEP.replace("reduce_scatter g:a", f"{kind} g:a"))[1]


@pytest.mark.parametrize("received", [False, True])
def test_the_last_reduction_of_a_microbatch_is_beside_the_forward_of_the_next(received: bool) -> None:
    """It was waited for at once, for the sum over microbatches, in all microbatches but the first. So it still is where
    it receives into memory of the program, as on the processor: by the clock of two ranks nothing is gained there."""
    text = """
        run h -> g:a  region=r0
        reduce_scatter g:a -> r:a  axis=dp
        wait r:a
        run o:a r:a -> o:a  flat=1
        run h -> n  region=r0
        run h -> g2:a  region=r0
        reduce_scatter g2:a -> p:a  axis=dp
        wait p:a
        run o:a p:a -> o:a  flat=1
    """
    done = scheduled(receiving(text) if received else text)
    start, wait = f"reduce_scatter g:a -> r:a{' s:a' * received}  axis=dp", done.index("wait r:a")
    assert done[1] == start
    assert done[wait + 1] == "run o:a r:a -> o:a"
    assert done.index("run h -> n") == (4 if received else 2)
    assert wait == (2 if received else 4)


def test_a_sum_over_microbatches_follows_its_last_term() -> None:
    """Elementwise work of no phase comes right behind what it needs; other work of the step stays."""
    text = """
        run h -> g:a  region=r0
        run h -> g2:a  region=r0
        run h -> g2:b  region=r0
        run h -> g:b  region=r0
        run g:a g2:a -> g:a  flat=1
        run g:b g2:b -> g:b  flat=1
        run g:a -> h  flat=1  phase=outer
        run g:b -> h
        reduce_scatter g:a -> r:a  axis=dp
        wait r:a
    """
    assert scheduled(text) == lines(
        """
        run h -> g:a
        run h -> g2:a
        run g:a g2:a -> g:a
        reduce_scatter g:a -> r:a  axis=dp
        run h -> g2:b
        run h -> g:b
        run g:b g2:b -> g:b
        run g:a -> h
        run g:b -> h
        wait r:a
        """
    )


def test_sums_that_follow_one_another_keep_their_order() -> None:
    text = """
        run h -> g:a  region=r0
        run h -> g2:a  region=r0
        run h -> g2:b  region=r0
        run g:a g2:a -> g:a  flat=1
        run g:a g2:a -> o:a  flat=1
        run g2:a -> o:b  flat=1
    """
    assert scheduled(text)[2:] == lines("run g:a g2:a -> g:a\nrun g:a g2:a -> o:a\nrun g2:a -> o:b\nrun h -> g2:b")
    nothing = "run h -> g:a  region=r0\nrun -> g:b  flat=1"
    assert scheduled(nothing) == ["run  -> g:b", "run h -> g:a"], "what needs nothing comes first"


def test_a_full_gradient_bucket_never_outlives_its_reduction_under_2_and_does_under_1() -> None:
    def most_grads(zero: int, **given: Any) -> int:
        program = cases.lowered(zero=zero, params=cases.layers(depth=6), prefetch=0, **given).program
        live: set[str] = set()
        most = 0
        for op in program.ops:
            live |= {r.name for r in op.writes if ".grad:layers" in r.name}
            live -= {r.name for r in op.reads} if op.is_free else set()
            most = max(most, len(live))
        return most

    assert most_grads(1) == 6
    assert most_grads(2) <= 2  # the one being reduced and the one being filled
    assert most_grads(2, device="cuda") <= 2


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp_out": 2, "dp": 2}])
def test_with_each_microbatch_stage_1_holds_no_more_gradients_than_2(mesh: dict[str, int]) -> None:
    """It sends as much then; else its gradients are whole at the backward's end, beside the shares of the others."""

    def grads(zero: int, reduce: str) -> int:
        lowered = cases.lowered(
            zero=zero, params=cases.layers(depth=6), prefetch=0, microbatches=2, reduce=reduce, mesh=mesh, world=4
        )
        program = lowered.program
        level = live_bytes(program.ops, program.buffers, lambda b: b.kind == "grad")
        return max(level)

    assert grads(1, "each") == grads(2, "each") < grads(1, "end")


def test_a_reduction_under_2_is_waited_for_after_at_most_one_more_segment() -> None:
    program = cases.lowered(zero=2, params=cases.layers(depth=6)).program
    started: dict[str, int] = {}
    segments_run = list(accumulate(op.in_region for op in program.ops))
    for i, op in enumerate(program.ops):
        if op.reduces:
            started[op.writes[0].name] = segments_run[i]
        if op.is_wait and op.reads[0].name in started:
            assert segments_run[i] - started[op.reads[0].name] <= 1, op


def test_no_overlap_waits_where_it_starts() -> None:
    ops = cases.lowered(overlap=False, params=cases.layers(depth=3)).program.ops
    for i, op in enumerate(ops):
        if op.is_collective:
            assert ops[i + 1].is_wait
            assert ops[i + 1].reads[0].name == op.writes[0].name


@pytest.mark.parametrize("zero", [0, 1, 2, 3, "hsdp"])
@pytest.mark.parametrize("reduce", ["each", "end"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.sampled(3)
def test_a_role_holds_the_gradients_of_one_microbatch(zero: Any, reduce: str, schedule: str) -> None:
    """Of a pipeline: as many microbatches in flight need as much, however many there are in a step."""
    mesh = {"pp": 2, "dp_out": 2, "dp": 2} if zero == "hsdp" else {"pp": 2, "dp": 2}
    init, loss = cases.tied(64, 32, 4)

    def peak(microbatches: int) -> int:
        spec = fzero.Spec(
            loss=loss, optimizer=fzero.optim.adamw(1e-2), mesh=mesh, zero=zero, reduce=reduce,
            microbatches=microbatches, pipeline=schedule,
        )  # fmt: skip
        batch = cases.tokens(microbatches, 4, 64)
        return fzero.lower(spec, init(fzero.random.key(0)), batch, world_size=math.prod(mesh.values())).memory.peak

    layer = 4 * (32 * 32 + 32)
    assert peak(8) - peak(4) < layer


def test_in_a_pipeline_stage_1_starts_none_in_the_backward() -> None:
    records = re.sub(r"(bucket \w length=64)", r"\1 reduced=end", BUFFERS)
    program = written(records + STEP.replace("region=r0", "region=r0 chunk=0"), mesh="pp=2 dp=2")
    ops = shown(schedule_reductions(replace(program, role=0)).ops)
    assert ops[6:11] == lines(
        """
        reduce_scatter g:a -> r:a  axis=dp
        reduce_scatter g:b -> r:b  axis=dp
        wait r:a
        reduce_scatter g:c -> r:c  axis=dp
        wait r:b
        """
    )
