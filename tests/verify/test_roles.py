"""The roles of a pipeline are judged together: what would hang or train wrongly is refused, for a reason that is said.

Programs broken at random are in `tests/lab/test_mutate.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import cases
import kept
import pytest
import torch

import fzero
from fzero.errors import VerifyError
from fzero.ir import fx_nodes, segments
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.verify.message_order import unmatched
from fzero.verify.rules import verify
from lab.mutate import roles
from lab.mutate.edits import Edit, drop, find, insert
from lab.mutate.text import damaged

INIT, LOSS = cases.tied(64, 16, 4)
ADAMW = fzero.optim.adamw(1e-2)
Programs = dict[int, Program]


@cache
def lowered(schedule: str, pp: int = 2, rows: int = 4, **given: Any) -> fzero.Lowered:
    spec = fzero.Spec(
        loss=LOSS, optimizer=ADAMW, reduce="end", transfers="p2p", clip_norm=1.0, zero=1,
        mesh={"pp": pp, "dp": 2}, pipeline=schedule, **{"microbatches": 4, **given},
    )  # fmt: skip
    return kept.lower(spec, INIT(fzero.random.key(0)), cases.tokens(rows, 8, 64))


def refusal(programs: Programs) -> str:
    """The message of `verify`; "" if it accepts these programs."""
    try:
        verify(programs)
    except VerifyError as error:
        return str(error)
    return ""


def rewritten(program: Program, change: Callable[[Op], Op]) -> Program:
    return replace(program, ops=tuple(map(change, program.ops)))


def test_one_rank_of_a_role_may_not_differ() -> None:
    """All ranks of the grid are given: a mutant on one of them breaks its column."""
    made = lowered("1f1b")
    mesh = made.plan.mesh
    ranks = {rank: made.programs[mesh.coordinate(rank, "pp")] for rank in range(mesh.world_size)}
    verify(ranks)
    broken = roles.leave_segment_out(random.Random(0), ranks[3])
    assert broken is not None
    assert refusal({**ranks, 3: broken})


def test_messages_name_the_rule() -> None:
    made = lowered("1f1b")
    first, second = made.roles
    with pytest.raises(VerifyError, match=r"\[roles\].*no program is given for roles \[1\]"):
        verify(made.programs[0])
    with pytest.raises(VerifyError, match=r"\[roles\].*it is for role 1, the rank's is 0"):
        verify({first: made.roles[second], second: made.roles[second]})


def test_the_text_of_a_role_reads_back() -> None:
    for program in lowered("zb-v").programs.values():
        again = fzero.parse(str(program), program.segments)
        assert again == program
        assert again.role == program.role


def test_damaged_texts_of_roles_end_in_an_answer() -> None:
    """Accepted, no text of a program, or a VerifyError that names its reason: nothing else."""
    programs, rng = lowered("1f1b").roles, random.Random(3)
    refused = 0
    for _ in range(40):
        rank = rng.choice(sorted(programs))
        try:
            broken = fzero.parse(damaged(rng, str(programs[rank])), programs[rank].segments)
        except ValueError:
            continue
        try:
            verify({**programs, rank: broken})
        except VerifyError:
            refused += 1
    assert refused >= 10


def test_a_role_needs_the_axis() -> None:
    program = lowered("1f1b").programs[0]
    with pytest.raises(VerifyError, match=r"\[form\].*for role 0 of a pipeline: the mesh has no axis pp"):
        verify(replace(program, mesh=Mesh((("dp", 2),))))


# --- what users of pipelines suffer from ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.sampled(1)
def test_fewer_microbatches_than_roles_end(schedule: str) -> None:
    """torchtitan #775 hangs. `verify` runs the roles without any buffering, so what it accepts ends."""
    assert refusal(lowered(schedule, pp=4, rows=2, microbatches=2).roles) == ""


def test_a_schedule_that_needs_more_microbatches_says_how_many() -> None:
    with pytest.raises(fzero.SpecError, match=r"4 roles need a multiple of 4 microbatches\. Take 4, or '1f1b'"):
        lowered("interleaved", pp=4, rows=2, microbatches=2)


def test_both_ranks_send_before_they_receive() -> None:
    """pytorch #172668. With a transport that buffers nothing neither send ends, for neither has begun to receive."""
    programs = dict(lowered("1f1b").roles)
    for rank, program in programs.items():
        role, other = program.role or 0, 1 - (program.role or 0)
        (sent,) = find(program, lambda op, a=role, b=other: op.is_send and op.target.endswith(f".{a}to{b}"))
        (posted,) = find(program, lambda op, a=role, b=other: op.is_recv and op.target.endswith(f".{b}to{a}"))
        done = next(i for i, op in enumerate(program.ops) if op.is_wait and op.target == program.ops[sent].target)
        arrived = next(i for i, op in enumerate(program.ops) if op.is_wait and op.target == program.ops[posted].target)
        moved = insert(program, arrived, program.ops[done], program.ops[posted])
        programs[rank] = drop(moved, posted, done + 2 if done > arrived else done)
    assert "the roles wait for one another: role 0 at op" in refusal(programs)


