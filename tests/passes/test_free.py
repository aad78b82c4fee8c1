"""free: what is freed behind which op, and what is never."""

from __future__ import annotations

import cases
from short_programs import lines, shown, written

from fzero.ir.program import Level
from fzero.passes.free import free

TEXT = """
    buffer p f32[8] param
    buffer x f32[8] batch
    buffer a f32[8] activation
    buffer b f32[8] activation
    buffer c f32[8] activation
    buffer d f32[8] activation space=host
    buffer e f32[8] activation space=host
    buffer loss f32[] metric
    metric loss loss
    run x p -> b a
    run b a -> c
    move c -> d
    run a -> loss
    wait d
    run d -> e
    run x -> b
    run b -> p
    run p -> a
"""


def test_each_is_freed_behind_its_last_use() -> None:
    """A transfer's buffers behind its wait; what lives on, never; one that is made again, once."""
    done = free(written(TEXT))
    assert shown(done.ops) == lines(
        """
        run x p -> b a
        run b a -> c
        move c -> d
        run a -> loss
        wait d
        free c
        run d -> e
        free d e
        run x -> b
        run b -> p
        free b
        run p -> a
        free a
        """
    )
    assert done.level == Level.FREED
    assert {op.why for op in done.ops if op.is_free} == {"last use"}


def test_what_the_host_used_last_lingers_for_some_runs() -> None:
    """No longer than until the step's last."""
    assert shown(free(written(TEXT), 1).ops)[7:9] == ["run x -> b", "free d e"]
    for linger in (3, 9):
        done = shown(free(written(TEXT), linger).ops)
        assert done[-2] == "run p -> a"
        assert done[-1] in ("free a d e",) or sorted(done[-1].split()[1:]) == ["a", "d", "e"]
    assert "free c" in shown(free(written(TEXT), 9).ops)[5:6], "a transfer's source does not"


def test_everything_but_state_and_metrics_is_freed() -> None:
    program = cases.lowered(microbatches=2, clip_norm=1.0).program
    freed = {r.name for op in program.ops if op.is_free for r in op.reads}
    kept = {n for n in program.buffers if n not in freed}
    assert kept == {
        n for n, b in program.buffers.items() if b.kind in ("param", "optimizer", "state", "batch", "metric")
    }
