"""Programs broken at random, some of each kind of `python -m lab.mutate`, and what its oracle stands on: poison.

Both sides are protected: every mutant that changes the meaning of its program is refused, and no unbroken program is.
The full count runs under `make acceptance`.
"""

import random
from dataclasses import replace

import pytest
import torch

import fzero
from fzero.ir.op import make_op
from fzero.ir.records import Ref
from fzero.runtime.interpreter import interpret
from fzero.state import storage
from lab.mutate import (
    ANY,
    AXES,
    KINDS,
    PARTS,
    Bench,
    draw,
    draw_coded,
    draw_hierarchy,
    draw_kept,
    draw_offloaded,
    draw_parallel,
    draw_pipeline,
    draw_windowed,
    run,
)
from lab.mutate.corpus import Case, lowered, relay
from lab.mutate.edits import find, insert, never_freed, with_buffers
from lab.mutate.models import MODELS
from lab.mutate.oracle import difference, outcome

# --- at random --------------------------------------------------------------------------------------------------------

UNBROKEN, EACH = (
    {
        draw: 3,
        draw_pipeline: 1,
        draw_hierarchy: 1,
        draw_offloaded: 1,
        draw_parallel: 1,
        draw_coded: 1,
        draw_windowed: 2,
        draw_kept: 2,
    },
    3,
)
ALL_UNBROKEN = {
    draw: 14,
    draw_pipeline: 3,
    draw_hierarchy: 2,
    draw_offloaded: 3,
    draw_parallel: 4,
    draw_coded: 4,
    draw_windowed: 5,
    draw_kept: 5,
}


@pytest.fixture(scope="module")
def benches(whole: bool) -> list[Bench]:
    rng = random.Random(0)
    sources = ALL_UNBROKEN if whole else UNBROKEN
    drawn = [Bench(source(rng, number)) for source, count in sources.items() for number in range(count)]
    ranks_differ = relay(3, torch.Generator().manual_seed(0))  # and are more than two
    tiled = draw_offloaded(random.Random(6), 0)  # the others may have drawn none, of these three
    signs, blocks = draw_coded(random.Random(6), 1), draw_windowed(random.Random(10), 1)
    return [*drawn, *map(Bench, (ranks_differ, tiled, signs, blocks))]


def test_no_unbroken_program_is_refused(benches: list[Bench]) -> None:
    assert [(b.case.name, b.refused) for b in benches if b.refused is not None] == []


def test_poison_changes_nothing_in_an_unbroken_program(benches: list[Bench]) -> None:
    for bench in benches:
        assert bench.sound.error is None, bench.case.name
        memory = [{name: tensor.clone() for name, tensor in own.items()} for own in bench.case.memory]
        interpret(bench.case.programs, memory)
        plain = [
            storage.local(bench.case.plan, own, leaf, r)
            for r, own in enumerate(memory)
            for leaf in bench.case.plan.leaves
        ]
        assert all(map(torch.equal, plain, bench.sound.state)), bench.case.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_every_mutant_that_changes_meaning_is_refused(kind: str, benches: list[Bench]) -> None:
    rng, changing, missed = random.Random(kind), 0, []
    for _ in range(20):
        for bench in rng.sample(benches, len(benches)):
            for mutant in bench.mutants(kind, rng):
                changing += mutant.changes is not None
                if mutant.changes is not None and mutant.refused is None:
                    missed.append(f"{bench.case.name}: {mutant.changes}")
            if changing >= EACH:
                break
    assert missed == []
    assert changing >= EACH, f"only {changing} mutants changed a meaning"


def test_each_kind_is_of_any_program_or_of_one_part() -> None:
    """`run` would never end with kinds that none of its programs has."""
    kinds = [*ANY, *(kind for part in PARTS.values() for kind in part.kinds)]
    assert sorted(kinds) == sorted(KINDS)
    assert len(KINDS) >= 175


def test_mutants_of_several_axes_are_refused() -> None:
    """One of each kind at least; 1,500 under `make acceptance`."""
    report = run(count=1, seed=2, each=1, unbroken=1, kinds=tuple(AXES), source=draw_parallel)
    assert report.good, report
    assert min(report.changing[kind] for kind in AXES) >= 1


# --- what the oracle stands on: poison --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relayed() -> Case:
    return relay(2, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def sharded() -> Bench:
    """A program with gathers, scatters and exchanges, two microbatches and a norm."""
    placed = {"zero": 3, "microbatches": 2, "reduce": "each", "clip_norm": 1.0}
    generator = torch.Generator().manual_seed(0)
    return Bench(lowered("sharded", MODELS["mlp"], fzero.optim.sgd(0.1, momentum=0.9), placed, 2, generator))


def test_messages_arrive(relayed: Case) -> None:
    memory = [{n: t.clone() for n, t in own.items()} for own in relayed.memory]
    interpret(relayed.programs, memory, poison=True)
    for rank in (0, 1):
        for name in ("x", "y"):
            torch.testing.assert_close(
                memory[rank][name], relayed.memory[rank][name] + relayed.memory[1 - rank][name] / 2
            )


@pytest.mark.parametrize("which", ["source", "scratch"])
def test_poison_finds_memory_of_a_transfer_that_is_freed_in_flight(which: str, sharded: Bench) -> None:
    program = sharded.case.programs[0]
    at = find(program, lambda op: op.reduces and op.row.scatters)[0]
    name = program.ops[at].reads[0].name if which == "source" else program.ops[at].writes[1].name
    broken = insert(never_freed(program, name), at + 1, make_op("free", [Ref(name)]))
    assert "HazardError" in str(outcome(sharded.case, {0: broken, 1: broken}).error)


def test_poison_finds_memory_placed_over_what_is_in_use(sharded: Bench) -> None:
    program = sharded.case.programs[0]
    at = find(program, lambda op: op.reduces and op.row.scatters)[0]
    live, taker = (program.buffers[ref.name] for ref in (program.ops[at].reads[0], program.ops[at].writes[1]))
    over = with_buffers(program, replace(taker, at=live.at))
    assert difference(sharded.sound, outcome(sharded.case, {0: over, 1: over})) is not None
