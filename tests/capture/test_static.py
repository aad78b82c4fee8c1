"""`fzero.static`: a leaf of the batch whose value the loss may read, and that is part of the program's key."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from capturing import batch, mean_square, params, said
from helpers import gloo
from torch import Tensor

import fzero
from fzero import TreeError, static
from fzero.session import session

Loss = Callable[[Any, Any], Tensor]
MASKS = torch.tensor([True, False, True]), torch.tensor([False, False, True])


def by_tensor(p: Any, b: Any) -> Tensor:
    kept = b["v"]
    return (b["x"][:, kept] @ p["w"][kept]).square().sum() * (2.0 if kept[0] else 1.0) + (b["x"] * kept).sum()


def by_lengths(p: Any, b: Any) -> Tensor:
    rows = [b["x"][i, :n] @ p["w"][:n] for i, n in enumerate(b["v"])]
    return torch.stack(rows).square().sum()


def by_turns(p: Any, b: Any) -> Tensor:
    y = b["x"] @ p["w"]
    for _ in range(b["v"]):
        y = y.sin()
    return y.sum()


VALUES: dict[str, tuple[Loss, Any, Any]] = {
    "int": (by_turns, 1, 3),
    "float": (lambda p, b: (b["x"] @ p["w"]).sum() * (b["v"] if b["v"] > 0.5 else 2.0), 0.25, 0.75),
    "bool": (lambda p, b: (b["x"] @ p["w"]).sum() * (3 if b["v"] else 1), True, False),
    "str": (lambda p, b: getattr(b["x"] @ p["w"], b["v"])().sum(), "sin", "cos"),
    "tuple": (by_lengths, (3, 1, 2, 3), (1, 1, 2, 3)),
    "lengths": (by_lengths, torch.tensor([3, 1, 2, 3]), torch.tensor([1, 1, 2, 3])),
    "mask": (by_tensor, *MASKS),
    "array": (by_tensor, MASKS[0].numpy(), MASKS[1].numpy()),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.sampled(4)
def test_the_loss_reads_the_value_and_another_is_another_program(name: str) -> None:
    loss, *values = VALUES[name]
    state = fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)))
    for value in (*values, *values):
        raw = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        wanted = loss(params(), {"x": batch(), "v": raw})
        state = fzero.step(state, {"x": batch(), "v": static(value)})
        assert torch.allclose(state.metrics["loss"], wanted, atol=1e-6)
        found = fzero.evaluate(state, {"x": batch(), "v": static(value)}, loss)
        outside, _ = fzero.value_and_grad(loss)(params(), {"x": batch(), "v": static(value)})
        assert torch.allclose(torch.stack([found, outside]), wanted, atol=1e-6)
    assert len(state.runtime.programs) == 2


def test_a_step_of_ones_own_reads_the_value_and_hands_it_on() -> None:
    def step(state: Any, b: Any) -> Any:
        assert b["turns"] in (1, 2)
        loss, grads = fzero.value_and_grad(by_tensor)(state, {"x": b["x"], "v": b["v"]})
        return fzero.tree.map(lambda p, g: p - b["turns"] * 0.0 * g, state, grads), {"loss": loss * b["turns"]}

    state = fzero.init(params(), fzero.Spec(step=step, microbatches=2))
    for turns in (1, 2):
        state = fzero.step(state, {"x": batch(), "v": static(MASKS[0]), "turns": static(turns)})
        parts = [by_tensor(params(), {"x": x, "v": MASKS[0]}) for x in batch().split(2)]
        assert torch.allclose(state.metrics["loss"], turns * torch.stack(parts).mean(), atol=1e-6)


def test_a_copy_is_kept_and_the_program_names_the_leaf() -> None:
    mask = MASKS[0].clone()
    kept = static(mask)
    state = fzero.init(params(), fzero.Spec(loss=by_tensor, optimizer=fzero.optim.sgd(0.0)))
    first = fzero.step(state, {"x": batch(), "v": kept})
    loss = float(first.metrics["loss"])
    mask.fill_(False)
    state = fzero.step(first, {"x": batch(), "v": kept})
    assert float(state.metrics["loss"]) == loss
    assert "batch['v']" in next(iter(state.runtime.programs.values())).graph.constants


def test_programs_of_static_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of one shape give programs of one text, and differ by a constant."""
    monkeypatch.setattr(session, "MAX_PROGRAMS", 3)
    state = fzero.init(params(), fzero.Spec(loss=by_tensor, optimizer=fzero.optim.sgd(0.0)))
    for number in (1, 2, 3, 4, 5, 1):
        mask = torch.tensor([bool(number >> bit & 1) for bit in range(3)])
        state = fzero.step(state, {"x": batch(), "v": static(mask)})
        assert torch.allclose(state.metrics["loss"], by_tensor(params(), {"x": batch(), "v": mask}), atol=1e-6)
    assert len(state.runtime.programs) == 3


