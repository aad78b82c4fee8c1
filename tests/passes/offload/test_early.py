"""early: an op moves behind what it needs, and behind what still needs the old value of what it writes."""

from __future__ import annotations

from collections.abc import Iterable

from short_programs import lines, shown, written

from fzero.ir.op import Op
from fzero.passes.offload.early import last_of_losses, moved_early

BUFFERS = "\n".join(f"buffer {name} f32[64] scratch" for name in ("x", "h", "g0", "g1", "p0", "p1", "r1", "c", "u1"))


def ops_of(text: str) -> tuple[Op, ...]:
    return written(BUFFERS + "\n" + text).ops


def early(text: str, movable: Iterable[int]) -> tuple[list[str], int]:
    """The new order of ops, of which these may move; updates are the ends."""
    ops, moved = moved_early(ops_of(text), set(movable), lambda op: op.is_update)
    return shown(ops), moved


def test_the_last_op_of_a_loss() -> None:
    assert last_of_losses(ops_of("run x -> h  region=r0\nmove h -> g0\nrun h -> g1  region=r0\nrun g1 -> p1")) == 2
    assert last_of_losses(ops_of("run x -> h\nrun h -> g1")) == 2, "behind the last, where there is no loss"


def test_an_update_comes_behind_its_gradient_with_what_only_it_needs() -> None:
    """Not with work that no update needs, and not before the last use of the old value."""
    text = """
        run x p1 -> h  region=r0
        run h -> g1  region=r0
        run h p0 -> g0  region=r0
        run g1 -> c  flat=1
        run g1 -> u1  flat=1
        update g0 p0 -> p0  flat=1
        update u1 p1 -> p1  flat=1
    """
    wanted = """
        run x p1 -> h
        run h -> g1
        run g1 -> u1
        update u1 p1 -> p1
        run h p0 -> g0
        update g0 p0 -> p0
        run g1 -> c
    """
    assert early(text, range(3, 7)) == (lines(wanted), 3)
    order, moved = early(text.replace("run h p0 -> g0", "run h p0 p1 -> g0"), range(3, 7))  # the old p1 is read there
    assert moved == 3
    assert order[2:6] == lines(
        """
        run g1 -> u1
        run h p0 p1 -> g0
        update g0 p0 -> p0
        update u1 p1 -> p1
        """
    )


def test_a_wait_stands_for_all_that_its_transfer_touches() -> None:
    """A gradient is there when the wait for its reduction returns, and its source may be written from then on."""
    text = """
        run x -> g1  region=r0
        reduce_scatter g1 -> r1  axis=dp
        run x -> h  region=r0
        wait r1
        run h -> g0  region=r0
        run h -> c  flat=1
        update r1 -> p1  flat=1
    """
    order, moved = early(text, [5, 6])
    assert moved == 1
    assert order[3:5] == ["wait r1", "update r1 -> p1"]
    order, _ = early(text.replace("update r1 -> p1", "update x -> g1"), [6])
    assert order[3:5] == ["wait r1", "update x -> g1"]


def test_work_that_follows_from_work_of_the_end_stays() -> None:
    """c needs nothing that came before: it is of the end, and so are the update that reads it and what that one alone
    asked for. An update that reads nothing that was made stays too."""
    text = """
        run x -> g1  region=r0
        run x -> h  region=r0
        run c -> c  flat=1
        run h -> g0  region=r0
        run g1 -> u1  flat=1
        update u1 c -> p1  flat=1
        update p0 -> p0  flat=1
    """
    same = [line.partition("  ")[0] for line in lines(text)]
    assert early(text, [2, 4, 5, 6]) == (same, 0)
    assert early(text, []) == (same, 0)


def test_disjoint_ranges_of_one_buffer_do_not_hold_each_other_up() -> None:
    text = """
        run x -> g1[0:32:flat]  region=r0
        run x -> g1[32:64:flat]  region=r0
        run x -> h  region=r0
        update g1[0:32:flat] -> p1[0:32:flat]  flat=1
        update g1[32:64:flat] -> p1[32:64:flat]  flat=1
    """
    wanted = """
        run x -> g1[0:32:flat]
        update g1[0:32:flat] -> p1[0:32:flat]
        run x -> g1[32:64:flat]
        update g1[32:64:flat] -> p1[32:64:flat]
        run x -> h
    """
    assert early(text, [3, 4]) == (lines(wanted), 2)


def test_two_writes_and_a_write_behind_a_read_keep_their_order() -> None:
    text = """
        run x -> p1  region=r0
        run x -> g1  region=r0
        run x g1 -> h  region=r0
        run x -> c  region=r0
        update g1 -> p1  flat=1
        update h -> g1  flat=1
    """
    wanted = """
        run x -> p1
        run x -> g1
        update g1 -> p1
        run x g1 -> h
        update h -> g1
        run x -> c
    """
    assert early(text, [4, 5]) == (lines(wanted), 2)
