"""phases: programs by the step number, all made at the first step; and where a resume, a skip and an error land."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, run, values

import fzero
from fzero import optim
from fzero.phases import Phases
from fzero.session.session import session_of

RATES = {"inner": 0.1, "outer": 1.0}


def every_third(step: int) -> str:
    assert type(step) is int, "a number of the host"
    return "outer" if step % 3 == 2 else "inner"


def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return (params["w"] * batch).square().sum()


def spec(**options: Any) -> fzero.Spec:
    phases = Phases(every_third, {name: optim.sgd(rate) for name, rate in RATES.items()})
    return fzero.Spec(loss=loss, optimizer=phases, **options)


def by_hand(w: torch.Tensor, batches: list[torch.Tensor], start: int = 0) -> torch.Tensor:
    """Plain torch: the rate of each step is that of its phase. A batch that is not finite is skipped."""
    for number, batch in enumerate(batches, start):
        w = w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss({"w": w}, batch), w)
        w = (w - RATES[every_third(number)] * grad).detach() if grad.isfinite().all() else w.detach()
    return w


def batch(number: int) -> torch.Tensor:
    return torch.full((3,), 0.1 * (number + 1))


def trained(state: fzero.State, numbers: range) -> fzero.State:
    for number in numbers:
        state = fzero.step(state, batch(number))
    return state


def test_each_step_runs_the_program_of_its_phase(caplog: pytest.LogCaptureFixture) -> None:
    state = fzero.init({"w": torch.ones(3)}, spec())
    with caplog.at_level(logging.WARNING, logger="fzero"):
        state = trained(state, range(7))
    assert torch.equal(state.params["w"].full(), by_hand(torch.ones(3), [batch(n) for n in range(7)]))
    assert caplog.text == "", "no new program is traced at a switch"


def test_all_phases_are_lowered_and_have_memory_at_the_first_step() -> None:
    state = trained(fzero.init({"w": torch.ones(3)}, spec()), range(1))
    session = session_of(state)
    lowered = list(session.programs.values())
    assert sorted(one.phase for one in lowered) == ["inner", "outer"]
    assert session.arena.numel() >= max(one.program.arena_bytes for one in lowered)
    before = [*map(id, lowered)]
    state = trained(state, range(1, 4))
    assert sorted(before) == sorted(map(id, session.programs.values()))
    state = fzero.step(state, torch.ones(1))  # it broadcasts: another shape
    assert len(session.programs) == 4


def test_a_phase_that_cannot_be_lowered_is_told_at_the_first_step() -> None:
    def wrong(state: Any, batch: Any) -> Any:
        return {"w": state["w"][:2]}, {}

    def right(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch}, {}

    one = fzero.Spec(step=Phases.after(100, ("right", right), ("wrong", wrong)))
    state = fzero.init({"w": torch.ones(3)}, one)
    with pytest.raises(fzero.TreeError, match=r"state\['w'\] was .* and the step made it"):
        fzero.step(state, torch.ones(3))
    assert state.tree["w"].full().tolist() == [1.0] * 3


def test_a_resume_lands_in_its_phase(tmp_path: Path) -> None:
    whole = trained(fzero.init({"w": torch.ones(3)}, spec()), range(6))
    for stop in (1, 2, 3):  # before, at and behind a switch
        state = trained(fzero.init({"w": torch.ones(3)}, spec()), range(stop))
        fzero.save(state, tmp_path / str(stop))
        again = trained(fzero.load(tmp_path / str(stop), spec()), range(stop, 6))
        rolled = trained(fzero.load(tmp_path / str(stop), like=state), range(stop, 6))
        for other in (again, rolled):
            assert torch.equal(other.params["w"].full(), whole.params["w"].full())


def test_a_discarded_step_counts_and_a_refused_one_does_not() -> None:
    bad = torch.full((3,), torch.inf)
    batches = [batch(0), bad, batch(2), batch(3)]
    skipping = fzero.init({"w": torch.ones(3)}, spec(nonfinite="skip"))
    for one in batches:
        skipping = fzero.step(skipping, one)
    assert torch.equal(skipping.params["w"].full(), by_hand(torch.ones(3), batches))
    raising = trained(fzero.init({"w": torch.ones(3)}, spec(nonfinite="raise")), range(2))
    with pytest.raises(fzero.NonFiniteError):
        fzero.step(raising, bad)
    raising = trained(raising, range(2, 4))  # it was the third step that failed, and is done now
    assert torch.equal(raising.params["w"].full(), by_hand(torch.ones(3), [batch(n) for n in range(4)]))


def test_a_number_that_changes_at_a_switch_becomes_a_tensor(caplog: pytest.LogCaptureFixture) -> None:
    one = fzero.Spec(loss=lambda p, b: (p["w"] * b["x"] * b["n"]).sum(), optimizer=spec().optimizer)
    state = fzero.init({"w": torch.ones(3)}, one)
    with caplog.at_level(logging.WARNING, logger="fzero"):
        for number in range(3):
            state = fzero.step(state, {"x": batch(0), "n": 1.0 if number < 2 else 2.0})
    assert torch.allclose(state.params["w"].full(), torch.full((3,), 1 - 0.1 * 0.1 * 2 - 1.0 * 0.1 * 2))
    assert caplog.text.count("a Python number that changes is a 0-d tensor") == 1


def of_rank(step: int) -> str:
    return "outer" if step and os.environ["RANK"] == "1" else "inner"


def apart() -> str:
    """What a rank is told where the ranks are in different phases."""
    phases = Phases(of_rank, {name: optim.sgd(rate) for name, rate in RATES.items()})
    state = trained(fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=phases)), range(1))
    try:
        fzero.step(state, batch(1))
    except fzero.DisagreementError as error:
        return str(error)
    return ""


def test_ranks_in_different_phases_are_told() -> None:
    for said in values(gloo(2, apart)):
        assert said.startswith("the phase of step 2 is inner on rank 0, outer on rank 1"), said


def test_an_evaluation_has_no_phase() -> None:
    state = fzero.init({"w": torch.ones(3)}, spec())
    count = lambda p, b: p["w"].sum()  # noqa: E731
    for number in range(4):
        fzero.evaluate(state, batch(0), count)
        state = fzero.step(state, batch(number))
    assert len(session_of(state).evaluations) == 1


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_switch_together(zero: int) -> None:
    done = run(spec(zero=zero), {"w": torch.ones(3)}, lambda rank, number: batch(number), world=2, steps=4)
    assert torch.allclose(done.final["params/w"], by_hand(torch.ones(3), [batch(n) for n in range(4)]))


def test_the_phase_to_lower_and_to_plan_is_an_argument() -> None:
    given = {"w": torch.ones(3)}, batch(0)
    texts = {name: str(fzero.lower(spec(), *given, phase=name).program) for name in ("", "inner", "outer")}
    assert texts[""] == texts["inner"] != texts["outer"]
    with pytest.raises(fzero.SpecError, match="phase='oter': needed one of 'inner', 'outer'"):
        fzero.lower(spec(), *given, phase="oter")
    plain = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1))
    with pytest.raises(fzero.SpecError, match=r"phase='inner'.*: neither the optimizer nor the step has phases"):
        fzero.lower(plain, *given, phase="inner")
    planned = fzero.plan(spec(), given[0], torch.ones(4, 3), world_size=2, hardware="h100", phase="outer", most=2)
    assert planned.lowered.phase == "outer"
    assert planned.spec.phases is not None
    assert planned.spec.phases.at(2) == "outer"


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (optim.adamw(0.1), optim.sgd(0.1, momentum=0.9), r"no state\['opt_state/momentum/w'\], which it needs"),
        (optim.sgd(0.1), optim.sgd(0.1, momentum=0.9), r"holds no state\['opt_state/momentum/w'\], which it needs"),
        (optim.adamw(0.1), optim.sgd(0.1), r"holds state\['opt_state/mu/w'\], which it has not"),
        (optim.adamw(0.1), optim.adamw8bit(0.1), r"no state\['opt_state/mu/codes/w'\], which it needs"),
    ],
    ids=["sgd", "momentum", "plain", "codes"],
)
def test_optimizers_of_other_states_are_told_by_phase_and_leaf(first: Any, then: Any, said: str) -> None:
    """It was an AttributeError of a library's NamedTuple, or a TreeError that named no phase."""
    phases = Phases.after(100, ("first", first), ("then", then))
    state = fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=phases))
    with pytest.raises(
        fzero.SpecError, match=rf"phase 'then' cannot work on the state that phase 'first' made.*{said}"
    ):
        fzero.step(state, batch(0))


