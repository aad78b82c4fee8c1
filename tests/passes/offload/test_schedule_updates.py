"""schedule_updates: updates of what is held off the device come amid the backward; others stay at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
from passed import OFFLOADED, upto
from short_programs import lines, shown, written

import fzero
from fzero.ir.decisions import RoleDecisions
from fzero.ir.liveness import intervals
from fzero.ir.program import Program
from fzero.passes import PASSES, Options
from fzero.passes.offload.schedule_updates import schedule_updates
from fzero.verify.rules import verify

TEXT = """
    bucket b length=128 w[0:64:64] v[64:128:64]
    buffer mu f32[64] optimizer bucket=b sharded=dp space=host
    buffer mu.in f32[64] staging bucket=b sharded=dp
    buffer p f32[64] param bucket=b sharded=dp
    buffer x f32[8] batch
    buffer g f32[64] grad bucket=b sharded=dp
    buffer h f32[64] grad bucket=b sharded=dp
    buffer c f32[8] activation
    move mu -> mu.in
    wait mu.in
    run x -> g  region=r0
    run x -> h  region=r0
    run h -> c  flat=1
    update c p[64:128:mine] -> p[64:128:mine]
    update g[0:64:mine] mu.in[0:64:mine] p[0:64:mine] -> p[0:64:mine]  flat=1
    move mu.in -> mu
    wait mu
"""


def test_an_elementwise_update_comes_behind_its_gradient() -> None:
    """An update that is no elementwise work stays, and what only that one needs."""
    assert shown(schedule_updates(written(TEXT)).ops) == lines(
        """
        move mu -> mu.in
        wait mu.in
        run x -> g
        update g[0:64:mine] mu.in[0:64:mine] p[0:64:mine] -> p[0:64:mine]
        run x -> h
        run h -> c
        update c p[64:128:mine] -> p[64:128:mine]
        move mu.in -> mu
        wait mu
        """
    )


def test_a_step_that_holds_all_on_the_device_is_itself() -> None:
    program = written(TEXT.replace(" space=host", "").replace("move mu -> mu.in", "").replace("move mu.in -> mu", ""))
    assert schedule_updates(program) is program


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
    params = cases.layers(depth=5)
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
    assert peaks["schedule_updates"] == 6  # of five layers, and of the leaves beside them
    assert peaks[None] <= 3
