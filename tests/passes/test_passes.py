"""Passes by what they promise: the same meaning, bytes, an order. Their texts are in test_goldens."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import Any

import cases
import pytest
import torch
from passed import OFFLOADED, Stage, segment_texts, stages, upto

import fzero
from fzero.cost.memory import account
from fzero.ir.code_ops import OPS
from fzero.ir.decisions import RoleDecisions
from fzero.ir.liveness import gathered_bytes, intervals
from fzero.ir.program import Program, wire_bytes
from fzero.passes import PASSES, Options, trail
from fzero.passes.accumulate import accumulate as sums_in_segments
from fzero.passes.cast_before_gather import _nbytes
from fzero.passes.offload.schedule_updates import schedule_updates
from fzero.verify import abstract
from fzero.verify.rules import verify


@cache
def pure_stages(zero: int) -> dict[str, Stage]:
    return stages(cases.naive(zero=zero, microbatches=2, clip_norm=1.0), Options())


def test_one_leafs_gradient_lives_beside_the_sum_over_microbatches() -> None:
    """Without the pass those of a layer do: here 8 leaves."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in p["layers"]:
            for w in layer:
                x = torch.tanh(x @ w)
        return x.square().mean()

    params = {"layers": [[torch.empty(64, 64, device="meta") for _ in range(8)] for _ in range(2)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(0.1), microbatches=4, mesh={"dp": 1})
    every = without = fzero.lower(spec, params, torch.empty(4, 64, device="meta")).naive
    for name, run, _ in PASSES:
        every = run(every, Options())
        without = without if name == "accumulate" else run(without, Options())
    verify(every)
    assert not [op for op in every.ops if op.why.startswith("add gradients")]
    leaf, slack = 4 * 64 * 64, 4 * 64 * 64
    assert account(without).peak - account(every).peak >= 8 * leaf - leaf - slack
    assert account(every).peak <= (3 * 16 + 16 + 1) * leaf + slack  # state, sums, one gradient


def test_a_sum_that_is_read_on_the_way_stays_a_sum() -> None:
    """A region that writes a sum out of order, or an op that reads it, keeps the op that adds."""
    program = upto("schedule_reductions", cases.naive(zero=1, microbatches=2, reduce="end"))
    at = next(i for i, op in enumerate(program.ops) if op.why.startswith("add gradients of layers.0"))
    total = program.ops[at].writes[0].name
    first = next(i for i, op in enumerate(program.ops) if total in {ref.name for ref in op.writes})
    peek = replace(program.ops[at], why="peek")
    read = replace(program, ops=(*program.ops[: first + 1], peek, *program.ops[first + 1 :]))
    kept = [op.why for op in sums_in_segments(read).ops if op.is_flat and op.why.startswith("add ")]
    assert kept == ["add gradients of layers.0"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [name for name, _, _ in PASSES])
@pytest.mark.sampled(8)
def test_a_pass_is_pure_and_its_result_verifies(name: str, zero: int) -> None:
    found = pure_stages(zero)
    names = list(found)
    before = found[names[names.index(name) - 1]]
    after = next(run for each, run, _ in PASSES if each == name)(before.program, Options())
    assert str(before.program) == before.text
    assert segment_texts(before.program) == before.segments
    assert str(after) == found[name].text, "the same again"
    verify(after)


@pytest.mark.parametrize("zero", [0, 1, 2, 3, {"layers/1/**": 3, "**": 1}])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.sampled(4)
def test_every_pass_keeps_the_meaning(zero: Any, world: int) -> None:
    meanings = set()

    def check(program: Program) -> None:
        meanings.add(abstract.program_meaning(program))

    program = cases.naive(world, zero=zero, optimizer=fzero.optim.adamw(1e-3, mask="**/w"), clip_norm=1.0)
    for _, after in trail(program, Options()):
        check(after)
    assert meanings == {program.meaning}


def test_stages_share_one_meaning_but_for_the_reduction_of_microbatches() -> None:
    """Without microbatches the four stages compute the same thing, and verify knows it before anything runs."""
    paths = [cases.lowered(zero=zero).program.meaning for zero in (0, 1, 2, 3)]
    # buffers are named by place, which the stages share, so the digests are comparable
    assert len(set(paths)) == 1


def test_a_full_gradient_bucket_never_outlives_its_reduction_under_2_and_does_under_1() -> None:
    def most_grads(zero: int) -> int:
        program = cases.lowered(zero=zero, params=cases.layers(depth=6), prefetch=0).program
        live: set[str] = set()
        most = 0
        for op in program.ops:
            live |= {r.name for r in op.writes if ".grad:layers" in r.name}
            live -= {r.name for r in op.reads} if op.is_free else set()
            most = max(most, len(live))
        return most

    assert most_grads(1) == 6
    assert most_grads(2) <= 2  # the one being reduced and the one being filled


def test_a_reduction_under_2_is_waited_for_after_at_most_one_more_segment() -> None:
    program = cases.lowered(zero=2, params=cases.layers(depth=6)).program
    started: dict[str, int] = {}
    segments_run = list(accumulate(op.in_region for op in program.ops))
    for i, op in enumerate(program.ops):
        if op.reduces:
            started[op.writes[0].name] = segments_run[i]
        if op.is_wait and op.reads[0].name in started:
            assert segments_run[i] - started[op.reads[0].name] <= 1, op


@cache
def lowered_gpt(depth: int) -> fzero.Lowered:
    init, loss = cases.gpt(depth=depth)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=3)
    return fzero.lower(spec, init, cases.tokens(2, 32, 512), world_size=4)