def test_an_update_may_take_the_state_of_another_init() -> None:
    """Only what cannot be lowered is compared: an optimizer for later steps alone may have any `init`."""
    adam = optim.adam(0.1)
    late = optim.GradientTransformation(lambda params: (), adam.update)
    state = fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=Phases.after(1, ("a", adam), ("b", late))))
    one = trained(state, range(2))
    other = trained(fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=adam)), range(2))
    assert torch.equal(one.params["w"].full(), other.params["w"].full())


def test_an_error_of_a_phase_names_it() -> None:
    def wrong(state: Any, batch: Any) -> Any:
        raise ValueError("wrong")

    one = fzero.Spec(step=Phases.after(100, ("right", lambda state, batch: (state, {})), ("wrong", wrong)))
    with pytest.raises(ValueError, match="wrong") as caught:
        fzero.lower(one, {"w": torch.ones(3)}, torch.ones(3), world_size=1, phase="wrong")
    assert "in phase 'wrong'" in caught.value.__notes__


def test_phases_can_be_copied_and_pickled() -> None:
    """A launcher sends a Spec to its workers: what it is made of was a view that neither can take."""
    phases = Phases(every_third, {"inner": 1, "outer": 2})
    for again in (copy.deepcopy(phases), pickle.loads(pickle.dumps(phases))):
        assert (again.at(2), again["outer"], again) == ("outer", 2, phases)


