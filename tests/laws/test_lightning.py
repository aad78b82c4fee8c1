"""docs/coming-from/lightning.md: a LightningModule, unchanged, is trained as Lightning's own Trainer trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero
from fzero.interop import from_module

STEPS, ROWS = 6, 8


@pytest.mark.acceptance
def test_a_training_step_is_the_loss() -> None:
    """Its `self.log` and all; the same batches, AdamW and clipping give the same parameters."""
    L = pytest.importorskip("lightning", reason="lightning is not installed (pip install lightning)")

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.mse_loss(self(batch["x"]), batch["y"])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)

    class Loss(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net.training_step(batch, 0)

    torch.manual_seed(0)
    data = [{"x": torch.randn(8), "y": torch.randn(1)} for _ in range(STEPS * ROWS)]
    net = Net()
    params, buffers, apply = from_module(Loss(net))
    optimizer = fzero.optim.adamw(1e-2, weight_decay=0.1)
    spec = fzero.Spec(loss=lambda params, batch: apply(params, buffers, batch), optimizer=optimizer, clip_norm=0.5)
    state = fzero.init(params, spec)
    for batch, _ in zip(fzero.data.batches(data, ROWS, order="sequential"), range(STEPS), strict=False):
        state = fzero.step(state, batch)

    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, gradient_clip_val=0.5, logger=False, barebones=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=ROWS))
    assert trainer.global_step == STEPS
    for name, value in net.named_parameters():
        torch.testing.assert_close(state.params[f"net.{name}"].full(), value.detach(), rtol=1e-5, atol=1e-6)
