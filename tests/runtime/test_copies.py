"""Copies of parameters between steps: whatever else writes a master, the next step reads the cast of what it holds.

The oracle is plain torch: bf16 casts of fp32 leaves in each step, and torch's own fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, run_reference, values

import fzero
from fzero.session.session import session_of

ADAMW = fzero.optim.adamw(1e-2, weight_decay=0.1)
SIZE = 96


def loss(params: Any, x: Any) -> Any:
    return torch.tanh(torch.tanh(x @ params["a"]) @ params["b"]).float().square().mean()


def data() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(SIZE, SIZE, generator=generator) / 9 for name in "ab"}
    return params, torch.randn(4, SIZE, generator=generator)


def spec(**given: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": ADAMW, "precision": "bf16", "device": "cpu", **given})


class Plain:
    """The same training in plain torch."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        self.params = {name: value.clone().requires_grad_() for name, value in params.items()}
        self.adamw = torch.optim.AdamW(self.params.values(), lr=1e-2, weight_decay=0.1, fused=True)

    def step(self, x: torch.Tensor) -> float:
        low = {name: value.detach().bfloat16().requires_grad_() for name, value in self.params.items()}
        value = loss(low, x.bfloat16())
        value.backward()
        for name, leaf in self.params.items():
            grad = low[name].grad
            assert grad is not None
            leaf.grad = grad.float()
        self.adamw.step()
        return float(value.detach())


def same(state: Any, plain: Plain) -> None:
    for name, value in fzero.unshard(state.params).items():
        assert torch.equal(value, plain.params[name]), name


def spoil(state: Any) -> None:
    """Makes the copies those of other parameters, behind the back of who keeps them."""
    tensors = session_of(state).copies.tensors
    assert tensors
    for tensor in tensors.values():
        tensor.zero_()


def test_a_step_reads_the_copy_that_the_step_before_has_written() -> None:
    params, x = data()
    state, plain = fzero.init(params, spec()), Plain(params)
    for _ in range(3):
        state = fzero.step(state, x)
        assert float(state.metrics["loss"]) == plain.step(x)
    same(state, plain)
    spoil(state)
    assert float(fzero.step(state, x).metrics["loss"]) == 0, "and casts nothing itself"


def test_what_a_user_writes_into_a_leaf_is_seen() -> None:
    params, x = data()
    state, plain = fzero.init(params, spec()), Plain(params)
    kept = state.params["a"].local  # from before the step
    state = fzero.step(state, x)
    plain.step(x)
    with torch.no_grad():
        kept.mul_(2)
        plain.params["a"].mul_(2)
    for _ in range(2):
        state = fzero.step(state, x)
        assert float(state.metrics["loss"]) == plain.step(x)
    same(state, plain)


@pytest.mark.parametrize("way", ["data", "dlpack", "numpy"])
def test_a_write_that_torch_does_not_count_is_seen(way: str) -> None:
    """As those of a collective are: who asks for the memory may write it."""
    params, x = data()
    state, plain = fzero.step(fzero.init(params, spec()), x), Plain(params)
    plain.step(x)
    local = state.params["a"].local
    before = local._version
    if way == "numpy":
        local.detach().numpy()[...] *= 2
    else:
        (local.data if way == "data" else torch.from_dlpack(local.detach())).mul_(2)
    assert local._version == before
    with torch.no_grad():
        plain.params["a"].mul_(2)
    for _ in range(2):
        state = fzero.step(state, x)
        assert float(state.metrics["loss"]) == plain.step(x)
    same(state, plain)


def test_a_phase_that_keeps_no_copy_leaves_it_stale() -> None:
    """SGD's step writes the masters alone."""
    params, x = data()
    outer = fzero.Phases(lambda step: "sgd" if step % 2 else "adamw", {"adamw": ADAMW, "sgd": fzero.optim.sgd(0.1)})

    def step_of(tx: Any) -> Callable[[Any, Any], Any]:
        def step(state: Any, batch: Any) -> Any:
            low = lambda p, b: loss(fzero.tree.map(lambda w: w.bfloat16(), p), b.bfloat16())  # noqa: E731
            value, grads = fzero.value_and_grad(low)(state["params"], batch)
            updates, opt = tx.update(grads, state[name(tx)], state["params"])
            return {**state, "params": fzero.optim.apply_updates(state["params"], updates), name(tx): opt}, {
                "loss": value
            }

        return step

    def name(tx: Any) -> str:
        return "adamw" if tx is ADAMW else "sgd"

    phases = fzero.Phases(outer.of, {key: step_of(tx) for key, tx in outer.each.items()})
    first = {"params": params, **{key: tx.init(params) for key, tx in outer.each.items()}}
    state, plain = fzero.init(first, fzero.Spec(step=phases, device="cpu")), Plain(params)
    for step in range(4):
        state = fzero.step(state, x)
        if step % 2 == 0:
            assert float(state.metrics["loss"]) == plain.step(x)
            continue
        low = {key: value.detach().bfloat16().requires_grad_() for key, value in plain.params.items()}
        loss(low, x.bfloat16()).backward()
        with torch.no_grad():
            for key, value in plain.params.items():
                grad = low[key].grad
                assert grad is not None
                value -= 0.1 * grad.float()
    for key, value in fzero.unshard(state.tree["params"]).items():
        assert torch.equal(value, plain.params[key]), key


def test_no_checkpoint_holds_one_and_a_run_goes_on(tmp_path: Path) -> None:
    params, x = data()
    state, plain = fzero.init(params, spec()), Plain(params)
    for _ in range(2):
        state = fzero.step(state, x)
        plain.step(x)
    fzero.save(state, tmp_path / "at2")
    held = sum(path.stat().st_size for path in (tmp_path / "at2").rglob("*") if path.is_file())
    assert held < 3 * 2 * SIZE * SIZE * 4 + 20_000, "masters and moments, and nothing of two bytes"
    state = fzero.load(tmp_path / "at2", spec())
    for _ in range(2):
        state = fzero.step(state, x)
        assert float(state.metrics["loss"]) == plain.step(x)
    same(state, plain)


def _trained(transfers: str, zero: int) -> dict[str, torch.Tensor]:
    params, _ = data()
    state = fzero.init(params, spec(zero=zero, transfers=transfers))
    rank = session_of(state).rank
    for step in range(3):
        state = fzero.step(state, batch_of(rank, step))
    assert session_of(state).copies.tensors
    return fzero.unshard(state.params)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(9 * step + rank))


@pytest.mark.parametrize(("transfers", "zero"), [("auto", 3), ("p2p", 1)])
def test_ranks_gather_from_copies(transfers: str, zero: int) -> None:
    """In processes, over shared memory and over messages: the bits of the captured step in plain torch."""
    exact, _ = run_reference(spec(zero=zero), data()[0], batch_of, world=2, steps=3)
    for found in values(gloo(2, _trained, transfers, zero)):
        for name, value in found.items():
            assert torch.equal(value, exact[f"params/{name}"]), name


def test_an_evaluation_leaves_copies_as_they_are() -> None:
    """It reads the masters, and a step afterwards casts nothing."""
    params, x = data()
    state = fzero.step(fzero.init(params, spec()), x)
    before = fzero.evaluate(state, x, loss)
    spoil(state)
    assert torch.equal(fzero.evaluate(state, x, loss), before)
    assert float(before) > 0
    assert float(fzero.step(state, x).metrics["loss"]) == 0
