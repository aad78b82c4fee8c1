"""The fields of a Spec: each is checked by the one group that reads it, and has one default."""

from collections import UserList
from dataclasses import fields
from typing import Any

import pytest

import fzero
from fzero.plan.memory_use import MemoryUse
from fzero.plan.parallelism import Parallelism
from fzero.precision import Numerics
from fzero.run_options import RunOptions

GROUPS = (Parallelism, MemoryUse, Numerics, RunOptions)
FORM = {"loss", "optimizer", "step"}  # what a step is; a Spec checks them itself


def test_each_field_is_of_one_group() -> None:
    grouped = [f.name for group in GROUPS for f in fields(group)]
    assert sorted(grouped) == sorted({f.name for f in fields(fzero.Spec)} - FORM)


@pytest.mark.parametrize("group", GROUPS)
def test_a_field_has_one_default(group: Any) -> None:
    defaults = {f.name: f.default for f in fields(fzero.Spec)}
    assert {f.name: f.default for f in fields(group)} == {f.name: defaults[f.name] for f in fields(group)}


def test_a_group_has_what_the_spec_was_given() -> None:
    spec = fzero.Spec(
        loss=lambda p, b: p["w"].sum(), optimizer=fzero.optim.sgd(0.1), mesh={"dp": 2}, zero=1, offload="optimizer",
        clip_norm=1.0, compile="auto",
    )  # fmt: skip
    assert (spec.parallel.mesh, spec.parallel.zero) == ({"dp": 2}, 1)
    assert spec.memory.offload_rules == {"optimizer": "cpu"}
    assert spec.numerics.clip_norm == 1.0
    assert spec.run.compile == "auto"


@pytest.mark.parametrize(
    ("group", "given", "message"),
    [
        (Parallelism, {"zero": 4}, r"Spec\(zero=4\): needed a stage 0, 1, 2 or 3"),
        (Parallelism, {"mesh": {"dp": 0}}, r"Spec\(mesh\['dp'\]=0\): needed a positive int"),
        (MemoryUse, {"prefetch": -1}, r"Spec\(prefetch=-1\): needed 0 or a positive int"),
        (MemoryUse, {"nvme_path": "/tmp"}, r"nvme_path.*needed offload="),
        (Numerics, {"clip_norm": 0}, r"Spec\(clip_norm=0\): needed a number > 0"),
        (Numerics, {"nonfinite": "skp"}, r"Did you mean 'skip'"),
        (RunOptions, {"timeout": 0}, r"Spec\(timeout=0\): needed seconds > 0"),
        (
            RunOptions,
            {"device": "meta"},
            r"Spec\(device='meta'\): needed a device with memory.*fzero.lower meta tensors",
        ),
        (RunOptions, {"device": "cda"}, r"Spec\(device='cda'\): needed a device's name"),
        (RunOptions, {"device": "mps"}, r"Spec\(device='mps'\): needed a kind of device that .* runs on: cpu or cuda"),
    ],
)
def test_a_group_checks_itself(group: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        group(**given)


def test_rules_may_be_any_sequence() -> None:
    assert Numerics(trainable=UserList(["a/**", "b"])).trainable_rules == ("a/**", "b")
    for wrong in (UserList([]), UserList([1]), b"a", 3):
        with pytest.raises(fzero.SpecError, match="needed path rules"):
            Numerics(trainable=wrong)  # type: ignore[arg-type]