def test_a_receive_of_another_dtype_or_size_than_is_sent() -> None:
    """DeepSpeed's receive buffers ignore the dtype, and hang from three roles on (diffusion-pipe #544)."""
    usual = lowered("1f1b", pp=4).roles
    half = lowered("1f1b", pp=4, precision="bf16").roles
    short = lowered("1f1b", pp=4, rows=2, microbatches=2).roles
    middle = sorted(usual)[1]
    assert "receives 128 elements of bf16 where rank 0 sends 128 elements of f32" in refusal(
        {**usual, middle: half[middle]}
    )
    found = refusal({**usual, middle: short[middle]})
    assert "[sends]" in found
    assert "would wait for ever" in found


def test_a_receive_whose_reader_takes_the_dims_in_another_order() -> None:
    """A message moves memory as it lies: the values would change places."""

    def programs(contiguous: bool) -> Programs:
        init, loss = cases.turned(2, contiguous)
        spec = fzero.Spec(loss=loss, optimizer=cases.SGD, mesh={"pp": 2}, microbatches=2, pipeline="1f1b")
        return kept.lower(spec, init(fzero.random.key(0)), cases.turned_rows(0, 0)).roles

    turned, contiguous = programs(False), programs(True)
    found = [what for _, _, what in unmatched({0: turned[0], 1: contiguous[1]})]
    assert "receives strides [32, 4, 1] where rank 0 sends [32, 1, 8]: a message moves memory as it lies" in found
    assert refusal(turned) == refusal(contiguous) == ""


def test_messages_that_start_in_different_orders() -> None:
    """NCCL has no tags: the n-th message that one rank sends is the n-th that the other receives."""
    programs = dict(lowered("1f1b").roles)
    last = max(programs)
    first, second = find(programs[last], lambda op: op.is_recv and ".lent" not in op.target)[:2]
    ops = programs[last].ops
    programs[last] = drop(insert(programs[last], first, ops[second]), second + 1)
    assert "both ends must start messages in one order" in refusal(programs)


def test_only_the_last_microbatch_is_trained() -> None:
    """Automodel #3530: the sum over microbatches is the last one's gradient."""

    def last(program: Program) -> Program:
        pool, ops = dict(program.segments), []
        for op in program.ops:
            sums = [n for n, ref in enumerate(op.writes) if op.in_region and ref in op.reads]
            if sums:
                graph = segments.copied(program.segments[op.segment].graph)
                for n in sums:
                    into = fx_nodes.placeholders(graph)[len(op.reads) + n - op.num_outputs]
                    added = next(node for node in graph.nodes if node.kwargs.get("out") is into)
                    added.target, added.args, added.kwargs = torch.ops.aten.copy_.default, (into, added.args[1]), {}
                gm = segments.module(graph)
                pool[segments.digest(gm)] = gm
                op = op.with_attrs(segment=segments.digest(gm))
            ops.append(op)
        return replace(program, ops=tuple(ops), segments=pool)

    programs = {rank: last(program) for rank, program in lowered("1f1b").roles.items()}
    assert "compute something else than what was captured" in refusal(programs)


@pytest.mark.parametrize("edit", [roles.leave_gradient_out, roles.add_gradient_twice, roles.add_gradient_elsewhere])
def test_each_gradient_is_added_once_and_in_its_place(edit: Edit) -> None:
    usual, tried = lowered("1f1b").roles, 0
    for rank, program in usual.items():
        for seed in range(4):
            broken = edit(random.Random(seed), program)
            if broken is not None:
                assert "compute something else than what was captured" in refusal({**usual, rank: broken})
                tried += 1
    assert tried >= 4


def test_gradients_scaled_by_another_number() -> None:
    """torchtitan #2972: gradients that many times too large, on every role alike."""

    def scaled(op: Op) -> Op:
        return op.with_attrs(divisor=1) if op.reduces and op.divisor not in (None, 1) else op

    programs = {rank: rewritten(program, scaled) for rank, program in lowered("1f1b").roles.items()}
    assert "compute something else than what was captured" in refusal(programs)


def test_ranks_that_are_given_other_batches() -> None:
    programs = dict(lowered("1f1b", pp=4).roles)
    middle = sorted(programs)[1]
    unread = next(b for b in programs[middle].buffers.values() if b.kind == "batch" and b.at is None)
    buffers = {**programs[middle].buffers, unread.name: replace(unread, dtype=torch.int32)}
    programs[middle] = replace(programs[middle], buffers=buffers)
    assert "every rank takes one form of batch" in refusal(programs)


def test_ranks_that_cut_another_layout_into_slices() -> None:
    """The norm of clipped gradients sums the slices of all ranks: with other axes on one rank it misses a slice."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), clip_norm=1.0, mesh={"dp_out": 2, "dp": 2}, zero=0)
    program = fzero.lower(spec, {"w": torch.empty(8, 8)}, torch.empty(4, 8), world_size=4).program
    (bucket,) = program.buckets.values()
    assert str(bucket.axis) == "dp.dp_out"
    other = replace(program, buckets={bucket.name: replace(bucket, axis="dp_out.dp")})
    verify(dict.fromkeys(range(4), program))
    verify(dict.fromkeys(range(4), other))
    assert "ranks cut one layout into slices" in refusal({0: program, 1: other, 2: program, 3: program})
