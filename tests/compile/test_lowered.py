"""What `Lowered` says of its way: one line for each pass, and the program after any of them."""

from __future__ import annotations

import importlib

import cases
import pytest

import fzero
from fzero.passes import PASSES

OFFLOADING = (
    "to_spaces",
    "offload_gradients",
    "schedule_updates",
    "offload_activations",
    "tile_updates",
    "place_moves",
)


@pytest.mark.parametrize("options", [{}, {"prefetch": 3}, {"microbatches": 2, "reduce": "end"}], ids=str)
def test_the_program_after_every_pass(options: dict[str, object]) -> None:
    lowered = cases.lowered(2, **options)
    assert [record.name for record in lowered.passes] == [name for name, _, _ in PASSES]
    before = lowered.after("lower")
    assert before.passes == ("lower",)
    for record in lowered.passes:
        program = lowered.after(record.name)
        idle = record.name in OFFLOADING  # nothing lies elsewhere: these give back what they are given
        assert program.passes == (before.passes if idle else (*before.passes, record.name))
        assert fzero.parse(str(program)) == program
        counts = {kind: sum(op.kind == kind for op in program.ops) for kind in record.after}
        assert counts == dict(record.after)
        before = program
    assert before == lowered.program


def test_a_pass_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="there is no pass 'gather': the passes are lower, shard_update"):
        cases.lowered(2).after("gather")


def test_a_record_says_what_changed() -> None:
    lines = [str(record) for record in cases.lowered(2).passes]
    assert any(line.startswith("free: free 0 -> ") and line.endswith("# lifetimes are final now") for line in lines)


@pytest.mark.parametrize("old", ["program", "plan.states", "plan.measured"])
def test_modules_have_no_old_names(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"fzero\.{old}"):
        importlib.import_module(f"fzero.{old}")