def test_what_is_no_phase_is_refused() -> None:
    with pytest.raises(fzero.SpecError, match="step 0 is of phase 'c': needed one of 'a', 'b'"):
        Phases(lambda step: "c", {"a": 1, "b": 2})
    late = Phases(lambda step: "aabb"[step:][:1] or "z", {"a": optim.sgd(0.1), "b": optim.sgd(0.2)})
    state = trained(fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=late)), range(4))
    with pytest.raises(fzero.SpecError, match="step 4 is of phase 'z'"):
        fzero.step(state, batch(4))
    with pytest.raises(fzero.SpecError, match="needed a function from a step number"):
        Phases("a", {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(fzero.SpecError, match=r"step 0 is of phase \['a'\]: needed one of 'a'"):
        Phases(lambda step: ["a"], {"a": 1})  # type: ignore[arg-type,return-value]
    with pytest.raises(fzero.SpecError, match=r"Phases.after\(steps='2'\): needed an int"):
        Phases.after("2", ("a", 1), ("b", 2))  # type: ignore[arg-type]
    with pytest.raises(fzero.SpecError, match=r"Phases.after: both phases are named 'a': needed two names"):
        Phases.after(2, ("a", 1), ("a", 2))
    with pytest.raises(fzero.SpecError, match="needed a dict with a value for each name"):
        Phases(lambda step: "a", [1])  # type: ignore[arg-type]
    with pytest.raises(fzero.SpecError, match=r"Spec\(optimizer=3\): needed one of fzero.optim"):
        fzero.Spec(loss=loss, optimizer=Phases(lambda step: "a", {"a": optim.sgd(0.1), "b": 3}))  # type: ignore[dict-item]
    phases = spec().optimizer
    with pytest.raises(fzero.SpecError, match=r"chain: an optimizer with phases \(inner, outer\) cannot be wrapped"):
        optim.chain(phases)  # type: ignore[arg-type]
    with pytest.raises(fzero.SpecError, match=r"masked: an optimizer with phases \(inner, outer\) cannot be wrapped"):
        optim.masked(phases, "**")  # type: ignore[arg-type]
