"""notes: what is said of programs beside the decisions. Notes on memory are tested in laws/test_offload."""

from __future__ import annotations

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
