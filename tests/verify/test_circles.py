"""Ranks that are in groups along several axes start what they share in an order in which nobody waits for a circle.

Programs broken at random are in `tests/lab/test_mutate.py`.
"""

from __future__ import annotations

import itertools

import cases
import kept
import pytest

import fzero
from fzero.errors import VerifyError
from fzero.ir.program import Program
from fzero.verify.circles import waiting_in_a_circle
from fzero.verify.rules import verify
from lab.mutate.edits import find, move

INIT, LOSS = cases.tied(64, 16, 4)
RANKS = range(4)


def lowered(zero: int) -> Program:
    spec = fzero.Spec(
        loss=LOSS, optimizer=fzero.optim.adamw(1e-2), mesh={"dp_out": 2, "dp": 2}, zero=zero, transfers="p2p",
        prefetch=2, bucket_bytes=300,
    )  # fmt: skip
    return kept.lower(spec, INIT(fzero.random.key(0)), cases.tokens(4, 8, 64)).program


def other_orders(program: Program, *axes: str) -> list[Program]:
    """The program with two collectives along these axes the other way round, for each two that follow one another."""
    starts = find(program, lambda op: op.is_collective)
    pairs = [(a, b) for a, b in itertools.pairwise(starts) if {program.ops[a].axis, program.ops[b].axis} == {*axes}]
    return [move(program, late, early) for early, late in pairs]


def refusal(programs: dict[int, Program]) -> str:
    """The message of `verify`; "" if it accepts these programs."""
    try:
        verify(programs)
    except VerifyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_that_all_wait_for_another_are_refused(zero: int) -> None:
    """Along dp first on ranks 0 and 3, along dp_out first on 1 and 2: nobody's group is there. Else somebody's is."""
    program = lowered(zero)
    others = [p for p in other_orders(program, "dp", "dp_out") if not refusal(dict.fromkeys(RANKS, p))]
    assert others
    for other in others[:3]:
        for broken in ((0,), (0, 1), (0, 2), (0, 3), (1, 2)):
            said = refusal({rank: other if rank in broken else program for rank in RANKS})
            assert bool(said) == (broken in ((0, 3), (1, 2))), said
            assert not said or (said.startswith("[same order]") and "waits for rank 0 over dp" in said)


def test_two_ranks_of_two_common_groups_start_them_in_one_order() -> None:
    """All four are a group, and two of them one along dp_out: one rank of another order is enough."""
    program = lowered(1)
    others = other_orders(program, "dp_out", "dp_out.dp")
    assert others
    for other in others:
        rank, _, what = next(waiting_in_a_circle({1: other, **{r: program for r in RANKS if r != 1}}))
        assert rank in (1, 3)
        assert "rank 1 waits for rank 3 over dp_out" in what
        assert "rank 3 waits for rank 1 over dp_out" in what
        assert not list(waiting_in_a_circle(dict.fromkeys(RANKS, other)))