@pytest.mark.parametrize("depth", [6, *(pytest.param(depth, marks=pytest.mark.acceptance) for depth in (12, 24))])
def test_equal_layers_have_at_most_six_unique_segments(depth: int) -> None:
    made = lowered_gpt(depth)
    runs = [op for op in made.program.ops if op.in_region]
    assert len({op.segment for op in runs}) <= 6
    assert len(runs) == 2 * depth + 3


def test_identical_layers_get_identical_buckets() -> None:
    buckets = lowered_gpt(6).plan.buckets
    geometry = {
        tuple((slot.start, slot.stop, slot.shape) for slot in b.slots)
        for n, b in buckets.items()
        if n.startswith("blocks")
    }
    assert len(geometry) == 1


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


def test_of_two_forms_of_a_leaf_the_one_of_fewer_bytes_is_gathered() -> None:
    """An element of a block of 64 in 8 bits takes one byte, and a 16th for the block's number."""
    assert [_nbytes(form) for form in (torch.float32, torch.bfloat16)] == [4, 2]
    assert _nbytes(OPS["int8"]) == Fraction(17, 16) < _nbytes(torch.bfloat16)


def test_casts_before_the_gather_halve_what_is_gathered() -> None:
    wide, low = (cases.lowered(loss=loss).program for loss in (cases.layers_loss, cases.bf16_loss))
    gathered = [sum(wire_bytes(p, op) for op in p.ops if op.gathers) for p in (wide, low)]
    assert gathered[1] * 2 == gathered[0]


def test_a_mixed_use_is_gathered_as_it_is() -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return cases.bf16_loss(params, x) + sum((p**2).sum() for p in fzero.tree.flatten(params)[1])

    program = cases.lowered(loss=loss).program
    assert all(program.buffers[op.writes[0].name].dtype == torch.float32 for op in program.ops if op.gathers)


def test_the_adamw_update_is_one_in_place_op_a_bucket() -> None:
    program = lowered_gpt(6).program
    updates = [op for op in program.ops if op.is_update and op.is_flat]
    assert len(updates) == len(program.buckets)
    for op in updates:
        graph = program.segments[op.segment].graph
        assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.ops.fzero.adamw_.default]
        assert op.workspace == 0


def test_no_overlap_waits_where_it_starts() -> None:
    ops = cases.lowered(overlap=False, params=cases.layers(depth=3)).program.ops
    for i, op in enumerate(ops):
        if op.is_collective:
            assert ops[i + 1].is_wait
            assert ops[i + 1].reads[0].name == op.writes[0].name


