"""assign_roles: which role runs each op of a step, when, and what is copied for other roles; by hand."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import two_chunks
from short_programs import lines, segment, shown
from torch import Tensor
from two_chunks import SQUARE, step

import fzero
from fzero.ir.program import Program
from fzero.passes.pipeline.assign_roles import AcrossRolesError, Assigned
from fzero.pipeline import make_schedule


def assigned(program: Program, schedule: str = "1f1b", roles: int = 2, chunks: int | None = None) -> Assigned:
    found = Assigned(program, make_schedule(schedule, roles, 2 if "l1" in program.buffers else 1, chunks))
    found.place()
    return found


def works(found: Assigned) -> list[str]:
    """Each op behind its roles and its action; `after` and `before`: outside of the region."""
    said = []
    for work in found.works:
        index, action = work.group
        when = str(action) if action is not None else "after" if index else "before"
        said.append(f"{''.join(map(str, sorted(work.roles))) or '-'} {when}: {shown([work.op])[0]}")
    return said


def test_work_of_a_region_goes_by_its_chunk_and_an_update_by_its_bucket() -> None:
    assert works(assigned(step(microbatches=1))) == lines(
        """
        0 F0.0: run x w0[0:64:8x8] -> h0  chunk=0
        1 F1.0: run h0 w1[0:64:8x8] -> y0 l0  chunk=1
        1 B1.0: run y0 h0 w1[0:64:8x8] -> d0 g1[0:64:8x8]  chunk=1
        0 B0.0: run d0 x -> g0[0:64:8x8]  chunk=0
        0 after: update w0[0:64:mine] g0[0:64:mine] -> w0[0:64:mine]
        1 after: update w1[0:64:mine] g1[0:64:mine] -> w1[0:64:mine]
        """
    )


def test_a_backward_is_split_where_the_schedule_does() -> None:
    """One of gradients alone is the second half."""
    found = [line for line in works(assigned(step(), "zb-h1")) if " I" in line or " W" in line]
    assert found == lines(
        """
        1 I1.0: run y0 w1[0:64:8x8] -> d0  chunk=1
        1 W1.0: run y0 h0 -> g1[0:64:8x8]  chunk=1
        0 W0.0: run d0 x -> g0[0:64:8x8]  chunk=0
        1 I1.1: run y1 w1[0:64:8x8] -> d1  chunk=1
        1 W1.1: run y1 h1 -> g1[0:64:8x8]  chunk=1
        0 W0.1: run d1 x -> g0[0:64:8x8]  chunk=0
        """
    )


# --- leaves that another role uses -----------------------------------------------------------------------------------


def high(h: Tensor, w: Tensor, other: Tensor) -> list[Tensor]:
    return [h.mm(w).mm(other), h.sum()]


def back(y: Tensor, h: Tensor, w: Tensor, into: Tensor, other: Tensor) -> list[Tensor]:
    into.copy_(h.mm(y))
    other.copy_(w.mm(y))
    return [y.mm(w)]


def tied() -> Program:
    """The second chunk reads the leaf of the first, and makes a gradient of it."""
    regions = two_chunks.microbatch(0).replace("run h0 w1[0:64:8x8] ->", "run h0 w1[0:64:8x8] w0[0:64:8x8] ->")
    regions = regions.replace("d0 g1[0:64:8x8] ", "d0 g1[0:64:8x8] g0[0:64:8x8] ")
    pool = {"high": segment(high, *[SQUARE] * 3), "back": segment(back, *[SQUARE] * 5)}
    return step(regions=regions, microbatches=1, segments=pool)


def test_a_leaf_of_another_role_is_copied_for_it_and_its_gradient_copied_back() -> None:
    found = assigned(tied())
    assert works(found) == lines(
        """
        0 before: run w0[0:64:8x8] -> w0.lent0
        0 F0.0: run x w0[0:64:8x8] -> h0  chunk=0
        1 F1.0: run h0 w1[0:64:8x8] w0.lent0 -> y0 l0  chunk=1
        1 B1.0: run y0 h0 w1[0:64:8x8] -> d0 g1[0:64:8x8] g0.back0  chunk=1
        0 after: run g0.back0 -> g0[0:64:8x8]  chunk=1
        0 B0.0: run d0 x -> g0[0:64:8x8]  chunk=0
        0 after: update w0[0:64:mine] g0[0:64:mine] -> w0[0:64:mine]
        1 after: update w1[0:64:mine] g1[0:64:mine] -> w1[0:64:mine]
        """
    )
    lent, kept = found.buffers["w0.lent0"], found.buffers["g0.back0"]
    assert (lent.shape, lent.kind, lent.lent) == (SQUARE, "activation", "w0")
    assert (kept.shape, kept.kind, kept.lent) == (SQUARE, "activation", None)
    assert [work.op.why for work in found.works if work.op.why.startswith(("for", "of"))] == [
        "for role 1: high",
        "of the role that uses it: back",
    ]


def test_a_copy_copies() -> None:
    """Both have one form, and so one segment."""
    found = assigned(tied())
    (key,) = {work.op.segment for work in found.works if work.op.why.startswith(("for", "of"))}
    source, into = torch.randn(SQUARE), torch.zeros(SQUARE)
    found.segments[key](source, into)
    assert torch.equal(source, into)


def test_a_number_is_lent_too() -> None:
    records = "bucket b2 length=64 role=0 s[0:1:]\n buffer w2 f32[64] param bucket=b2"
    regions = two_chunks.microbatch(0).replace("run h0 w1[0:64:8x8] ->", "run h0 w1[0:64:8x8] w2[0:1:] ->")
    pool = {"high": segment(lambda h, w, s: [h.mm(w) * s, h.sum()], SQUARE, SQUARE, ())}
    found = assigned(step(records=records, regions=regions, microbatches=1, segments=pool))
    assert works(found)[0] == "0 before: run w2[0:1:] -> w2.lent0"
    assert found.buffers["w2.lent0"].shape == ()


# --- outside of regions ----------------------------------------------------------------------------------------------

NORM = """
    buffer s f32[2] activation
    buffer n f32[] metric
    metric norm n
