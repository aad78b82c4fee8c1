"""What a plan chooses beside mesh, stage and homes: tokens in parts, and when gradients are reduced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toy_hardware import TOY

import fzero
from fzero import P, optim
from fzero.planner import NothingFitsError

WIDTH, TOKENS, LAYERS = 64, 32, 2
RULES = {"blocks/*/up": P("tp"), "blocks/*/down": P(None, "tp")}


def loss(p: Any, x: Tensor) -> Tensor:
    for k in p["blocks"]:
        x = x + F.linear(torch.tanh(F.linear(F.layer_norm(x, (WIDTH,)), k["up"])), k["down"])
    return x.square().mean()


def params() -> Any:
    shapes = {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
    return {"blocks": [{name: torch.empty(*shape, device="meta") for name, shape in shapes.items()}] * LAYERS}


def rows(n: int) -> Tensor:
    return torch.empty(n, TOKENS, WIDTH, device="meta")


def planned(memory: int | None = None, world: int = 4, **fields: Any) -> fzero.Planned:
    options = {"mesh": {"tp": 4}, "shard": RULES, **fields}
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), **options)
    return fzero.plan(spec, params(), rows(8), world_size=world, hardware=TOY, memory=memory, most=40)


@pytest.mark.acceptance
def test_tokens_stay_in_parts_where_else_nothing_fits() -> None:
    given = {"remat": "none", "microbatches": 1, "offload": None, "zero": 0}
    whole, parts = (planned(**given, sequence=axis) for axis in (None, "tp"))
    assert parts.peak < 0.9 * whole.peak
    memory = (parts.peak + whole.peak) // 2
    found = planned(memory, **given)
    assert found.spec.sequence == "tp"
    assert found.choices["sequence"].value == "tp"
    with pytest.raises(NothingFitsError):
        planned(memory, **given, sequence=None)
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), mesh={"tp": 4}, shard=RULES, **given)
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec})
    assert fzero.lower(pasted, params(), rows(8), world_size=4).digest == found.lowered.digest


def test_gathers_are_repeated_where_that_is_enough() -> None:
    """Less memory than without, less time than all layers twice; only where tokens stay in parts."""
    given: dict[str, Any] = {"microbatches": 1, "offload": None, "zero": 0, "sequence": "tp"}
    none, gathers, full = (planned(**given, remat=remat) for remat in ("none", "gathers", "full"))
    assert full.peak < gathers.peak < none.peak
    assert none.seconds < gathers.seconds < full.seconds
    found = planned((gathers.peak + none.peak) // 2, **given)
    assert found.seconds <= gathers.seconds
    assert any(row.candidate.remat == "gathers" for row in found.table)
    whole = planned(**{**given, "sequence": None})
    assert not any(row.candidate.remat == "gathers" for row in whole.table)


def test_a_length_that_the_ranks_do_not_divide_is_planned_without_parts() -> None:
    """Three tokens over two ranks: such candidates are refused, others of their mesh are tried."""
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), mesh={"tp": 2}, shard=RULES)
    batch = torch.empty(8, 3, WIDTH, device="meta")
    found = fzero.plan(spec, params(), batch, world_size=2, hardware=TOY, most=8)
    assert any(row.candidate.sequence is None and not row.refused for row in found.table)
    assert fzero.lower(found.spec, params(), batch, world_size=2).digest == found.lowered.digest


def test_when_gradients_are_reduced_is_chosen_and_may_be_given() -> None:
    given = {"mesh": {"dp": 4}, "shard": None, "microbatches": 2, "zero": 2, "remat": "none", "offload": None}
    found = planned(**given)
    assert {row.candidate.reduce for row in found.table} >= {"each", "end"}
    assert found.spec.reduce in ("each", "end")
    assert found.choices["reduce"].value == found.spec.reduce
    for how in ("each", "end"):
        pinned = planned(**given, reduce=how)
        assert {row.candidate.reduce for row in pinned.table} == {how}
        assert pinned.spec.reduce == how
        assert found.seconds <= pinned.seconds
    once = planned(**{**given, "microbatches": 1})
    assert "reduce" not in once.choices
    assert once.spec.reduce is None
