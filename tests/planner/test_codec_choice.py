"""Codecs that are allowed are taken where the wire is slow, and only there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import fzero
from fzero import hardware, optim
from fzero.errors import SpecError

PARAMS = {"w": torch.empty(1024, 1024, device="meta"), "v": torch.empty(1024, 1024, device="meta")}
BATCH = torch.empty(64, 1024, device="meta")


def loss(p: Any, x: Any) -> Any:
    return (torch.relu(x @ p["w"]) @ p["v"]).square().mean()


@cache
def planned(faster: float, **given: Any) -> fzero.Planned:
    machine = hardware.load("h100")
    levels = tuple(replace(level, bytes=level.bytes * faster) for level in machine.levels)
    fields = {"zero": 3, "mesh": {"dp": 8}, "microbatches": 1, "remat": "none", "offload": None}
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), **fields)
    return fzero.plan(spec, PARAMS, BATCH, world_size=8, hardware=replace(machine, levels=levels), **given)


def test_a_slow_wire_takes_the_codec_that_saves_most() -> None:
    found = planned(1e-4, codecs=("int8", "int4"))
    policy = found.spec.numerics.policy
    assert (policy.gather, policy.reduce) == ("int4", "int4")
    assert found.seconds < planned(1e-4).seconds / 3
    assert "int8" in found.choices["precision"].reason
    assert "precision=Precision(" in found.python()
    assert found.spec.zero == 3


def test_a_fast_wire_takes_none() -> None:
    found = planned(100.0, codecs=("int8",))
    assert found.spec.numerics.policy.gather is None
    assert found.choices["precision"].value == "fp32"


def test_none_is_tried_that_was_not_allowed() -> None:
    assert planned(1e-4).spec.numerics.policy.gather is None


@pytest.mark.parametrize(
    ("codecs", "precision", "message"),
    [
        (("sign",), "fp32", "'sign' is none of int8, int4"),
        (("int8",), fzero.Precision(gather="int4"), "precision says gather='int4'"),
    ],
)
def test_refusals(codecs: Any, precision: Any, message: str) -> None:
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), precision=precision)
    with pytest.raises(SpecError, match=message):
        fzero.plan(spec, PARAMS, BATCH, world_size=8, hardware="h100", codecs=codecs)
