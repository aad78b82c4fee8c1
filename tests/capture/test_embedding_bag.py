"""embedding_bag: sums of embeddings in bf16, whose kernel leaves out what torch's shape rule promises."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero

TABLE = torch.linspace(-1, 1, 60).view(10, 6)
BATCH = {"ids": torch.tensor([[1, 2, 2], [7, 0, 9], [3, 3, 3], [4, 1, 8]]), "w": torch.linspace(0.5, 1, 12).view(4, 3)}
WAYS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"}, "padded": {"mode": "sum", "padding_idx": 2}, "mean": {"mode": "mean"},
    "max": {"mode": "max"}, "scaled": {"mode": "sum", "scale_grad_by_freq": True},
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_bags_in_bf16_have_the_gradient_of_eager(way: str, weighted: bool) -> None:
    """The backward of a sum was handed memory that nothing had written to: the process ended, or the bits were any."""
    if weighted and way not in ("sum", "padded"):
        pytest.skip("torch weighs sums only")

    def loss(p: Any, b: Any) -> torch.Tensor:
        weights = p["scale"] * b["w"] if weighted else None
        return F.embedding_bag(b["ids"], p["t"], per_sample_weights=weights, **WAYS[way]).float().square().mean()

    params = {"t": TABLE.bfloat16(), "scale": torch.ones(4, 3, dtype=torch.bfloat16)}
    batch = {**BATCH, "w": BATCH["w"].bfloat16()}
    eager = {name: x.clone().requires_grad_() for name, x in params.items()}
    loss(eager, batch).backward()
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1.0), allow_unused=not weighted)
    state = fzero.init(params, spec)
    for _ in range(2):  # memory that a step has used holds other numbers than new memory
        before = {name: x.full() for name, x in state.params.items()}
        state = fzero.step(state, batch)
        if state.step == 1:
            for name, x in eager.items():
                wanted = before[name] - (0 if x.grad is None else x.grad)
                assert torch.equal(state.params[name].full(), wanted), name
