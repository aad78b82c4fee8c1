"""Gradients in signs whose loss is fed back: a loop by hand in plain PyTorch, one set of bits at every stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
import torch
from coded_cases import GRIDS, params_of, rows, start
from helpers import Run, differing, run
from helpers import start as first
from torch import Tensor

import fzero
from fzero import P, Precision, optim, tree
from fzero.errors import CaptureError, SpecError
from fzero.ir.program import wire_bytes
from fzero.kernels.codecs import CODECS, decode, encode
from fzero.runtime.reference import reference

SIGN = Precision(reduce="sign")


def trained(mesh: dict[str, int], steps: int = 3, **given: Any) -> Run:
    world = 1
    for n in mesh.values():
        world *= n
    made = {"loss": cases.layers_loss, "optimizer": optim.sgd(0.1, momentum=0.5), "precision": SIGN, "transfers": "p2p"}
    return run(fzero.Spec(mesh=mesh, **{**made, **given}), start(), rows, world=world, steps=steps)


def by_hand(world: int, steps: int, microbatches: int = 1) -> dict[str, Tensor]:
    """SGD with momentum; matrices' gradients in signs, whose loss each rank adds to its next ones."""
    paths, leaves, treedef = tree.flatten(start())
    leaves, momenta = [x.clone() for x in leaves], [torch.zeros_like(x) for x in leaves]
    errors = [[torch.zeros_like(x) for x in leaves] for _ in range(world)]
    for step in range(steps):
        sent: list[list[Tensor]] = []
        for rank in range(world):
            grads = [torch.zeros_like(x) for x in leaves]
            for part in rows(rank, step).chunk(microbatches):
                used = [x.clone().requires_grad_() for x in leaves]
                found = torch.autograd.grad(cases.layers_loss(tree.unflatten(treedef, used), part), used)
                grads = [g + f for g, f in zip(grads, found, strict=True)]
            own = []
            for i, g in enumerate(grads):
                if g.ndim < 2:
                    own.append(g)
                    continue
                value = g + errors[rank][i] * microbatches
                flat = value.reshape(-1)
                own.append(decode(encode(flat, CODECS["sign"]), flat.numel(), CODECS["sign"]).view(g.shape))
                errors[rank][i] = (value - own[-1]) / microbatches
            sent.append(own)
        for i in range(len(leaves)):
            total = sent[0][i]
            for own in sent[1:]:
                total = total + own[i]
            momenta[i] = total / (world * microbatches) + 0.5 * momenta[i]
            leaves[i] = leaves[i] - 0.1 * momenta[i]
    return {f"params/{path}": x for path, x in zip(paths, leaves, strict=True)}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.sampled(2)
def test_a_run_is_that_of_a_loop_by_hand(world: int, microbatches: int) -> None:
    one = trained({"dp": world}, zero=2, microbatches=microbatches)
    wanted = by_hand(world, 3, microbatches)
    assert params_of(one).keys() == wanted.keys()
    for path, leaf in wanted.items():
        torch.testing.assert_close(params_of(one)[path], leaf, rtol=0, atol=1e-7)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("grid", ["1", "2", "3"])
@pytest.mark.sampled(1)
def test_stages_have_one_set_of_bits(grid: str, microbatches: int) -> None:
    first = trained(GRIDS[grid], zero=0, microbatches=microbatches)
    for zero in (1, 2, 3):
        other = trained(GRIDS[grid], zero=zero, microbatches=microbatches)
        assert differing(other.final, first.final) == [], zero