def test_equality_is_of_type_form_and_values() -> None:
    assert static(1) != static(True)
    assert static(0.0) != static(-0.0)
    assert static(float("nan")) == static(float("nan"))
    assert static([1, 2]) == static((1, 2)) == static((np.int64(1), 2))
    assert static([1, 2]) != static(torch.tensor([1, 2])) != static(torch.tensor([1, 2], dtype=torch.int32))
    long = torch.arange(100)
    assert static(long) == static(long.clone()) != static(long.roll(1))
    assert hash(static(long)) == hash(pickle.loads(pickle.dumps(static(long)))), "as a worker of a loader hands it on"
    assert static(static(3)) == static(3)


def test_what_cannot_be_static_is_refused() -> None:
    said(TreeError, lambda: static({"a": 1}), "fzero.static of a dict", "Mark the leaves of a dict one by one")
    said(TreeError, lambda: static((torch.ones(1),)), "fzero.static of a Tensor", "or a tensor")
    said(TreeError, lambda: static(torch.zeros(1 << 17)), "f32[131072]", "at most 65,536 elements")
    said(TreeError, lambda: static(torch.zeros(2, device="meta")), "on meta", "a dense one with values")


def two_ranks(differ: bool) -> list[str]:
    spec = fzero.Spec(loss=by_tensor, optimizer=fzero.optim.sgd(0.0))
    state = fzero.init(params(), spec)
    mask = MASKS[torch.distributed.get_rank() if differ else 0]
    try:
        state = fzero.step(state, {"x": batch(), "v": static(mask)})
    except fzero.DisagreementError as error:
        return [str(error)]
    return [f"{float(state.metrics['loss']):.4f}"]


def numbers_of_two_ranks() -> list[str]:
    """A number that changes on both ranks may differ between them, as a tensor."""
    spec = fzero.Spec(loss=lambda p, b: mean_square(p, b["x"]) * b["s"], optimizer=fzero.optim.sgd(0.0))
    state, rank = fzero.init(params(), spec), torch.distributed.get_rank()
    losses = []
    for number in ((1.0, 1.0), (2.0, 4.0), (3.0, 5.0)):
        state = fzero.step(state, {"x": batch(), "s": number[rank]})
        losses.append(f"{float(state.metrics['loss'] / mean_square(params(), batch())):.3f}")
    return losses


def test_all_ranks_must_agree_on_static_values() -> None:
    for outcome in gloo(2, two_ranks, True):
        assert "batch['v'] is static(bool[3] [True, False, True]) on rank 0" in outcome.value[0]
        assert "static(bool[3] [False, False, True]) on rank 1" in outcome.value[0]
    wanted = by_tensor(params(), {"x": batch(), "v": MASKS[0]})
    assert [outcome.value for outcome in gloo(2, two_ranks, False)] == [[f"{float(wanted):.4f}"]] * 2


def test_numbers_that_change_may_differ_between_ranks() -> None:
    assert [outcome.value for outcome in gloo(2, numbers_of_two_ranks)] == [["1.000", "3.000", "4.000"]] * 2
