"""tile_updates: which work on what is held off the device is cut, into how many tiles, and what each tile computes."""

from __future__ import annotations

import pytest
import torch
from short_programs import lines, segment, shown, written
from torch import Tensor

from fzero.ir import fx_nodes
from fzero.ir.program import Program
from fzero.passes.offload.tile_updates import tile_updates

SLICE = 512  # of each of two ranks


def scaled(g: Tensor, rate: Tensor, into: Tensor) -> None:
    into.copy_(g * rate)


def added(g: Tensor, mu: Tensor, into: Tensor) -> None:
    into.copy_(mu * 0.9 + g)


def text(length: int = 2 * SLICE, where: str = "space=host", form: str = "f32") -> str:
    own = length // 2
    return f"""
        bucket b length={length} w[0:{length}:{length}]
        bucket c length={length} v[0:{length}:{length}]
        buffer mu {form}[{own}] optimizer bucket=b sharded=dp {where}
        buffer mu.in {form}[{own}] staging bucket=b sharded=dp
        buffer nu f32[{own}] optimizer bucket=c sharded=dp
        buffer g f32[{own}] grad bucket=b sharded=dp
        buffer h f32[{own}] grad bucket=c sharded=dp
        buffer whole f32[{length}] scratch bucket=b
        buffer rate f32[] state
        buffer k f32[8] activation
        move mu -> mu.in
        wait mu.in
        run g[0:{length}:mine] rate -> g[0:{length}:mine]  flat=1  segment=scaled
        update g[0:{length}:mine] mu.in[0:{length}:mine] -> mu.in[0:{length}:mine]  flat=1  segment=added
        update h[0:{length}:mine] nu[0:{length}:mine] -> nu[0:{length}:mine]  flat=1  segment=added
        move mu.in -> mu
        wait mu
    """


def program(source: str, size: int = SLICE) -> Program:
    pool = {"scaled": segment(scaled, size, (), size), "added": segment(added, size, size, size)}
    return written(source, segments=pool)


def tiles(done: Program) -> list[tuple[int, int]]:
    """The tiles of the updates of the column that is held elsewhere."""
    return [ref.tile for op in done.ops if op.is_update for ref in op.writes if ref.tile and ref.name == "mu.in"]


def test_ops_on_one_bucket_do_a_tile_before_the_next_one() -> None:
    """What is held on the device is not cut."""
    assert shown(tile_updates(program(text()), 256 * 4).ops) == lines(
        """
        move mu -> mu.in
        wait mu.in
        run g[0:1024:mine:0*256] rate -> g[0:1024:mine:0*256]
        update g[0:1024:mine:0*256] mu.in[0:1024:mine:0*256] -> mu.in[0:1024:mine:0*256]
        run g[0:1024:mine:1*256] rate -> g[0:1024:mine:1*256]
        update g[0:1024:mine:1*256] mu.in[0:1024:mine:1*256] -> mu.in[0:1024:mine:1*256]
        update h[0:1024:mine] nu[0:1024:mine] -> nu[0:1024:mine]
        move mu.in -> mu
        wait mu
        """
    )


def test_all_tiles_of_an_op_are_one_elementwise_segment_planned_for_a_tile() -> None:
    done = tile_updates(program(text()), 256 * 4)
    cut = [op for op in done.ops if any(ref.tile for ref in op.reads)]
    assert all(op.is_flat for op in cut)
    assert [op.why.split()[-2:] for op in cut] == [["tile", str(i)] for i in (0, 0, 1, 1)]
    (scales,), (adds,) = ({op.segment for op in cut if op.is_update == update} for update in (False, True))
    shapes = [tuple(n.meta["val"].shape) for n in done.segments[scales].graph.nodes if n.op != "output"]
    assert shapes == [(256,), (), (256,), (256,), (256,)]
    assert {n.meta["val"].numel() for n in done.segments[adds].graph.nodes if n.op != "output"} == {256}
    g, mu = torch.randn(SLICE), torch.randn(SLICE)
    wanted, into = mu * 0.9 + g, torch.zeros(SLICE)
    for number in range(2):
        part = slice(256 * number, 256 * (number + 1))
        done.segments[adds](g[part], mu[part], into[part])
    assert torch.equal(into, wanted)


