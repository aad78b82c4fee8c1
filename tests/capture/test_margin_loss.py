"""margin_loss: of one row, torch's shape rule and its kernel differ."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_margin_of_several_labels_is_torchs(reduction: str, shape: tuple[int, ...]) -> None:
    """One row with no reduction ended in a RuntimeError that called itself a bug of ours."""

    def loss(p: Any, b: Any) -> torch.Tensor:
        found = F.multilabel_margin_loss(p["x"] * b["w"], b["y"], reduction=reduction)
        assert found.shape == ((shape[:-1]) if reduction == "none" else ())
        return found.square().sum()

    x = torch.linspace(-1, 1, 12)[: torch.Size(shape).numel()].view(shape)
    batch = {"w": torch.tensor([1.5]), "y": torch.tensor([3, 0, -1, 1]).expand(shape).contiguous()}
    leaf = x.clone().requires_grad_()
    expected = loss({"x": leaf}, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1.0))
    state = fzero.step(fzero.init({"x": x}, spec), batch)
    assert torch.equal(state.metrics["loss"], expected.detach())
    assert torch.equal(state.params["x"].full(), x - leaf.grad)  # type: ignore[operator]
