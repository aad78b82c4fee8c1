"""schedule_updates: updates of what is held off the device come amid the backward; others stay at the end."""

from __future__ import annotations

from short_programs import lines, shown, written

from fzero.passes.offload.schedule_updates import schedule_updates

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
