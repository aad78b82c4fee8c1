"""Passes by what they promise: the same meaning, bytes, an order. Their texts are in test_goldens."""

from __future__ import annotations

from functools import cache
from typing import Any

import cases
import pytest
import torch
from passed import OFFLOADED, Stage, segment_texts, stages, upto

import fzero
from fzero.ir.decisions import RoleDecisions
from fzero.ir.program import Program
from fzero.passes import PASSES, Options, PassRecord, optimise, trail
from fzero.passes.free import free
from fzero.verify import abstract
from fzero.verify.rules import verify


@cache
def pure_stages(zero: int) -> dict[str, Stage]:
    return stages(cases.naive(zero=zero, microbatches=2, clip_norm=1.0), Options())


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


def test_the_adamw_update_is_one_in_place_op_a_bucket() -> None:
    program = lowered_gpt(6).program
    updates = [op for op in program.ops if op.is_update and op.is_flat]
    assert len(updates) == len(program.buckets)
    for op in updates:
        graph = program.segments[op.segment].graph
        assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.ops.fzero.adamw_.default]
        assert op.workspace == 0


# --- what they are told, and what they tell ---------------------------------------------------------------------------


def waited_at_once(program: Program) -> list[bool]:
    """Of each gather, whether the next op waits for it."""
    following = zip(program.ops, program.ops[1:], strict=False)
    return [op.is_wait and op.target == gather.target for gather, op in following if gather.gathers]


def test_decisions_reach_their_passes() -> None:
    naive = cases.naive(zero=3)
    ahead = upto("prefetch", naive, Options(decided=RoleDecisions().but(prefetch=1)))
    plain = Options(overlap=False, decided=RoleDecisions().but(prefetch=1))
    assert not all(waited_at_once(ahead))
    assert all(waited_at_once(upto("prefetch", naive, plain))), "nothing is prefetched without overlap"
    caps = [upto("prefetch", naive, Options(decided=RoleDecisions().but(prefetch=n))).gather_cap_bytes for n in (0, 2)]
    assert caps[0] < caps[1], "more is gathered at one time"


def test_memory_of_the_host_is_freed_as_many_runs_later_as_fetches_start_early() -> None:
    """A fetch may else go to what the run before it reads."""
    on_host = RoleDecisions().but(update_on="cpu", tile_bytes=2048 * 4)
    program = upto("place_moves", cases.naive(**OFFLOADED), Options(decided=on_host))
    run = next(run for name, run, _ in PASSES if name == "free")
    texts = [str(run(program, Options(decided=on_host.but(fetch_ahead=ahead)))) for ahead in (1, 3)]
    assert texts == [str(free(program, linger)) for linger in (0, 2)]
    assert texts[0] != texts[1]


def test_a_record_says_what_a_pass_changed() -> None:
    before = upto("place_moves", cases.naive(zero=3))
    after, records = optimise(before, Options(), PASSES[-4:-2])
    assert [record.name for record in records] == ["free", "size_workspaces"]
    freed = sum(op.is_free for op in after.ops)
    assert str(records[0]) == f"free: free 0 -> {freed}  # lifetimes are final now"
    assert str(records[1]) == "size_workspaces: as many ops of each kind  # the account needs the final segments"
    assert str(PassRecord.of("back", "why", after, before)) == f"back: free {freed} -> 0  # why"