def test_the_reference_semantics_are_the_same() -> None:
    one = trained({"dp": 2}, zero=3)
    spec = fzero.Spec(loss=cases.layers_loss, optimizer=optim.sgd(0.1, momentum=0.5), precision=SIGN)
    paths, leaves = first(spec, start())
    states = [leaves, [leaf.clone() for leaf in leaves]]
    for step in range(3):
        states, _ = reference(one.lowered.graph, states, [[rows(rank, step)] for rank in range(2)])
    for path, leaf in params_of(one).items():
        torch.testing.assert_close(states[1][paths.index(path)], leaf, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_bytes": 1 << 12}, {"prefetch": 2}, {"transfers": "shared"}, {"remat": "full"}, {"microbatches": 1},
        {"offload": "optimizer+params"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled(1)
def test_what_changes_no_bit_changes_none(given: dict[str, Any]) -> None:
    policy = Precision(gather="int8", reduce="sign", compute="bf16")
    plain, other = (trained({"dp": 2}, zero=3, precision=policy, clip_norm=0.1, **more) for more in ({}, given))
    assert differing(other.final, plain.final) == []


def test_a_warm_up_has_whole_gradients_and_then_signs_are_fed_back() -> None:
    """The first phase is AdamW's bits; the second leaves errors."""
    frozen = {"optimizer": optim.freeze_nu(1e-2, after=2), "zero": 2}
    plain = trained({"dp": 2}, 2, **frozen, precision="fp32")
    one = trained({"dp": 2}, 2, **frozen)
    assert all(torch.equal(leaf, params_of(plain)[path]) for path, leaf in params_of(one).items())
    assert all(not leaf.any() for path, leaf in one.final.items() if path.startswith("error/"))
    later = trained({"dp": 2}, 3, **frozen)
    assert all(leaf.any() for path, leaf in later.final.items() if path.startswith("error/"))


@pytest.mark.parametrize(("zero", "wanted"), [(0, 4 + 0.1875), (2, 4 + 0.1875), (3, 4 + 0.1875)])
def test_signs_take_three_sixteenths_of_a_byte(zero: int, wanted: float) -> None:
    """Of a matrix of which nothing is padding, times (N - 1) / N: its values are gathered beside them, for one pass
    alone needs them; at zero=0 the mean is."""
    params, batch = {"w": torch.zeros(64, 256)}, torch.ones(4, 64)
    spec = fzero.Spec(
        loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=optim.sgd(0.1), precision=SIGN, zero=zero
    )
    program = fzero.lower(spec, params, batch, world_size=4).program
    sent = sum(
        wire_bytes(program, op) for op in program.ops if op.axis == "dp" and program.buffers[op.reads[0].name].bucket
    )
    assert sent / (64 * 256) == pytest.approx(wanted * 3 / 4, rel=0.01)


def test_a_lost_element_is_skipped_with_its_errors() -> None:
    def batch(rank: int, step: int) -> Tensor:
        return rows(rank, step) * (float("nan") if (rank, step) == (1, 1) else 1.0)

    spec = fzero.Spec(
        loss=cases.layers_loss, optimizer=optim.sgd(0.1), precision=SIGN, nonfinite="skip", transfers="p2p", zero=2
    )
    after = [run(spec, start(), batch, world=2, steps=steps) for steps in (1, 2)]
    assert differing(after[0].final, after[1].final) == []


def test_a_loss_that_is_a_mean_and_a_leaf_without_a_gradient() -> None:
    def loss(p: Any, x: Tensor) -> fzero.Mean:
        out = cases.layers_loss(p["used"], x)
        return fzero.Mean(out * len(x), torch.tensor(float(len(x))))

    params = {"used": start(), "unused": torch.ones(3, 3)}
    given = {"loss": loss, "optimizer": optim.sgd(0.1), "precision": SIGN, "allow_unused": True, "transfers": "p2p"}
    one, other = (run(fzero.Spec(**given, zero=zero), params, rows, world=2, steps=2) for zero in (0, 3))
    assert differing(one.final, other.final) == []
    assert torch.equal(one.final["params/unused"], params["unused"])


def own_step(state: Any, batch: Tensor) -> Any:
    loss, grads, error = fzero.value_and_grad(cases.layers_loss, error=state["error"])(state["params"], batch)
    return {"params": tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "error": error}, {"loss": loss}


def test_a_step_of_ones_own() -> None:
    state = {"params": start(), "error": fzero.first_error(start(), SIGN)}
    spec = fzero.Spec(step=own_step, precision=SIGN, transfers="p2p", zero=2)
    one, plain = run(spec, state, rows, world=2, steps=3), trained({"dp": 2}, zero=0, optimizer=optim.sgd(0.1))
    assert differing(params_of(one), params_of(plain)) == []


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": optim.adamw(1e-3)}, r"this optimizer squares them.*freeze_nu.*feedback='fed'.*reduce='int8'"),
        ({"reduce": "each"}, r"reduce='each'.*kept once for a step.*Leave reduce= out"),
        ({"mesh": {"pp": 2, "dp": 2}}, r"a rank of 'pp' has only its part.*Leave 'pp' out"),
        ({"mesh": {"dp": 2, "tp": 2}, "shard": {"**": P("tp")}}, r"a rank of 'tp' has only its part"),
        ({"mesh": {"dp_out": 2, "dp": 2}}, r"one data axis and then over the other.*Give one data axis"),
    ],
)
def test_a_spec_that_does_not_go_with_feedback(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fzero.Spec(**{"loss": cases.layers_loss, "optimizer": optim.sgd(0.1), "precision": SIGN, **given})


def test_a_loss_scale_is_refused() -> None:
    with pytest.raises(SpecError, match=r"reduce='sign', loss_scale.*units of a loss scale.*compute='bf16'"):
        Precision(compute="fp16", reduce="sign", loss_scale=fzero.LossScale())


@pytest.mark.parametrize(
    ("precision", "error", "message"),
    [
        (SIGN, None, r"it is a part of the state: keep fzero.first_error\(params, precision\)"),
        (SIGN, {}, r"error lacks 'first': fzero.first_error"),
        ("fp32", {"w": torch.zeros(1)}, r"feeds nothing back; reduce='sign' does"),
    ],
)
def test_a_step_whose_errors_are_not_its_gradients(precision: Any, error: Any, message: str) -> None:
    def step(params: Any, batch: Tensor) -> Any:
        found = fzero.value_and_grad(cases.layers_loss, error=error)(params, batch)
        return tree.map(lambda p, g: p - g, params, found[1]), {"loss": found[0]}

    with pytest.raises(CaptureError, match=message):
        fzero.lower(fzero.Spec(step=step, precision=precision), start(), rows(0), world_size=2)


def kept_old(state: Any, batch: Tensor) -> Any:
    loss, grads, _ = fzero.value_and_grad(cases.layers_loss, error=state["error"])(state["params"], batch)
    return {**state, "params": tree.map(lambda p, g: p - g, state["params"], grads)}, {"loss": loss}


def given_twice(state: Any, batch: Tensor) -> Any:
    values = [fzero.value_and_grad(cases.layers_loss, error=state["error"])(state["params"], batch) for _ in range(2)]
    (loss, grads, error), (_, more, _) = values
    params = tree.map(lambda p, g, h: p - g - h, state["params"], grads, more)
    return {"params": params, "error": error}, {"loss": loss}


def of_no_leaf(state: Any, batch: Tensor) -> Any:
    doubled = tree.map(lambda p: 2 * p, state["params"])
    loss, grads, error = fzero.value_and_grad(cases.layers_loss, error=state["error"])(doubled, batch)
    return {"params": tree.map(lambda p, g: p - g, state["params"], grads), "error": error}, {"loss": loss}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (kept_old, "does not keep the new error"), (given_twice, "is given twice|does not keep the new error"),
        (of_no_leaf, "of no leaf of the state"),
    ],
)  # fmt: skip
def test_a_step_that_would_lose_errors(step: Any, message: str) -> None:
    state = {"params": start(), "error": fzero.first_error(start(), SIGN)}
    with pytest.raises(SpecError, match=message):
        fzero.lower(fzero.Spec(step=step, precision=SIGN), state, rows(0), world_size=2)


