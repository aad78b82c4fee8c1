"""The mutation harness at its full count: what `lab.mutate` prints, asserted; and damaged text, many times over."""

import random

import pytest
import torch

import fzero
from fzero.verify.rules import verify
from lab.mutate import ANY, PARTS, draw, run
from lab.mutate.text import damaged

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(14400)]


# of a part: how many of all its kinds change meaning, and of each kind, and the unbroken programs
COUNTS = {
    "roles": (1500, 100, 60),
    "moves": (350, 50, 20),
    "hierarchy": (550, 50, 60),
    "axes": (1500, 50, 60),
    "coded": (1150, 50, 60),
    "kept": (300, 12, 20),
    "windows": (300, 12, 20),
}


def test_eight_thousand_mutants_are_caught_and_no_program_is_refused() -> None:
    report = run(count=8000, seed=0, each=50, unbroken=240)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert report.unbroken >= 240
    assert sum(report.changing.values()) >= 8000
    assert [kind for kind in ANY if report.changing[kind] < 50] == []


@pytest.mark.parametrize("name", PARTS)
def test_mutants_of_a_part_are_caught_and_no_program_of_it_is_refused(name: str) -> None:
    (count, each, unbroken), part = COUNTS[name], PARTS[name]
    report = run(count, seed=0, each=each, unbroken=unbroken, kinds=tuple(part.kinds), source=part.draw)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert sum(report.changing.values()) >= count
    assert [kind for kind in part.kinds if report.changing[kind] < each] == []


def test_no_text_brings_verify_to_another_end_than_an_answer() -> None:
    rng, refusals = random.Random(0), []
    torch.manual_seed(0)
    for number in range(40):
        programs = draw(rng, number).programs
        for _ in range(250):
            rank = rng.choice(sorted(programs))
            try:
                broken = fzero.parse(damaged(rng, str(programs[rank])), programs[rank].segments)
            except ValueError:
                continue
            try:
                verify({**programs, rank: broken})
            except fzero.VerifyError as error:
                refusals.append(error)
    assert [str(error) for error in refusals if error.__cause__ is not None] == []
    assert len(refusals) >= 2000
