"""offload_gradients: which gradients wait elsewhere, from which op to which, and where on the way."""

from __future__ import annotations

import pytest
import torch
from short_programs import lines, shown, written
from torch import Tensor, fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import fx_nodes, segments
from fzero.ir.program import Program
from fzero.ir.recorder import record
from fzero.passes.offload.offload_gradients import offload_gradients


def sums() -> fx.GraphModule:
    """The sums of three leaves, each to its own number."""

    def body(*xs: Tensor) -> list[Tensor]:
        for x, into in zip(xs[:3], xs[3:], strict=True):
            into.copy_(x.sum())
        return []

    with FakeTensorMode():
        return record(body, [*(torch.empty(n) for n in (64, 96, 32)), *(torch.empty(()) for _ in range(3))])


SUMS_OF = sums()
SUMS = segments.digest(SUMS_OF)
# a: two leaves of one bucket. The loss ends with op 5, the norm is there with op 8
TEXT = f"""
    bucket a length=256 one[0:64:64] two[128:224:96]
    bucket b length=64 three[0:32:32]
    buffer p:a f32[128] param bucket=a sharded=dp entry=params
    buffer p:b f32[32] param bucket=b sharded=dp entry=params
    buffer held f32[1500] optimizer space=disk at=0
    buffer x f32[8] batch
    buffer h f32[8] activation
    buffer grad:a f32[256] grad bucket=a
    buffer g:a f32[128] grad bucket=a sharded=dp
    buffer g:b f32[32] grad bucket=b sharded=dp
    buffer s f32[3] activation
    buffer clip f32[] activation
    buffer new:a f32[128] scratch bucket=a sharded=dp
    buffer new:b f32[32] scratch bucket=b sharded=dp
    run x -> grad:a[0:64:64] grad:a[128:224:96]  region=r0
    reduce_scatter grad:a -> g:a  axis=dp
    run x -> h  region=r0
    wait g:a
    run h -> h  region=r0
    run h -> g:b[0:32:32]  region=r0
    run g:a[0:64:mine] g:a[128:224:mine] g:b[0:32:mine] -> s[0:1:] s[1:2:] s[2:3:]  segment={SUMS}
    run s -> clip
    run clip p:b[0:64:mine] g:b[0:64:mine] -> new:b[0:64:mine]  flat=1  # update b
    run clip p:a[0:256:mine] g:a[0:256:mine] -> new:a[0:256:mine]  flat=1  # update a
"""


def program(text: str = TEXT, transport: str = "p2p") -> Program:
    return written(text, transport=transport, segments={SUMS: SUMS_OF})


def ops(text: str = TEXT, rules: dict[str, str] | None = None, transport: str = "p2p") -> list[str]:
    return shown(offload_gradients(program(text, transport), rules or {"**": "host"}).ops)


def test_a_gradient_waits_from_its_sums_to_its_update() -> None:
    """The gradient of b is read again at once, and stays. Its sum is an op of its own too."""
    wanted = """
        run x -> grad:a[0:64:64] grad:a[128:224:96]
        reduce_scatter grad:a -> g:a  axis=dp
        run x -> h
        wait g:a
        run g:a[0:64:mine] g:a[128:224:mine] -> s[0:1:] s[1:2:]
        move g:a -> g:a.kept
        run h -> h
        wait g:a.kept
        run h -> g:b[0:32:32]
        run g:b[0:32:mine] -> s[2:3:]
        run s -> clip
        run clip p:b[0:64:mine] g:b[0:64:mine] -> new:b[0:64:mine]
        move g:a.kept -> g:a.in
        wait g:a.in
        run clip p:a[0:256:mine] g:a.in[0:256:mine] -> new:a[0:256:mine]
    """
    done = offload_gradients(program(), {"**": "host"})
    assert shown(done.ops) == lines(wanted)
    kept, back = done.buffers["g:a.kept"], done.buffers["g:a.in"]
    assert (kept.kind, kept.space, kept.at, kept.shape, kept.sharded) == ("grad", "host", None, (128,), "dp")
    assert (back.kind, back.space, back.shape, back.sharded) == ("staging", "device", (128,), "dp")
    assert {op.why for op in done.ops if op.moves} == {"gradients of a wait"}


def test_each_sum_is_of_the_leaf_that_it_was_of() -> None:
    done = offload_gradients(program(), {"**": "host"})
    one, two = (op for op in done.ops if op.segment and op.writes[0].name == "s")
    xs, numbers = [torch.full((n,), 1.0 + n) for n in (64, 96)], [torch.zeros(()) for _ in range(2)]
    done.segments[one.segment](*xs, *numbers)
    assert numbers == [x.sum() for x in xs]
    shapes = [tuple(holder.meta["val"].shape) for holder in fx_nodes.placeholders(done.segments[one.segment].graph)]
    assert shapes == [(64,), (96,), (), ()]
    x, number = torch.full((32,), 3.0), torch.zeros(())
    done.segments[two.segment](x, number)
    assert number == 3.0 * 32


