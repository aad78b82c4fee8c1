"""The mutation harness at its full count: what `lab.mutate` prints, asserted; and damaged text, many times over."""

import random

import pytest
import torch

import fzero
from fzero.verify.rules import verify
from lab.mutate import (
    AXES,
    CODED,
    HIERARCHY,
    KEPT,
    KINDS,
    ROLES,
    WINDOWS,
    draw,
    draw_coded,
    draw_hierarchy,
    draw_kept,
    draw_parallel,
    draw_pipeline,
    draw_windowed,
    run,
)
from lab.mutate.text import damaged

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(14400)]


def test_eight_thousand_mutants_are_caught_and_no_program_is_refused() -> None:
    report = run(count=8000, seed=0, each=50, unbroken=240)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert report.unbroken >= 200
    assert sum(report.changing.values()) >= 8000
    assert [kind for kind in KINDS if report.changing[kind] < 50] == []
    assert len(KINDS) >= 28 + 35 + len(ROLES) + len(HIERARCHY) + len(AXES) + len(CODED)


def test_a_hundred_of_each_kind_of_pipelines_are_caught_and_no_pipeline_is_refused() -> None:
    report = run(count=0, seed=0, each=100, unbroken=60, kinds=tuple(ROLES), source=draw_pipeline)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert [kind for kind in ROLES if report.changing[kind] < 100] == []
    assert len(ROLES) >= 14


def test_fifty_of_each_kind_of_two_data_axes_are_caught_and_no_program_is_refused() -> None:
    report = run(count=0, seed=0, each=50, unbroken=60, kinds=tuple(HIERARCHY), source=draw_hierarchy)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert [kind for kind in HIERARCHY if report.changing[kind] < 50] == []
    assert len(HIERARCHY) >= 10


def test_fifteen_hundred_of_meshes_with_tp_are_caught_and_no_program_is_refused() -> None:
    report = run(count=1500, seed=0, each=50, unbroken=60, kinds=tuple(AXES), source=draw_parallel)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert sum(report.changing.values()) >= 1500
    assert [kind for kind in AXES if report.changing[kind] < 50] == []
    assert len(AXES) >= 12


def test_a_thousand_of_messages_of_blocks_are_caught_and_no_program_is_refused() -> None:
    report = run(count=1000, seed=0, each=50, unbroken=60, kinds=tuple(CODED), source=draw_coded)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert sum(report.changing.values()) >= 1000
    assert [kind for kind in CODED if report.changing[kind] < 50] == []
    assert len(CODED) >= 15


def test_three_hundred_of_windows_and_chunks_are_caught_and_no_program_is_refused() -> None:
    report = run(count=300, seed=0, each=12, unbroken=20, kinds=tuple(WINDOWS), source=draw_windowed)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert sum(report.changing.values()) >= 300


def test_three_hundred_of_kept_copies_are_caught_and_no_program_is_refused() -> None:
    report = run(count=300, seed=0, each=12, unbroken=20, kinds=tuple(KEPT), source=draw_kept)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert sum(report.changing.values()) >= 300


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
