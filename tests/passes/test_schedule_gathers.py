"""schedule_gathers: how often a parameter is gathered, and before which of its uses."""

from __future__ import annotations

import pytest
from short_programs import lines, shown, written

from fzero.passes.schedule_gathers import schedule_gathers

TEXT = """
    bucket a length=64 w[0:64:64]
    bucket b length=64 v[0:64:64]
    buffer p:a f32[32] param bucket=a sharded=dp
    buffer p:b f32[32] param bucket=b sharded=dp
    buffer full:a f32[64] gathered bucket=a
    buffer full:b f32[64] gathered bucket=b
    buffer m f32[64] scratch bucket=a
    buffer h f32[8] activation
    all_gather p:a -> full:a  axis=dp  # whole a
    wait full:a
    all_gather p:b -> full:b  axis=dp  # whole b
    wait full:b
    all_gather p:a -> m  axis=dp
    wait m
    run h -> h
    run full:a[0:64:64] -> h  # first
    run full:a[0:64:64] m -> h  # second
    run full:b -> h  # third
    run h -> h
    run full:a full:b full:a[0:64:64] -> h  # last
"""


def test_neighbours_share_a_gather_and_uses_apart_have_their_own() -> None:
    done = schedule_gathers(written(TEXT))
    assert shown(done.ops) == lines(
        """
        all_gather p:a -> m  axis=dp
        wait m
        run h -> h
        all_gather p:a -> full:a.0  axis=dp
        wait full:a.0
        run full:a.0[0:64:64] -> h
        run full:a.0[0:64:64] m -> h
        all_gather p:b -> full:b.0  axis=dp
        wait full:b.0
        run full:b.0 -> h
        run h -> h
        all_gather p:a -> full:a.1  axis=dp
        wait full:a.1
        all_gather p:b -> full:b.1  axis=dp
        wait full:b.1
        run full:a.1 full:b.1 full:a.1[0:64:64] -> h
        """
    )
    assert {op.why for op in done.ops if op.target == "full:a.0"} == {"for first"}
    assert {op.why for op in done.ops if op.target == "full:b.1"} == {"for last"}
    assert {name for name in done.buffers if name.startswith("full")} == {f"full:{x}.{n}" for x in "ab" for n in (0, 1)}


def test_one_run_between_two_uses_parts_them() -> None:
    """A transfer, or a wait, does not."""
    apart = TEXT.replace("# first", "# first\n run h -> h")
    near = TEXT.replace("# first", "# first\n all_gather p:a -> m  axis=dp\n wait m")
    for text, gathers in ((TEXT, 2), (apart, 3), (near, 2)):
        done = schedule_gathers(written(text))
        assert sum(op.gathers and op.target.startswith("full:a") for op in done.ops) == gathers


def test_what_is_kept_is_gathered_once() -> None:
    text = TEXT.replace("bucket a length=64", "bucket a length=64 gathered=kept")
    done = schedule_gathers(written(text))
    assert [op.target for op in done.ops if op.gathers] == ["m", "full:a.0", "full:b.0", "full:b.1"]
    assert shown(done.ops)[-1] == "run full:a.0 full:b.1 full:a.0[0:64:64] -> h"


def test_what_nobody_reads_is_not_gathered() -> None:
    done = schedule_gathers(written(TEXT.replace("run full:b -> h", "run h -> h").replace("full:a full:b", "full:a")))
    assert "full:b.0" not in done.buffers
    assert all(op.target not in ("full:b", "full:b.0") for op in done.ops)


LAYER = """
    bucket a length=64 w/0/a[0:64:64]
    bucket b length=64 w/{0}/b[0:64:64]
    buffer p:a f32[32] param bucket=a sharded=dp
    buffer p:b f32[32] param bucket=b sharded=dp
    buffer full:a f32[64] gathered bucket=a
    buffer full:b f32[64] gathered bucket=b
    buffer h f32[8] activation
    buffer whole f32[16] activation
    all_gather p:a -> full:a  axis=dp
    wait full:a
    all_gather p:b -> full:b  axis=dp
    wait full:b
    run h full:a -> h  phase=forward
    {1}
    run h full:b -> h  phase=forward
    {1}
    run whole h -> h  phase={2}
    {1}
    run whole full:a[0:64:64] -> h  phase=forward
"""
MOVED = "all_gather h -> whole  axis=dp\n    wait whole"


@pytest.mark.parametrize(
    ("layer", "between", "phase", "gathers", "why"),
    [
        (0, MOVED, "forward", 1, "the layer is cut by transfers alone"),
        (0, "", "forward", 2, "it is cut to gather it piece by piece"),
        (1, MOVED, "forward", 2, "another layer runs between"),
        (0, MOVED, "backward", 2, "its backward runs between"),
    ],
)
def test_pieces_of_a_layer_between_transfers_of_values_share_a_gather(
    layer: int, between: str, phase: str, gathers: int, why: str
) -> None:
    """The complaint: over a model axis a parameter was gathered again for each piece of its layer."""
    done = schedule_gathers(written(LAYER.format(layer, between, phase)))
    assert sum(op.gathers and op.target.startswith("full:a") for op in done.ops) == gathers, why
