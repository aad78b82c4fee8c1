"""to_spaces: which leaves are brought to the device for a step, on which way, and which go back."""

from __future__ import annotations

import pytest
from short_programs import lines, shown, written

from fzero.ir.records import Ref
from fzero.passes.offload.to_spaces import chain, copies_of, to_spaces

TEXT = """
    bucket b length=128 w[0:128:128]
    buffer p f32[64] param bucket=b sharded=dp space=host entry=params
    buffer mu f32[64] optimizer bucket=b sharded=dp space=disk at=0 entry=mu
    buffer nu f32[64] optimizer bucket=b sharded=dp entry=nu
    buffer unread f32[64] optimizer bucket=b sharded=dp space=host entry=unread
    buffer waits f32[64] grad bucket=b sharded=dp space=host
    buffer g f32[64] grad bucket=b sharded=dp
    buffer s f32[8] scratch space=host
    run p[0:128:mine] -> g  region=r0
    run g[0:128:mine] mu[0:128:mine] nu[0:128:mine] -> mu[0:128:mine] nu[0:128:mine]
    run waits s -> waits
"""


def test_what_is_read_comes_at_the_top_and_what_is_written_goes_back_at_the_end() -> None:
    """Nothing happens to leaves that no op names, to those on the device, and to what a step makes."""
    done = to_spaces(written(TEXT))
    assert shown(done.ops) == lines(
        """
        move p -> p.in
        wait p.in
        move mu -> mu.in
        wait mu.in
        run p.in[0:128:mine] -> g
        run g[0:128:mine] mu.in[0:128:mine] nu[0:128:mine] -> mu.in[0:128:mine] nu[0:128:mine]
        run waits s -> waits
        move mu.in -> mu
        wait mu
        """
    )
    copy = done.buffers["mu.in"]
    assert (copy.kind, copy.space, copy.at, copy.shape, copy.entry) == ("staging", "device", None, (64,), "mu")
    assert (done.buffers["mu"].space, done.buffers["mu"].at) == ("disk", 0)
    assert copies_of(done) == {"p.in": "p", "mu.in": "mu"}


def test_what_lies_on_disk_goes_through_the_host_of_a_cuda_device() -> None:
    done = to_spaces(written(TEXT, transport="nccl"))
    named = [line for line in shown(done.ops) if line.startswith("move")]
    assert named == lines(
        """
        move p -> p.in
        move mu -> mu.up
        move mu.up -> mu.in
        move mu.in -> mu.down
        move mu.down -> mu
        """
    )
    assert [done.buffers[f"mu.{end}"].space for end in ("up", "in", "down")] == ["host", "device", "host"]
    assert copies_of(done) == {"p.in": "p", "mu.up": "mu", "mu.in": "mu", "mu.down": "mu.in"} | {"mu.down": "mu"}


def test_a_step_that_names_nothing_held_elsewhere_is_itself() -> None:
    program = written(TEXT.replace("space=host", "").replace("space=disk at=0", ""))
    assert to_spaces(program) is program
    unread = written(TEXT.partition("    run")[0] + "run nu -> nu")
    assert to_spaces(unread) is unread


@pytest.mark.parametrize(
    ("moves", "copies"),
    [
        ("move waits -> one", {"one": "waits"}),  # a gradient that waits is held there
        ("move g -> one", {}),  # one on the device is not
        ("move s -> one", {}),  # nor is what a step makes
        ("move mu -> one\n move one -> two", {"one": "mu", "two": "mu"}),
        ("move mu -> g", {}),  # what is filled is no copy
        ("all_gather mu -> one", {}),
    ],
)
def test_copies_are_known_by_what_they_are_of(moves: str, copies: dict[str, str]) -> None:
    names = "".join(f"buffer {name} f32[64] staging bucket=b sharded=dp\n" for name in ("one", "two"))
    assert copies_of(written(TEXT.partition("    run")[0] + names + moves)) == copies


def test_each_move_of_a_chain_is_waited_for_at_once() -> None:
    ops = list(chain([Ref("a"), Ref("b", 0, 8), Ref("c")], "why"))
    assert shown(ops) == ["move a -> b[0:8:flat]", "wait b", "move b[0:8:flat] -> c", "wait c"]
    assert {op.why for op in ops} == {"why"}
