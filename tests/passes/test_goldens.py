"""Each pass by its effect, as text a person can read (tests/golden/<pass>/); and what all of them make of a program.

For small steps: `accumulate`, `cast_before_gather`, `narrow`, `recompute`, `segment`, `share`, `rematerialise_views`,
`shard_update` with `outer_run`, `write_in_place`, `size_workspaces`. By its role's program: `assign_roles`, `by_role`,
`chunks`, `split_backward`. Off the device: `place_moves`, `tile_updates`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cases
import pytest
from naive_steps import written
from passed import OFFLOADED, OFFLOADING, WAITING, Stage, stages, upto, without_lines
from tp_models import gpt

import fzero
from fzero.ir.decisions import RoleDecisions
from fzero.ir.program import Program
from fzero.passes import PASSES, Options
from fzero.verify.rules import verify

GOLDENS = [(name, case) for case in cases.GOLDEN_CASES for name, _, _ in PASSES]
GOLDENS = [(name, case) for name, case in GOLDENS if name not in (*OFFLOADING, "offload_gradients")]
GOLDENS += [("offload_gradients", "zero3_clip")]
GOLDENS += [(name, f"zero3_offload_{where}") for where in ("device", "cpu") for name in OFFLOADING]


@cache
def golden_stages(case: str) -> dict[str, Stage]:
    if case in cases.GOLDEN_CASES:
        return stages(
            cases.naive(**cases.GOLDEN_CASES[case]),
            Options(remat=cases.spec(**cases.GOLDEN_CASES[case]).memory.remat_rules),
        )
    if case == "zero3_clip":
        return stages(cases.naive(2, cases.layers(depth=4), **WAITING), Options(gradients={"**": "disk"}))
    place = "cpu" if case.endswith("cpu") else "device"
    options = Options(remat={"first": "offload"}, decided=RoleDecisions().but(update_on=place, tile_bytes=2048 * 4))
    return stages(cases.naive(**OFFLOADED), options)


@pytest.mark.parametrize(("name", "case"), GOLDENS)
def test_golden(name: str, case: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}/{case}", golden_stages(case)[name].text)


def test_golden_cast_before_gather(golden: Callable[[str, str], None]) -> None:
    program = cases.naive(loss=cases.bf16_loss, zero=3)
    golden("cast_before_gather/bf16", str(upto("cast_before_gather", program)))


def test_golden_narrow_of_a_narrow_wire(golden: Callable[[str, str], None]) -> None:
    how = fzero.Precision(compute="bf16", reduce="bf16")
    golden("narrow/zero3_wire", str(upto("narrow", cases.naive(zero=3, microbatches=2, reduce="each", precision=how))))


# --- all passes at once -----------------------------------------------------------------------------------------------

ON_HOST = RoleDecisions().but(update_on="cpu", tile_bytes=2048 * 4)
BOTH = {"dp_out": 2, "dp": 2}
BF16 = fzero.Precision(compute="bf16", reduce="bf16")


def passed(options: Options, world: int = 2, depth: int = 2, transport: str = "p2p", **given: Any) -> Program:
    """A program of small layers after all passes."""
    one = cases.spec(**given)
    made = written(one, cases.layers(depth=depth), cases.batch(one.microbatches * 4), world, transport)
    return upto("settle", made.program, options)


WHOLE: dict[str, Callable[[], Program]] = {
    "two_axes_bf16": lambda: passed(
        Options(), 4, zero="hsdp", mesh=BOTH, microbatches=2, reduce="each", precision=BF16
    ),
    "second_copies": lambda: passed(Options(), 4, zero="hpz", mesh=BOTH, optimizer=fzero.optim.adamw(1e-3)),
    "codes": lambda: passed(Options(), 3, zero=3, precision=fzero.Precision(gather="int8", reduce="int4")),
    "shared_memory": lambda: passed(Options(), 2, transport="shared", zero=3, microbatches=2, clip_norm=1.0),
    "offloaded_from_a_device": lambda: passed(
        Options(remat={"**": "offload"}, decided=ON_HOST), depth=4, transport="nccl", **OFFLOADED
    ),
    "gradients_on_disk": lambda: passed(
        Options(gradients={"layers/**": "disk"}), depth=4, transport="nccl", **{**OFFLOADED, "clip_norm": 1.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_golden_of_all_passes(case: str, golden: Callable[[str, str], None]) -> None:
    program = WHOLE[case]()
    verify(program)
    golden(f"passes/{case}", without_lines(str(program)))


def test_golden_of_a_sharded_step(golden: Callable[[str, str], None]) -> None:
    """Transfers within regions, of which those are repeated that save more than they send."""
    model = gpt(layers=1, width=16)
    spec = fzero.Spec(
        loss=model.loss, optimizer=cases.SGD, mesh={"dp": 2, "tp": 2}, shard=dict(model.rules), sequence="tp",
        zero=1, remat="full", prefetch=1, transfers="p2p",
    )  # fmt: skip
    program = fzero.lower(spec, model.params, model.batch(0, 0)).program
    golden("passes/sharded", without_lines(str(program)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_golden_of_the_programs_of_roles(schedule: str, golden: Callable[[str, str], None]) -> None:
    """A tied embedding is lent to the last role; the terms of a norm are exchanged."""
    init, loss = cases.tied(32, 8, 2)
    spec = fzero.Spec(
        loss=loss, optimizer=cases.SGD, microbatches=2, clip_norm=1.0, transfers="p2p", zero=1, prefetch=1,
        mesh={"pp": 2, "dp": 2}, pipeline=schedule, reduce="end",
    )  # fmt: skip
    programs = fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(4, 4, 32), world_size=4).programs
    golden(f"passes/roles_{schedule}", without_lines("\n\n".join(map(str, programs.values()))))
