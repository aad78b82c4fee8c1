"""What `Lowered` says of its way: one line for each pass, and the program after any of them."""

from __future__ import annotations

import importlib

import cases
import pytest
from tp_models import gpt

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
@pytest.mark.sampled(2)
def test_the_program_after_every_pass(options: dict[str, object]) -> None:
    lowered = cases.lowered(2, **options)
    assert [record.name for record in lowered.passes] == [name for name, _, _ in PASSES]
    trail = dict(lowered.trail())
    before = lowered.after("lower")
    assert before.passes == ("lower",)
    assert lowered.after("segment") == trail["segment"]
    for record in lowered.passes:
        program = trail[record.name]
        idle = record.name in OFFLOADING  # nothing lies elsewhere: these give back what they are given
        assert program.passes == (before.passes if idle else (*before.passes, record.name))
        assert fzero.parse(str(program)) == program
        counts = {kind: sum(op.kind == kind for op in program.ops) for kind in record.after}
        assert counts == dict(record.after)
        before = program
    assert before == lowered.program


def test_of_a_pipeline_each_role_has_programs_of_its_own() -> None:
    """From where it is cut on; budgets may have changed the options of one role alone."""
    model = gpt(layers=2)
    spec = fzero.Spec(
        loss=model.loss,
        optimizer=fzero.optim.sgd(0.1),
        mesh={"pp": 2, "dp": 2},
        microbatches=2,
        zero=3,
        offload="optimizer",
    )
    lowered = fzero.lower(spec, model.params, model.batch(0, 0), world_size=4)
    names = [record.name for record in lowered.passes]
    cut = names.index("by_role")
    trails = {role: dict(lowered.trail(role)) for role in lowered.programs}
    assert trails[1][names[cut - 1]] == trails[0][names[cut - 1]]
    assert trails[1]["by_role"] != trails[0]["by_role"]
    assert lowered.after("by_role", role=1) == trails[1]["by_role"]
    for role, program in lowered.programs.items():
        assert trails[role][names[-1]].ops == program.ops
    for record in lowered.passes[cut:]:
        counts = {kind: sum(op.kind == kind for op in trails[0][record.name].ops) for kind in record.after}
        assert counts == dict(record.after), record.name
    with pytest.raises(KeyError, match="there is no role 2: the roles are 0, 1"):
        lowered.after("segment", role=2)


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