def test_everything_but_state_and_metrics_is_freed() -> None:
    program = cases.lowered(microbatches=2, clip_norm=1.0).program
    freed = {r.name for op in program.ops if op.is_free for r in op.reads}
    kept = {n for n in program.buffers if n not in freed}
    assert kept == {
        n for n, b in program.buffers.items() if b.kind in ("param", "optimizer", "state", "batch", "metric")
    }


# --- updates amid the backward ----------------------------------------------------------------------------------------


def offloaded(world: int = 2, **options: Any) -> Program:
    """After the pass, with copies on the device for the whole step still."""
    return upto("schedule_updates", cases.naive(world, cases.layers(depth=3), **{**OFFLOADED, **options}))


def ends_of_gradients(program: Program) -> list[tuple[str, int, int]]:
    """(leaves, the op that completes their gradient, their update), in order."""
    updates = [(i, op) for i, op in enumerate(program.ops) if op.is_update and op.is_flat]
    found = []
    for at, update in updates:
        names = {ref.name for ref in update.reads if program.buffers[ref.name].kind == "grad"}
        ends = [
            i
            for i, op in enumerate(program.ops[:at])
            if names & {r.name for r in (op.reads if op.is_wait else op.writes)}
        ]
        found.append((update.why, ends[-1], at))
    return found


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "reduce": "each"}, {"zero": 2}], ids=str)
def test_an_update_follows_its_gradient(options: dict[str, Any]) -> None:
    program = offloaded(**options)
    verify({0: program, 1: program})
    last_loss = max(i for i, op in enumerate(program.ops) if op.in_region)
    early = [(complete, at) for _, complete, at in ends_of_gradients(program) if at < last_loss]
    assert len(early) >= 2
    assert not [i for complete, at in early for i in range(complete + 1, at) if program.ops[i].in_region]


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"precision": "fp16"}], ids=str)
def test_an_update_that_needs_every_gradient_stays_behind_all(options: dict[str, Any]) -> None:
    lowered = cases.lowered(2, **{**OFFLOADED, **options})
    program = lowered.after("schedule_updates")
    last_loss = max(i for i, op in enumerate(program.ops) if op.in_region)
    assert all(at > last_loss for _, _, at in ends_of_gradients(program))


def test_a_step_that_holds_all_on_the_device_keeps_its_order() -> None:
    before = upto("write_in_place", cases.naive(zero=3, optimizer=fzero.optim.adamw(1e-3)))
    assert schedule_updates(before) is before


def test_an_update_before_the_last_use_of_the_old_value_is_refused() -> None:
    """Alone, a rank reads a layer's parameters in place after the layer's gradient is there: the update waits."""
    program = offloaded(1)
    verify(program)
    refused = 0
    for _, _, at in ends_of_gradients(program):
        update = program.ops[at]
        written, grads = ({ref.name for ref in refs} for refs in (update.writes, update.reads))
        uses = [i for i, op in enumerate(program.ops[:at]) if op.in_region]
        last = max(i for i in uses if written & {ref.name for ref in program.ops[i].reads})
        complete = max(i for i in uses if grads & {ref.name for ref in program.ops[i].writes})
        if complete < last:
            ops = list(program.ops)
            ops.insert(last, ops.pop(at))
            with pytest.raises(fzero.VerifyError, match=r"\[meaning\] the end: the step computes something else"):
                verify(replace(program, ops=tuple(ops)))
            refused += 1
    assert refused


def test_gradients_end_with_their_updates() -> None:
    """Without the pass all slices of gradients are alive at once, at the step's end."""
    params = cases.layers(depth=8)
    naive = cases.naive(2, params, **OFFLOADED)
    peaks = {}
    for skipped in ("schedule_updates", None):
        program = naive
        for name, run, _ in PASSES:
            program = (
                program if name == skipped else run(program, Options(decided=RoleDecisions().but(tile_bytes=2048 * 4)))
            )
        verify({0: program, 1: program})
        lives = intervals(program.ops, program.buffers)
        own = [lives[name] for name, b in program.buffers.items() if b.kind == "grad" and b.sharded]
        peaks[skipped] = max(sum(first <= i <= last for first, last in own) for i in range(len(program.ops)))
    assert peaks["schedule_updates"] == 9  # of eight layers, and of the leaves beside them
    assert peaks[None] <= 3
