"""split_gathers: a gather over two axes as one over each: what is between them, where the outer one starts."""

from __future__ import annotations

from short_programs import buffer_lines, lines, shown, written

from fzero.ir.program import Program
from fzero.passes.split_gathers import split_gathers

TEXT = """
    bucket b0 length=256 w0[0:256:256]
    bucket b1 length=256 w1[0:256:256]
    buffer p0 f32[64] param bucket=b0 sharded=dp.dp_out entry=params
    buffer p1 f32[64] param bucket=b1 sharded=dp.dp_out entry=params
    buffer f0 f32[256] gathered bucket=b0 entry=params
    buffer f1 f32[256] gathered bucket=b1 entry=params
    buffer f2 f32[256] gathered bucket=b0 entry=params
    buffer h f32[64] activation
    buffer v f32[256] activation
    run h -> h
    all_gather p0 -> f0  axis=dp.dp_out  # for 0
    wait f0
    run f0 -> h
    all_gather p1 -> f1  axis=dp.dp_out  # for 1
    wait f1
    run f1 -> h
    all_gather p0 -> f2  axis=dp.dp_out  # for 2
    wait f2
    run f2 -> h
"""


def split(text: str = TEXT, *, ahead: bool = True) -> Program:
    return split_gathers(written(text, mesh="dp_out=2 dp=2"), ahead)


def test_the_outer_gather_starts_where_the_one_before_is_waited_for() -> None:
    done = split()
    assert shown(done.ops) == lines(
        """
        all_gather p0 -> f0.near  axis=dp_out
        run h -> h
        all_gather p1 -> f1.near  axis=dp_out
        wait f0.near
        all_gather f0.near -> f0  axis=dp
        wait f0
        run f0 -> h
        all_gather p0 -> f2.near  axis=dp_out
        wait f1.near
        all_gather f1.near -> f1  axis=dp
        wait f1
        run f1 -> h
        wait f2.near
        all_gather f2.near -> f2  axis=dp
        wait f2
        run f2 -> h
        """
    )
    assert [op.why for op in done.ops if op.axis == "dp_out"] == [f"for {n} over dp_out" for n in range(3)]
    assert {op.why for op in done.ops if op.is_wait and op.target == "f0.near"} == {"for 0 over dp_out"}
    near = "buffer f0.near f32[128] gathered bucket=b0 sharded=dp entry=params"
    assert buffer_lines(done)["f0.near"] == near
    assert done.gather_cap_bytes == (256 + 128 + 128) * 4, "one is whole, and the larger slice of it and of the next"


def test_not_ahead_each_is_waited_for_at_its_start() -> None:
    done = split(ahead=False)
    assert shown(done.ops)[:5] == lines(
        """
        run h -> h
        all_gather p0 -> f0.near  axis=dp_out
        wait f0.near
        all_gather f0.near -> f0  axis=dp
        wait f0
        """
    )
    assert done.gather_cap_bytes == (256 + 128) * 4


def test_a_bucket_with_a_copy_keeps_its_larger_slice_until_its_source_is_written() -> None:
    text = TEXT.replace("bucket b0 length=256", "bucket b0 length=256 copy=dp")
    done = split(text)
    assert [f"{op.target} of {op.reads[0].name}" for op in done.ops if op.gathers] == [
        "f0.near of p0", "f1.near of p1", "f0 of f0.near", "f1 of f1.near", "f2 of f0.near",
    ]  # fmt: skip
    assert done.gather_cap_bytes == (256 + 128 + 128) * 4
    written_again = split(text.replace("run f1 -> h", "update f1 -> p0"))
    assert shown(written_again.ops)[-7:] == lines(
        """
        wait f1
        update f1 -> p0
        all_gather p0 -> f2.near  axis=dp_out
        wait f2.near
        all_gather f2.near -> f2  axis=dp
        wait f2
        run f2 -> h
        """
    )


def test_the_outer_gather_starts_behind_what_brings_its_source() -> None:
    """A write, or the wait for a transfer into it."""
    move = "buffer q f32[64] param bucket=b0 sharded=dp.dp_out space=host\n" + TEXT
    done = shown(split(move.replace("run h -> h", "move q -> p0\n run h -> h\n wait p0\n run h -> h")).ops)
    assert done[2:5] == ["wait p0", "all_gather p0 -> f0.near  axis=dp_out", "run h -> h"]
    done = shown(split(TEXT.replace("run h -> h", "run h -> p0")).ops)
    assert done[:2] == ["run h -> p0", "all_gather p0 -> f0.near  axis=dp_out"]
    done = shown(split(TEXT.replace("run f0 -> h", "run f0 -> p1\n run h -> h")).ops)
    at = done.index("run f0 -> p1")
    assert done[at + 1] == "all_gather p1 -> f1.near  axis=dp_out"


def test_other_gathers_stay_whole() -> None:
    """Those over one axis, and those of a value, which has no slices along one."""
    text = TEXT.replace("all_gather p0 -> f0  axis=dp.dp_out", "all_gather h -> v  axis=dp.dp_out").replace(
        "wait f0\n    run f0", "wait v\n    run v"
    )
    done = shown(split(text).ops)
    assert "all_gather h -> v  axis=dp.dp_out" in done
    alone = "all_gather p1 -> f1  axis=dp"
    assert alone in shown(split(TEXT.replace("p1 -> f1  axis=dp.dp_out", "p1 -> f1  axis=dp")).ops)


def test_a_slice_of_the_state_gathered_in_place_passes_through_scratch() -> None:
    """Its codes too have as many elements as their share of the slice."""
    text = TEXT.replace("buffer f0 f32[256] gathered bucket=b0", "buffer f0 u8[4] param bucket=b0 per=64")
    assert buffer_lines(split(text))["f0.near"] == (
        "buffer f0.near u8[2] scratch bucket=b0 sharded=dp per=64 entry=params"
    )