def test_between_the_device_and_the_disk_of_a_cuda_world_lies_the_host() -> None:
    got = ops(rules={"**": "disk"}, transport="nccl")
    assert [line for line in got if line.split()[0] in ("move", "wait")] == lines(
        """
        wait g:a
        move g:a -> g:a.down
        wait g:a.down
        move g:a.down -> g:a.kept
        wait g:a.kept
        move g:a.kept -> g:a.up
        wait g:a.up
        move g:a.up -> g:a.in
        wait g:a.in
        """
    )
    assert got.index("wait g:a.kept") == got.index("run h -> h") + 1, "the wait for the disk is beside the next run"
    made = offload_gradients(program(transport="nccl"), {"**": "disk"}).buffers
    assert [made[f"g:a.{end}"].space for end in ("down", "kept", "up", "in")] == ["host", "disk", "host", "device"]


def test_what_waits_on_disk_lies_in_pages_of_its_own_behind_the_state() -> None:
    """The state ends at byte 6,000. 512 bytes of a take a page."""
    apart = TEXT.replace("run s -> clip", "run s -> clip\n run clip -> clip\n run clip -> clip")
    made = offload_gradients(program(apart), {"**": "disk"}).buffers
    assert (made["g:a.kept"].at, made["g:b.kept"].at) == (8192, 8192 + 4096)
    assert made["g:a.kept"].space == made["g:b.kept"].space == "disk"


@pytest.mark.parametrize(
    ("rules", "waits"),
    [
        ({"one": "host"}, False),  # the leaves of one bucket differ
        ({"one": "host", "two": "host"}, True),
        ({"one": "host", "**": "host"}, True),
        ({"one": "device", "**": "host"}, False),
        ({"three": "host"}, False),  # which stays anyway
        ({"**": "device"}, False),
    ],
)
def test_the_first_rule_that_matches_decides_and_the_leaves_of_a_bucket_agree(
    rules: dict[str, str], waits: bool
) -> None:
    assert ("move g:a -> g:a.kept" in ops(rules=rules)) == waits


def test_without_a_rule_for_another_space_the_program_is_itself() -> None:
    before = program()
    assert offload_gradients(before, {}) is before
    assert offload_gradients(before, {"one": "device", "**": "device"}) is before


def test_gradients_of_which_nothing_is_summed_stay() -> None:
    """They do not wait for others: each has its update at once."""
    before = program(TEXT.replace("g:b[0:32:mine] ->", "h ->"))
    assert offload_gradients(before, {"**": "host"}) is before, "an op that reads what is no gradient is no such sum"
    before = program(TEXT.replace("-> s[0:1:] s[1:2:] s[2:3:]", "-> s[0:1:1] s[1:2:1] s[2:3:1]"))
    assert offload_gradients(before, {"**": "host"}) is before, "nor one that writes what is no number"
    assert offload_gradients(before := program(TEXT.replace("-> s[0:1:]", "-> h s[0:1:]")), {"**": "host"}) is before
    fresh = program(TEXT.replace("segment=", "fresh=1  segment="))
    assert offload_gradients(fresh, {"**": "host"}) is fresh


def test_a_gradient_that_is_read_two_runs_later_stays() -> None:
    """One run goes by while it moves down, one while it moves up, and between them it waits."""
    head, _, rest = TEXT.partition("    wait g:a\n")
    loss, _, sums = rest.partition("    run g:a")
    start, _, updates = sums.partition("    run clip p:b")
    b, a = ("    run clip p:b" + updates).splitlines()
    soon = "\n".join([head + loss + "    wait g:a", "    run g:a" + start, a, b])
    assert "move g:a -> g:a.kept" not in ops(soon), "behind the sums of a come the norm and the update"
    assert "move g:a -> g:a.kept" in ops(soon.replace("run s -> clip", "run s -> clip\n run clip -> clip"))


@pytest.mark.parametrize(
    "last",
    [
        "run g:a[0:64:mine] -> h",  # no elementwise work
        "move g:a -> new:a",
        "run clip -> g:a[0:64:mine]  flat=1",  # written again
    ],
)
def test_a_gradient_that_is_used_otherwise_behind_its_update_stays(last: str) -> None:
    assert "move g:a -> g:a.kept" not in ops(TEXT + last)


def test_every_elementwise_use_at_the_end_reads_what_was_brought_back() -> None:
    got = ops(TEXT + "run g:a[0:64:mine] -> new:a[0:64:mine]  flat=1")
    assert got[-1] == "run g:a.in[0:64:mine] -> new:a[0:64:mine]"
    assert got.count("move g:a.kept -> g:a.in") == 1


def test_elementwise_work_at_the_end_that_no_norm_needs_stays_there() -> None:
    """It comes no earlier, and what it alone reads does not wait for anybody."""
    got = ops(TEXT.replace("run clip p:b", "run p:b"))
    assert got[-4] == "run p:b[0:64:mine] g:b[0:64:mine] -> new:b[0:64:mine]"
    assert (
        ops(TEXT.replace("run clip p:a", "run p:a"))[-1]
        == "run p:a[0:256:mine] g:a.in[0:256:mine] -> new:a[0:256:mine]"
    )


def test_what_is_no_gradient_of_the_ranks_stays() -> None:
    """A column that no elementwise work reads at the end, and one that is no gradient."""
    text = TEXT.replace("run clip p:a[0:256:mine] g:a[0:256:mine]", "run clip p:a[0:256:mine]")
    assert not [line for line in ops(text) if line.startswith("move g:a")]
    scratch = TEXT.replace("buffer g:a f32[128] grad", "buffer g:a f32[128] scratch")
    assert not [line for line in ops(scratch) if line.startswith("move")]
