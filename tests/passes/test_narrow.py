"""narrow: which values stay slices, and which reductions give all of a gradient."""

from __future__ import annotations

from dataclasses import replace

from short_programs import buffer_lines, lines, shown, written

from fzero.ir.program import Program
from fzero.passes.narrow import narrow

TEXT = """
    bucket b length=128 w[0:64:8x8] v[64:128:64]
    buffer p f32[64] param bucket=b sharded=dp
    buffer mu f32[64] optimizer bucket=b sharded=dp
    buffer p.full f32[128] gathered bucket=b
    buffer mu.full f32[128] gathered bucket=b
    buffer g f32[128] grad bucket=b
    buffer r f32[64] grad bucket=b sharded=dp
    buffer r.scratch f32[1x64] scratch
    buffer r.full f32[128] grad bucket=b
    buffer h f32[64] activation
    all_gather p -> p.full  axis=dp
    wait p.full
    all_gather mu -> mu.full  axis=dp
    wait mu.full
    run p.full[0:64:8x8] -> g[0:64:8x8] g[64:128:64]
    reduce_scatter g -> r r.scratch  axis=dp
    wait r
    all_gather r -> r.full  axis=dp
    wait r.full
    run r.full[0:128:mine] mu.full[0:128:mine] p.full[0:128:mine] -> mu[0:128:mine]
"""


def narrowed(text: str = TEXT, mesh: str = "dp=2", *, when: str = "produced") -> Program:
    """when: gradients are reduced; at the "end" ranks keep all of them."""
    program = written(text, mesh=mesh)
    return narrow(replace(program, buckets={"b": replace(program.buckets["b"], reduce_when=when)}))


def reductions(program: Program) -> list[tuple[str, str | None]]:
    return [(op.kind, op.axis) for op in program.ops if op.reduces]


def test_what_is_read_as_the_own_slice_is_not_gathered() -> None:
    """A parameter of which a leaf is read whole still is, and its slice is read from the slice."""
    assert shown(narrowed().ops) == lines(
        """
        all_gather p -> p.full  axis=dp
        wait p.full
        run p.full[0:64:8x8] -> g[0:64:8x8] g[64:128:64]
        reduce_scatter g -> r r.scratch  axis=dp
        wait r
        run r[0:128:mine] mu[0:128:mine] p[0:128:mine] -> mu[0:128:mine]
        """
    )
    assert set(narrowed().buffers) == {"p", "mu", "p.full", "g", "r", "r.scratch"}


def test_a_gradient_that_is_read_whole_is_given_whole_by_its_reduction() -> None:
    done = narrowed(TEXT + "run r.full[0:64:8x8] -> h", when="end")
    assert shown(done.ops)[3:] == lines(
        """
        all_reduce g -> r r.scratch  axis=dp
        wait r
        run r[0:128:mine] mu[0:128:mine] p[0:128:mine] -> mu[0:128:mine]
        run r[0:64:8x8] -> h
        """
    )
    assert buffer_lines(done)["r"] == "buffer r f32[128] grad bucket=b"
    assert buffer_lines(done)["r.scratch"] == "buffer r.scratch f32[1x64] scratch"


def test_of_gradients_that_no_rank_keeps_one_that_is_read_whole_is_gathered() -> None:
    """The complaint: under stages 2 and 3 every rank held all gradients until the last was there."""
    done = narrowed(TEXT + "run r.full[0:64:8x8] -> h")
    assert shown(done.ops)[3:] == lines(
        """
        reduce_scatter g -> r r.scratch  axis=dp
        wait r
        all_gather r -> r.full  axis=dp
        wait r.full
        run r[0:128:mine] mu[0:128:mine] p[0:128:mine] -> mu[0:128:mine]
        run r.full[0:64:8x8] -> h
        """
    )
    assert buffer_lines(done)["r"] == "buffer r f32[64] grad bucket=b sharded=dp"


def test_a_reduction_of_which_nobody_reads_more_than_a_slice_gives_no_more() -> None:
    """Though the layout has all of it on every rank."""
    own = "buffer r f32[64] grad bucket=b sharded=dp"
    text = TEXT.replace("reduce_scatter g", "all_reduce g").replace(own, "buffer r f32[128] grad bucket=b")
    done = narrowed(text)
    assert "reduce_scatter g -> r r.scratch  axis=dp" in shown(done.ops)
    assert buffer_lines(done)["r"] == own


def test_the_sum_over_microbatches_is_as_long_as_what_it_adds() -> None:
    extra = """
    buffer r2 f32[64] grad bucket=b sharded=dp
    reduce_scatter g -> r2  axis=dp
    wait r2
    run r[0:128:mine] r2[0:128:mine] -> r[0:128:mine]  flat=1
    """
    head, loss, rest = TEXT.partition("    all_gather r ->")
    both = head + extra + loss + rest
    assert "run r[0:128:mine] r2[0:128:mine] -> r[0:128:mine]" in shown(narrowed(both).ops)
    whole = narrowed(both + "run r.full[0:64:8x8] -> h", when="end")
    assert "run r[0:128:flat] r2[0:128:flat] -> r[0:128:flat]" in shown(whole.ops)
    assert [op.kind for op in whole.ops if op.reduces] == ["all_reduce", "all_reduce"]


def test_over_two_axes_a_slice_is_cut_once_more_where_the_buckets_slices_are() -> None:
    text = TEXT.replace("bucket b length=128", "bucket b length=128 axis=dp.dp_out")
    text = text.replace("sharded=dp", "sharded=dp.dp_out").replace("f32[64] grad", "f32[32] grad")
    text = text.replace("all_gather r -> r.full  axis=dp", "all_gather r -> r.full  axis=dp.dp_out")
    text = text.replace(
        "reduce_scatter g -> r r.scratch  axis=dp\n    wait r\n",
        "reduce_scatter g -> n  axis=dp\n    wait n\n    reduce_scatter n -> r  axis=dp_out\n    wait r\n",
    ).replace("buffer h", "buffer n f32[64] grad bucket=b sharded=dp\n    buffer h")
    own = narrowed(text, "dp_out=2 dp=2")
    assert reductions(own) == [("reduce_scatter", "dp"), ("reduce_scatter", "dp_out")]
    whole = narrowed(text + "run r.full[0:64:8x8] -> h", "dp_out=2 dp=2", when="end")
    assert reductions(whole) == [("all_reduce", "dp"), ("all_reduce", "dp_out")]
