"""Every kind of op has a meaning, wherever its operands lie, or is refused: one more op of each kind in each place."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import cases
import pytest
import torch
from helpers import run
from torch import Tensor

import fzero
from fzero.ir.kinds import OPS, OpKind, register
from fzero.ir.op import make_op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from lab.mutate import Bench
from lab.mutate.corpus import Case, lowered
from lab.mutate.edits import find, insert, with_buffers
from lab.mutate.inserted import place_of, with_one_more
from lab.mutate.models import MODELS
from lab.mutate.oracle import difference, outcome

MOMENTUM = fzero.optim.sgd(0.1, momentum=0.9)
PLACED = {
    "zero 3": {"zero": 3, "clip_norm": 0.5, "microbatches": 2, "reduce": "each"},
    "zero 1, shared memory": {"zero": 1, "transfers": "shared", "bucket_bytes": 1024},
    "two data axes": {"mesh": {"dp_out": 2, "dp": 2}, "zero": "hsdp", "transfers": "shared"},
    "on the host and the disk": {
        "zero": 2, "offload": {"params/**": "cpu", "**": "nvme"}, "nvme_path": "/nvme", "update_on": "cpu",
    },
}  # fmt: skip
SCHEDULE = ("more bytes", "a higher peak")  # what an op may cost that changes nothing


@cache
def bench(name: str) -> Bench:
    placed = PLACED[name]
    world = 4 if "mesh" in placed else 2
    return Bench(lowered(name, MODELS["mlp"], MOMENTUM, placed, world, torch.Generator().manual_seed(0)))


def judged(kind: OpKind, name: str, each: int) -> tuple[Counter[str], list[str]]:
    """(how many ops of a kind were tried, refused and without effect in each place; what was accepted and is not)."""
    own, counts, missed = bench(name), Counter[str](), []
    program = own.case.programs[0]
    rng = random.Random(f"{kind.name} {name}")
    by_place: dict[str, list[str]] = {}
    for buffer in program.buffers:
        by_place.setdefault(place_of(program, buffer), []).append(buffer)
    for place, buffers in by_place.items():
        for _ in range(each):
            broken = with_one_more(rng, program, kind, rng.choice(buffers))
            if broken is None:
                continue
            counts[place] += 1
            programs = dict.fromkeys(own.case.programs, broken)
            if own.refusal(programs) is not None:
                counts["refused"] += 1
                continue
            changes = difference(own.sound, outcome(own.case, programs))
            if changes is not None and not changes.startswith(SCHEDULE):
                text = next(op for op in broken.ops if op.why == "one more" or op not in program.ops)
                missed.append(f"{text}: {changes}")
    return counts, missed


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.sampled(6)
def test_each_kind_in_each_place_has_its_meaning_or_is_refused(kind: str, name: str, whole: bool) -> None:
    counts, missed = judged(OPS[kind], name, 40 if whole else 6)
    assert missed == []
    lane = kind != "move" or "disk" in name
    assert counts["refused"] > 0 or not lane, counts


@pytest.fixture(scope="module")
def good() -> Program:
    return cases.lowered(zero=3, microbatches=2, reduce="each", clip_norm=1.0).program


def test_an_exchange_of_a_bucket_beside_its_sum(good: Program) -> None:
    """Every rank would end with parts of the others' gradients under the names of its own."""
    at = find(good, lambda op: op.reduces and op.row.scatters)[0]
    grad = good.ops[at].reads[0]
    exchange = make_op("all_to_all", [grad], [grad], axis="dp")
    broken = insert(good, at, exchange, make_op("wait", [Ref(grad.name)]))
    with pytest.raises(fzero.VerifyError, match=r"^\[reduced once\] op \d+ `reduce_scatter .* a second time"):
        fzero.verify(broken)


def test_a_kind_that_nobody_gave_a_meaning(good: Program) -> None:
    record = OPS["all_to_all"].collective
    assert record is not None
    swap = OpKind("swap", (1, 1), (1, 1), transfers=True, collective=replace(record, source="value", target="value"))
    at = find(good, lambda op: op.reduces and op.row.scatters)[0]
    grad = good.ops[at].reads[0]
    broken = insert(good, at, make_op("swap", [grad], [grad], axis="dp"), make_op("wait", [Ref(grad.name)]))
    with register(swap), pytest.raises(fzero.VerifyError, match=r"swap of .* has no meaning"):
        fzero.verify(broken)


@pytest.mark.parametrize("transfers", ["auto", "shared"])
def test_a_metric_of_another_shape(transfers: str) -> None:
    """The loss is what an all-reduce writes, which counts elements and no dims."""
    good = cases.lowered(zero=1, transfers=transfers).program
    loss = good.buffers[good.metrics["loss"]]
    assert loss.shape == ()
    with pytest.raises(fzero.VerifyError, match="computes something else than what was captured"):
        fzero.verify(with_buffers(good, replace(loss, shape=(1,))))


def test_a_metric_that_another_role_sends_in_another_shape() -> None:
    lowered = fzero.lower(cases.spec(mesh={"pp": 2}, microbatches=2), cases.layers(), cases.batch(8), world_size=2)
    fzero.verify(lowered.roles)
    for rank, program in lowered.roles.items():
        for name in program.metrics.values():
            broken = with_buffers(program, replace(program.buffers[name], shape=(1,)))
            with pytest.raises(fzero.VerifyError):
                fzero.verify({**lowered.roles, rank: broken})


def test_no_case_is_refused_as_it_is() -> None:
    cases_: list[Case] = [bench(name).case for name in PLACED]
    assert [bench(case.name).refused for case in cases_] == [None] * len(cases_)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_part_of_what_has_no_elements_is_a_part(microbatches: int) -> None:
    """Extras that a batch has none of: their bounds are those of the whole, in each microbatch."""

    def loss(p: Any, b: Any) -> Tensor:
        return (b["x"] @ p["w"]).square().mean() + b["extras"].sum() * p["w"].sum()

    w, x = torch.linspace(-1, 1, 6).view(3, 2), torch.linspace(0, 1, 12).view(4, 3)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.5), mesh={"dp": 2}, microbatches=microbatches)
    found = run(spec, {"w": w}, lambda rank, step: {"x": x, "extras": torch.zeros(4, 0)}, world=2, steps=1)
    torch.testing.assert_close(found.final["params/w"], w - 0.5 * x.t() @ (x @ w) * 2 / 8)