@pytest.mark.parametrize(
    ("elements", "most", "size", "count"),
    [
        (512, 512, 0, 0),  # one tile is none
        (512, 511, 256, 2),
        (576, 256, 192, 3),  # equal ones
        (640, 256, 256, 3),  # of whole blocks of 64
        (512, 40, 64, 8),  # no less than a block
    ],
)
def test_tiles_are_equal_and_of_whole_blocks(elements: int, most: int, size: int, count: int) -> None:
    done = tile_updates(program(text(2 * elements), elements), most * 4)
    assert tiles(done) == [(i, size) for i in range(count)]


@pytest.mark.parametrize(("form", "size"), [("f32", 1024), ("i8", 4096), ("f64", 512)])
def test_on_disk_a_tile_is_of_whole_pages(form: str, size: int) -> None:
    """4096 bytes each."""
    done = tile_updates(program(text(16384, "space=disk at=0", form), 8192), 64 * 4)
    assert tiles(done) == [(i, size) for i in range(8192 // size)]


def test_the_largest_block_of_all_columns_holds() -> None:
    """One on disk, one on the host."""
    source = text(16384).replace(
        "buffer rate",
        "buffer low f32[8192] optimizer bucket=b sharded=dp space=disk at=0\n"
        "buffer low.in f32[8192] staging bucket=b sharded=dp\nbuffer rate",
    )
    both = source.replace("move mu -> mu.in", "move low -> low.in\nmove mu -> mu.in").replace("run g[", "run low.in[")
    assert tiles(tile_updates(program(both, 8192), 64 * 4)) == [(i, 1024) for i in range(8)]


def test_a_column_of_blocks_has_an_element_of_a_tile_for_each_block() -> None:
    """Scales: one for 64 elements."""

    def by_block(q: Tensor, scale: Tensor, into: Tensor) -> None:
        into.copy_(q * scale.sum())

    source = """
        bucket b length=1024 w[0:1024:1024]
        buffer q f32[512] optimizer bucket=b sharded=dp space=host
        buffer q.in f32[512] staging bucket=b sharded=dp
        buffer s f32[8] optimizer bucket=b sharded=dp per=64
        move q -> q.in
        wait q.in
        update q.in[0:1024:mine] s[0:1024:mine] -> q.in[0:1024:mine]  flat=1  segment=by_block
    """
    done = tile_updates(written(source, segments={"by_block": segment(by_block, 512, 8, 512)}), 256 * 4)
    (gm,) = done.segments.values()
    assert [tuple(n.meta["val"].shape) for n in fx_nodes.placeholders(gm.graph)] == [(256,), (4,), (256,)]


def test_where_every_rank_has_all_of_it_all_of_it_is_cut() -> None:
    source = text().replace("sharded=dp", "").replace("f32[512]", "f32[1024]").replace(":mine", ":flat")
    done = tile_updates(program(source, 1024), 256 * 4)
    assert tiles(done) == [(i, 256) for i in range(4)]


def test_a_step_that_holds_all_on_the_device_is_itself() -> None:
    held = program(text(where="").replace("move mu -> mu.in", "").replace("move mu.in -> mu", ""))
    assert tile_updates(held, 256) is held


UPDATE = "update g[0:1024:mine] mu.in[0:1024:mine] -> mu.in[0:1024:mine]"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (f"{UPDATE}  flat=1", UPDATE, "it is no elementwise work"),
        (UPDATE, UPDATE.replace("g[0:1024:mine]", "g"), "it reads all that there is"),
        (UPDATE, UPDATE.replace("g[0:1024:mine]", "whole[0:1024:1024]"), "it reads a leaf in its shape"),
        (UPDATE, UPDATE.replace("g[", "h["), "its operands lie in two buckets"),
        (UPDATE, UPDATE.replace("g[0:1024:mine]", "whole[0:1024:flat]"), "one operand is cut over ranks, one is not"),
        (UPDATE, UPDATE.replace("mine", "mine:0*256"), "it is a tile"),
        (f"{UPDATE}  flat=1", "run g[0:1024:mine] mu.in[0:1024:mine] -> k  flat=1  fresh=1", "it returns a result"),
    ],
)
def test_work_that_is_not_cut(before: str, after: str, why: str) -> None:
    source = program(text().replace(before, after))
    done = tile_updates(source, 256 * 4)
    assert len([op for op in done.ops if op.computes]) == len([op for op in source.ops if op.computes]), why


def test_work_on_nothing_but_numbers_is_not_cut() -> None:
    source = text().replace("move mu.in -> mu\n", "run rate -> rate  flat=1  segment=scaled\nmove mu.in -> mu\n")
    done = tile_updates(program(source), 256 * 4)
    assert "run rate -> rate" in shown(done.ops)