def test_a_scale_is_refused_beside_errors() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        given = {"error": state["error"], "scale": torch.tensor(2.0)}
        loss, grads, error = fzero.value_and_grad(cases.layers_loss, **given)(state["params"], batch)
        return {"params": grads, "error": error}, {"loss": loss}

    state = {"params": start(), "error": fzero.first_error(start(), SIGN)}
    with pytest.raises(CaptureError, match="units of a loss scale"):
        fzero.lower(fzero.Spec(step=step, precision=SIGN), state, rows(0), world_size=2)


def test_an_empty_leaf_is_no_leaf_to_code() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"]).square().mean() + p["e"].sum()

    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), precision=Precision(reduce="sign", exact=("b",)))
    params = {"w": torch.ones(8, 8), "e": torch.ones(0, 5), "b": torch.ones(1)}
    fzero.lower(dataclasses.replace(spec, allow_unused=True), params, rows(0), world_size=2)


def test_an_error_that_the_step_computes_is_refused() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        error = tree.map(lambda e: 0.5 * e, state["error"])
        loss, grads, error = fzero.value_and_grad(cases.layers_loss, error=error)(state["params"], batch)
        return {"params": tree.map(lambda p, g: p - g, state["params"], grads), "error": error}, {"loss": loss}

    state = {"params": start(), "error": fzero.first_error(start(), SIGN)}
    with pytest.raises(SpecError, match=r"is computed in the step. Give it the state's own leaf"):
        fzero.lower(fzero.Spec(step=step, precision=SIGN), state, rows(0), world_size=2)
