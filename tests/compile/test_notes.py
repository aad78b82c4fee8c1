"""notes: what is said of programs beside the decisions. Notes on memory are tested in laws/test_offload."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch

import fzero


def test_a_remat_that_changes_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    params = fzero.tree.map(lambda x: torch.ones(x.shape), cases.layers(8))
    fzero.step(fzero.init(params, cases.spec(remat="gathers")), torch.ones(4, 8))
    assert "remat='gathers' changes nothing: no layer gathers activations" in caplog.text
    assert "idle" not in cases.lowered(remat="full").choices
    assert "idle" not in cases.lowered().choices


def test_the_phase_is_named_in_which_it_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The complaint: "changes nothing", of a run whose first steps train the head alone."""

    def net(layers: Any, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + torch.tanh(torch.tanh(x @ layer["w"]) * 2)
        return (x @ out).square().mean()

    def head(state: Any, x: torch.Tensor) -> Any:
        value, grad = fzero.value_and_grad(lambda out, x, layers: net(layers, out, x))(state["out"], x, state["layers"])
        return {**state, "out": state["out"] - 0.1 * grad}, {"loss": value}

    def both(state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p, x: net(p["layers"], p["out"], x))(state, x)
        return fzero.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    phases = fzero.Phases.after(1, ("head", head), ("both", both))
    state = {"layers": [{"w": torch.ones(8, 8) / 8} for _ in range(3)], "out": torch.ones(8)}
    with caplog.at_level("WARNING", logger="fzero"):
        fzero.step(fzero.init(state, fzero.Spec(step=phases, remat="full")), torch.ones(4, 8))
    told = [record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()]
    assert [text.partition(" changes")[0] for text in told] == ["fzero: phase 'head': remat='full'"]


def test_one_of_layers_that_keep_nothing_is_told() -> None:
    """The backward of a product reads what it was given, which is the input of the layer."""
    spec = fzero.Spec(
        loss=lambda p, x: (x @ p["layers"][0]["w"]).sum(), optimizer=fzero.optim.sgd(0.1), remat={"layers/**": "full"}
    )
    params = {"layers": [{"w": torch.empty(8, 8, device="meta")}]}
    lowered = fzero.lower(spec, params, torch.empty(4, 8, device="meta"))
    assert lowered.choices["idle"].startswith("remat='full' changes nothing")


def test_an_offload_that_takes_nothing_off_the_device_is_told() -> None:
    given = {"loss": lambda p, x: (x @ p["w"]).sum(), "offload": "optimizer"}
    params = {"w": torch.empty(8, 8, device="meta")}

    def notes(optimizer: fzero.optim.GradientTransformation) -> dict[str, str]:
        spec = fzero.Spec(optimizer=optimizer, **given)
        return dict(fzero.lower(spec, params, torch.empty(4, 8, device="meta")).choices)

    assert notes(fzero.optim.sgd(0.1))["idle"].startswith("offload= changes nothing: the optimizer keeps only scalars")
    assert "idle" not in notes(fzero.optim.sgd(0.1, momentum=0.9))
