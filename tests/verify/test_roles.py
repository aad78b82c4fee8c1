"""The roles of a pipeline are judged together: what is broken on purpose is refused, for a reason that is said."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import cases
import pytest

import fzero
from fzero.errors import VerifyError
from fzero.ir.mesh import Mesh
from fzero.ir.program import Program
from fzero.ir.records import Op
from fzero.tools.mutate.text import damaged
from fzero.verify.rules import verify

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
INIT, LOSS = cases.gpt(64, 16, 4, 2)
Programs = dict[int, Program]
Ops = list[Op]


@cache
def lowered(schedule: str) -> fzero.Lowered:
    spec = fzero.Spec(
        loss=LOSS, optimizer=fzero.optim.adamw(1e-2), microbatches=4, reduce="end", transfers="p2p", clip_norm=1.0,
        zero=1, mesh={"pp": 2, "dp": 2}, pipeline=schedule,
    )  # fmt: skip
    return fzero.lower(spec, INIT(fzero.random.key(0)), cases.tokens(4, 8, 64))


def numbers(ops: Ops, wanted: Callable[[Op], bool]) -> list[int]:
    return [i for i, op in enumerate(ops) if wanted(op)]


def alike(program: Program, ops: Ops, found: list[int]) -> list[tuple[int, int]]:
    """Pairs of ops whose messages have one shape and dtype."""
    kinds = {i: program.buffers[(ops[i].reads or ops[i].writes)[0].name] for i in found}
    return [
        (i, j)
        for i in found
        for j in found
        if i < j and (kinds[i].shape, kinds[i].dtype) == (kinds[j].shape, kinds[j].dtype)
    ]


def tags_swapped(rng: random.Random, program: Program) -> Iterator[Ops]:
    ops = list(program.ops)
    for i, j in rng.sample(pairs := alike(program, ops, numbers(ops, lambda op: op.is_recv)), min(4, len(pairs))):
        ops[i], ops[j] = ops[i].with_attrs(tag=ops[j].tag), ops[j].with_attrs(tag=ops[i].tag)
        yield ops
        ops = list(program.ops)


def left_out(rng: random.Random, program: Program) -> Iterator[Ops]:
    for i in rng.sample(numbers(list(program.ops), lambda op: op.phase == "region"), 4):
        yield [*program.ops[:i], *program.ops[i + 1 :]]


def gradient_left_out(rng: random.Random, program: Program) -> Iterator[Ops]:
    sums = numbers(list(program.ops), lambda op: op.is_run and op.is_flat and op.why.startswith("add "))
    for i in rng.sample(sums, min(4, len(sums))):
        yield [*program.ops[:i], *program.ops[i + 1 :]]


def gradient_twice(rng: random.Random, program: Program) -> Iterator[Ops]:
    sums = numbers(list(program.ops), lambda op: op.is_run and op.is_flat and op.why.startswith("add "))
    for i in rng.sample(sums, min(4, len(sums))):
        yield [*program.ops[:i], program.ops[i], *program.ops[i:]]


def another_microbatch(rng: random.Random, program: Program) -> Iterator[Ops]:
    ops = list(program.ops)
    runs = numbers(ops, lambda op: op.phase == "region" and op.microbatch > 0)
    for i in rng.sample(runs, min(6, len(runs))):
        m = ops[i].microbatch
        for n, ref in enumerate(ops[i].reads):
            other = ref.name.removesuffix(f".{m}") + f".{m - 1}"
            if ref.name.endswith(f".{m}") and other in program.buffers and program.buffers[ref.name].bucket is None:
                reads = (*ops[i].reads[:n], replace(ref, name=other), *ops[i].reads[n + 1 :])
                yield [*ops[:i], replace(ops[i], reads=reads), *ops[i + 1 :]]
                break


def before_its_input(rng: random.Random, program: Program) -> Iterator[Ops]:
    """An op that reads what has been received, before the wait for it."""
    ops = list(program.ops)
    waits = [
        i for i in numbers(ops, lambda op: op.is_wait and op.why.startswith("from role")) if ops[i : i + 2][-1].is_run
    ]
    for i in rng.sample(waits, min(4, len(waits))):
        yield [*ops[:i], ops[i + 1], ops[i], *ops[i + 2 :]]


def wrong_role(rng: random.Random, program: Program) -> Iterator[Ops]:
    ops = list(program.ops)
    for i in rng.sample(sends := numbers(ops, lambda op: op.is_message), min(4, len(sends))):
        yield [*ops[:i], ops[i].with_attrs(peer=program.role or 0), *ops[i + 1 :]]


def lost(rng: random.Random, program: Program) -> Iterator[Ops]:
    """A message that is never sent, with the wait for it."""
    ops = list(program.ops)
    for i in rng.sample(sends := numbers(ops, lambda op: op.is_send), min(4, len(sends))):
        wait = next(j for j in range(i, len(ops)) if ops[j].is_wait and ops[j].target == ops[i].target)
        yield [*ops[:i], *ops[i + 1 : wait], *ops[wait + 1 :]]


KINDS = (
    tags_swapped, left_out, gradient_left_out, gradient_twice, another_microbatch, before_its_input, wrong_role, lost,
)  # fmt: skip


def caught(programs: Programs, rank: int, ops: Ops) -> bool:
    try:
        verify({**programs, rank: replace(programs[rank], ops=tuple(ops))})
    except VerifyError as error:
        return "cannot be checked" not in str(error)
    return False


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(1)
def test_broken_roles_are_refused(schedule: str, whole: bool) -> None:
    """In make test two of each kind and role."""
    programs, rng = lowered(schedule).roles, random.Random(schedule)
    tried: Counter[str] = Counter()
    for kind in KINDS:
        for rank, program in programs.items():
            for ops in islice(kind(rng, program), None if whole else 2):
                tried[kind.__name__] += 1
                assert caught(programs, rank, ops), f"{kind.__name__} of rank {rank} under {schedule}"
    assert sum(tried.values()) >= (40 if whole else 20)
    assert all(tried[kind.__name__] for kind in KINDS)


@pytest.mark.acceptance
def test_a_hundred_of_each_kind_are_refused() -> None:
    tried: Counter[str] = Counter()
    rng = random.Random(0)
    while min((tried[kind.__name__] for kind in KINDS), default=0) < 100:
        programs = lowered(rng.choice(SCHEDULES)).roles
        for kind in KINDS:
            rank = rng.choice(sorted(programs))
            for ops in kind(rng, programs[rank]):
                tried[kind.__name__] += 1
                assert caught(programs, rank, ops), kind.__name__
    print(dict(tried))


def test_one_rank_of_a_role_may_not_differ() -> None:
    """All ranks of the grid are given: a mutant on one of them breaks its column."""
    made = lowered("1f1b")
    mesh = made.plan.mesh
    ranks = {rank: made.programs[mesh.coordinate(rank, "pp")] for rank in range(mesh.world_size)}
    verify(ranks)
    broken = next(left_out(random.Random(0), ranks[3]))
    assert caught(ranks, 3, broken)


def test_messages_name_the_rule() -> None:
    made = lowered("1f1b")
    first, second = made.roles
    with pytest.raises(VerifyError, match=r"\[roles\].*no program is given for roles \[1\]"):
        verify(made.programs[0])
    with pytest.raises(VerifyError, match=r"\[roles\].*it is for role 1, the rank's is 0"):
        verify({first: made.roles[second], second: made.roles[second]})


def test_roles_that_wait_for_each_other_are_refused() -> None:
    """Both send first and receive then, and wait for the send between: with a transport that buffers nothing neither
    goes on."""
    made = lowered("1f1b")
    programs = {}
    for rank, program in made.roles.items():
        ops = [op for op in program.ops if not (op.is_recv or (op.is_wait and op.why.startswith("from role")))]
        late = [op for op in program.ops if op not in ops]
        programs[rank] = replace(program, ops=(*ops, *late))
    with pytest.raises(VerifyError):
        verify(programs)


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
