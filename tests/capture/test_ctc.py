"""torch's CTC loss in a step: its bits, for lengths from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

Y, N, M = (torch.tensor(x) for x in ([[1, 2, 2], [4, 3, 0], [5, 5, 5], [1, 0, 0]], [9, 8, 7, 9], [3, 2, 3, 1]))
JOINED = torch.cat([row[:m] for row, m in zip(Y, M, strict=True)])
Loss = Callable[[Tensor, Any], Tensor]

CASES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "lengths in the batch": (lambda lp, b: F.ctc_loss(lp, b["y"], b["n"], b["m"]), {"y": Y, "n": N, "m": M}),
    "Python lengths": (lambda lp, b: F.ctc_loss(lp, b["y"], (9, 8, 7, 9), (3, 2, 3, 1)), {"y": Y}),
    "static tuples": (
        lambda lp, b: F.ctc_loss(lp, b["y"], b["n"], b["m"]),
        {"y": Y, "n": fzero.static((9, 8, 7, 9)), "m": fzero.static((3, 2, 3, 1))},
    ),
    "static tensors": (
        lambda lp, b: nn.CTCLoss()(lp, b["y"], b["n"], b["m"]),
        {"y": JOINED, "n": fzero.static(N), "m": fzero.static(M)},
    ),
    "closed over": (lambda lp, b: F.ctc_loss(lp, b["y"], N, M, reduction="sum"), {"y": JOINED}),
    "targets in one dim": (lambda lp, b: F.ctc_loss(lp, b["y"], b["n"], b["m"]), {"y": JOINED, "n": N, "m": M}),
    "known targets": (
        lambda lp, b: F.ctc_loss(lp, b["y"].masked_select(b["y"] > 0), b["n"], (b["y"] > 0).sum(-1)),
        {"y": fzero.static(Y), "n": N},
    ),
    "another blank, none reduced": (
        lambda lp, b: (F.ctc_loss(lp, b["y"], b["n"], b["m"], 0, "none") * torch.arange(4.0)).sum(),
        {"y": Y, "n": N, "m": M},
    ),
    "impossible rows": (
        lambda lp, b: F.ctc_loss(lp, b["y"], b["n"], b["m"], zero_infinity=True),
        {"y": Y, "n": torch.tensor([9, 1, 2, 9]), "m": M},
    ),
    "torch.ctc_loss": (lambda lp, b: torch.ctc_loss(lp, b["y"], [9, 8, 7, 9], [3, 2, 3, 1], 0, 1), {"y": Y}),
    "one sequence": (lambda lp, b: F.ctc_loss(lp[:, 0], b["y"][0], b["n"][0], b["m"][0]), {"y": Y, "n": N, "m": M}),
    "float64": (lambda lp, b: F.ctc_loss(lp.double(), b["y"], b["n"], b["m"]).float(), {"y": Y, "n": N, "m": M}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(4)
def test_forward_and_backward_are_torchs(name: str) -> None:
    """The complaint: CTC was refused, and the remedy was a recursion of thirty lines and T segments."""
    loss, leaves = CASES[name]
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 9, 5, generator=g), torch.randn(5, 6, generator=g)

    def of(p: Any, b: Any) -> Tensor:
        return loss((b["x"] @ p["w"]).log_softmax(-1).transpose(0, 1), b)

    state = fzero.init({"w": w}, fzero.Spec(loss=of, optimizer=fzero.optim.sgd(0.1), zero=3))
    state = fzero.step(state, {"x": x, **leaves})
    own = w.clone().requires_grad_()
    plain = {k: v.value if isinstance(v, type(fzero.static(0))) else v for k, v in leaves.items()}
    value = of({"w": own}, {"x": x, **plain})
    value.backward()
    assert torch.allclose(state.metrics["loss"], value.detach(), atol=1e-6)
    assert own.grad is not None
    assert own.grad.abs().max() > 0.01
    assert torch.allclose(fzero.unshard(state.params)["w"], w - 0.1 * own.grad, atol=1e-6)


def test_microbatches_cut_lengths_and_one_program_serves_all_lengths() -> None:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(4, 9, 5, generator=g), torch.randn(5, 6, generator=g)

    def loss(p: Any, b: Any) -> Tensor:
        lp = (b["x"] @ p["w"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(lp, b["y"], b["n"], b["m"], reduction="none").mean()

    state = fzero.init({"w": w}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0), microbatches=2))
    for n in (N, N - 1, torch.full((4,), 9)):
        batch = {"x": x, "y": Y, "n": n, "m": M}
        state = fzero.step(state, batch)
        assert torch.allclose(state.metrics["loss"], loss({"w": w}, batch), atol=1e-6)
    assert len(state.runtime.programs) == 1


def test_labels_of_the_batch_that_are_selected_are_refused_with_padded_targets() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        lp = (b["x"] @ p["w"]).log_softmax(-1).transpose(0, 1)
        kept = b["y"] > 0
        return F.ctc_loss(lp, b["y"].masked_select(kept), N, kept.sum(-1))

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.CaptureError, match=r"aten.masked_select"):
        fzero.lower(spec, {"w": torch.ones(5, 6)}, {"x": torch.ones(4, 9, 5), "y": Y}, world_size=1)