"""


def squares(a: Tensor, b: Tensor, into: Tensor, other: Tensor) -> None:
    into.copy_(a.square().sum())
    other.copy_(b.sum())


OUTER = {
    "squares": segment(squares, SQUARE, SQUARE, (), ()),
    "total": segment(lambda s: [s.sum()], 2),
    "same": segment(lambda s: [s.clone()], ()),
    "both": segment(lambda a, b: [a.sum() + b.sum()], SQUARE, SQUARE),
}


def outer(ops: str, records: str = NORM, **given: Any) -> Assigned:
    return assigned(step(records=records, after=ops, microbatches=1, segments=OUTER), **given)


def after(found: Assigned) -> list[str]:
    return [line for line in works(found) if "after" in line and "update" not in line]


SQUARES = "run g0[0:64:8x8] g1[0:64:8x8] -> s[0:1:] s[1:2:]  segment=squares  # squares\n"


def test_terms_of_several_roles_are_made_by_each_and_exchanged_before_they_are_read() -> None:
    found = outer(SQUARES + "run s -> n  fresh=1  segment=total  # norm")
    assert after(found) == lines(
        """
        0 after: run g0[0:64:8x8] -> s[0:1:]
        1 after: run g1[0:64:8x8] -> s[1:2:]
        0 after: run s[0:1:] -> s.0to1[0:1:]
        1 after: run s[1:2:] -> s.1to0[0:1:]
        1 after: run s.0to1[0:1:] -> s[0:1:]
        0 after: run s.1to0[0:1:] -> s[1:2:]
        01 after: run s -> n
        """
    )
    assert [found.buffers[name].shape for name in ("s.0to1", "s.1to0")] == [(1,), (1,)]
    assert {work.op.why for work in found.works if "to" in work.op.writes[0].name} == {
        "for role 1: norm",
        "for role 0: norm",
    }
    ours, theirs = (work.op for work in found.works if work.op.why == "squares")
    gradient, into, other = torch.randn(SQUARE), torch.zeros(()), torch.zeros(())
    found.segments[ours.segment](gradient, into)
    found.segments[theirs.segment](gradient, other)
    assert torch.equal(into, gradient.square().sum())
    assert torch.equal(other, gradient.sum())


def test_two_terms_of_a_role_travel_one_behind_the_other() -> None:
    more = NORM.replace("f32[2]", "f32[4]")
    ops = SQUARES + SQUARES.replace("s[0:1:] s[1:2:]", "s[2:3:] s[3:4:]") + "run s -> n  fresh=1  segment=total"
    found = outer(ops, more)
    copies = [line for line in after(found) if ".0to1" in line]
    assert copies == lines(
        """
        0 after: run s[0:1:] s[2:3:] -> s.0to1[0:1:] s.0to1[1:2:]
        1 after: run s.0to1[0:1:] s.0to1[1:2:] -> s[0:1:] s[2:3:]
        """
    )
    assert found.buffers["s.0to1"].shape == (2,)


def test_terms_that_one_role_makes_or_that_nobody_reads_are_not_sent() -> None:
    alone = "run g0[0:64:8x8] g0[0:64:8x8] -> s[0:1:] s[1:2:]  segment=squares\n"
    assert after(outer(alone + "run s -> n  fresh=1  segment=total")) == lines(
        """
        0 after: run g0[0:64:8x8] g0[0:64:8x8] -> s[0:1:] s[1:2:]
        0 after: run s -> n
        """
    )
    assert after(outer(SQUARES, NORM.replace("metric norm n", ""))) == lines(
        """
        0 after: run g0[0:64:8x8] -> s[0:1:]
        1 after: run g1[0:64:8x8] -> s[1:2:]
        """
    )


def test_a_value_that_needs_leaves_of_two_roles_is_refused() -> None:
    with pytest.raises(
        AcrossRolesError, match=r"`sum` needs leaves of several roles .*: \S+ of role 0 and \S+ of role 1\."
    ):
        outer("run g0[0:64:8x8] g1[0:64:8x8] -> n  fresh=1  segment=both  # sum")
    with pytest.raises(fzero.SpecError, match="`fetch` moves leaves of several roles of the pipeline at once"):
        outer("all_gather g0 -> g1  axis=dp  # fetch")


def test_a_number_is_made_where_its_inputs_are_or_by_all_that_read_it() -> None:
    """State in no bucket is updated by every role, and what nobody reads by none."""
    records = (
        NORM
        + """
        buffer count f32[] state
        buffer rate f32[] activation
        buffer lost f32[] activation
        buffer half f32[] activation
    """
    )
    ops = """
        run l0 -> half  fresh=1  segment=same
        run half -> n  fresh=1  segment=same
        run count -> rate  fresh=1  segment=same
        run count -> count  fresh=1  segment=same
        run count -> lost  fresh=1  segment=same
        run rate w1[0:64:8x8] -> w1[0:64:8x8]  fresh=1  segment=same
    """
    assert after(outer(ops, records)) == lines(
        """
        1 after: run l0 -> half
        1 after: run half -> n
        1 after: run count -> rate
        01 after: run count -> count
        - after: run count -> lost
        1 after: run rate w1[0:64:8x8] -> w1[0:64:8x8]
        """
    )


def test_a_wait_is_of_the_role_whose_transfer_it_is() -> None:
    ops = "all_reduce l0 -> n  axis=dp  op=sum  divisor=1\n wait n"
    assert after(outer(ops)) == ["1 after: all_reduce l0 -> n  axis=dp", "1 after: wait n"]


def test_a_transfer_within_a_region_and_its_wait_are_of_the_action_that_it_stands_in() -> None:
    """And of a split backward, of the first half."""
    regions = two_chunks.microbatch(0).replace(
        "run d0 x", "all_reduce d0 -> e0  axis=dp  phase=backward  chunk=0  region=r0  microbatch=0\nwait e0\nrun e0 x"
    )
    records = "buffer e0 f32[8x8] activation"
    for schedule, action in (("1f1b", "B0.0"), ("zb-h1", "I0.0")):
        found = works(assigned(step(records=records, regions=regions, microbatches=1), schedule))
        assert f"0 {action}: all_reduce d0 -> e0  axis=dp  chunk=0" in found
        assert f"0 {action}: wait e0" in found


# --- what follows from the batch -------------------------------------------------------------------------------------


def masked(mask: str, pool: dict[str, Any]) -> Assigned:
    """The first chunk makes a mask, and both read it."""
    region = two_chunks.microbatch(0).replace("run h0 w1[0:64:8x8] ->", "run h0 k0 w1[0:64:8x8] ->")
    regions = mask + region.replace("run x w0[0:64:8x8]", "run x k0 w0[0:64:8x8]")
    records = "\n".join(f"buffer {name} f32[8x8] activation" for name in ("k0", "q0")) + "\nbuffer held f32[] state"
    scaled = {
        "low": segment(lambda x, k, w: [x.mm(w) * k], *[SQUARE] * 3),
        "high": segment(lambda h, k, w: [h.mm(w) * k, h.sum()], *[SQUARE] * 3),
    }
    return assigned(step(records=records, regions=regions, microbatches=1, segments={**scaled, **pool}))


HOW = "phase=forward  chunk=0  region=r0  microbatch=0  # mask\n"


def test_what_follows_from_the_batch_is_made_by_each_role_that_reads_it() -> None:
    """Of several results only the one that is read."""
    body = segment(lambda x: [(x + 1).cos(), x.sin()], SQUARE)
    found = masked(f"run x -> k0 q0  fresh=2  segment=mask  {HOW}", {"mask": body})
    assert works(found)[:2] == lines(
        """
        0 F0.0: run x -> k0 q0  chunk=0
        1 F1.0: run x -> k0  chunk=1
        """
    )
    x = torch.randn(SQUARE)
    (value,) = found.segments[found.works[1].op.segment](x)
    assert torch.equal(value, (x + 1).cos())


def test_what_follows_from_it_in_two_steps_is_made_in_two() -> None:
    """With a number of the state in no bucket, which every role has."""
    ones = segment(lambda x, c: [x.cos() * c], SQUARE, ())
    twos = segment(lambda x: [x.sin()], SQUARE)
    first = f"run x held -> q0  fresh=1  segment=ones  {HOW}"
    found = masked(first + f"run q0 -> k0  fresh=1  segment=twos  {HOW}", {"ones": ones, "twos": twos})
    assert [line for line in works(found) if " -> k0" in line or " -> q0" in line] == lines(
        """
        0 F0.0: run x held -> q0  chunk=0
        0 F0.0: run q0 -> k0  chunk=0
        1 F1.0: run q0 -> k0  chunk=1
        """
    )


def test_what_a_leaf_takes_part_in_is_made_once() -> None:
    body = segment(lambda x, w: [x.mm(w)], SQUARE, SQUARE)
    found = masked(f"run x w0[0:64:8x8] -> k0  fresh=1  segment=mask  {HOW}", {"mask": body})
    assert [line for line in works(found) if " -> k0" in line] == ["0 F0.0: run x w0[0:64:8x8] -> k0  chunk=0"]


def test_the_first_chunk_of_a_role_that_reads_it_makes_it() -> None:
    """A mask that all layers read: a role of two chunks makes it once, before both."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        mask, x = (batch > 0).float().cumsum(-1).cos(), batch
        for w in p["blocks"]:
            x = torch.tanh(x @ w) * mask
        return x.square().mean()

    params = {"blocks": [torch.empty(8, 8, device="meta") for _ in range(4)]}
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2}, pipeline="interleaved", microbatches=2,
        transfers="p2p",
    )  # fmt: skip
    program = fzero.lower(spec, params, torch.empty(4, 8, device="meta")).programs[1]
    makes = [
        op.chunk for op in program.ops
        if op.computes and any("cos" in str(n.target) for n in program.segments[op.segment].graph.nodes)
        and all(program.buffers[ref.name].kind == "batch" for ref in op.reads)
    ]  # fmt: skip
    assert makes == [1, 1]  # of two microbatches


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_lent_says_whose_leaf_it_is_and_moves_say_whom_they_serve(zero: int) -> None:
    """A tied embedding, held on the host: it is brought for the copy that goes to the first role, or for its gather."""
    init, loss = cases.tied(64, 16, 2)
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=2, zero=zero, offload={"params/**": "cpu"},
        mesh={"pp": 2, "dp": 2}, pipeline="1f1b", prefetch=1,
    )  # fmt: skip
    programs = fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(8, 8, 64), world_size=4).programs
    lent = {role: {b.name: b.lent for b in p.buffers.values() if b.lent is not None} for role, p in programs.items()}
    column = "params:small.full" if zero == 3 else "params:small"
    assert list(lent[0].values()) == [column], "of the embedding alone, by both roles"
    assert lent[0] == lent[1]
    assert all(fzero.parse(str(program)) == program for program in programs.values())
    ops = programs[1].ops
    copied = next(op for op in ops if op.writes and op.writes[0].name in lent[1])
    assert copied.why.startswith("for role 0: ")
    gather = next((op for op in ops if op.gathers and op.target == copied.reads[0].name), copied)
    brought = next(op for op in ops if op.moves and op.target == gather.reads[0].name)
    assert brought.why == gather.why == copied.why, "not once more `for`"
