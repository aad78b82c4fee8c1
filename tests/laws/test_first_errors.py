"""The errors that users meet first: the line, what was given, and what to write instead, in one short message."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim
from fzero.interop import from_module

W, X = {"w": torch.ones(3, 2)}, torch.ones(4, 3)
LAYER = torch.nn.Linear(3, 2)


def square(p: Any, b: Tensor) -> Tensor:
    return (b @ p["w"]).square().mean()


def stepped(loss: Callable[..., Any] = square, batch: Any = X, params: Any = W, **given: Any) -> fzero.State:
    spec = fzero.Spec(loss=loss, **{"optimizer": optim.sgd(0.1), **given})
    return fzero.step(fzero.init(params, spec), batch)


@dataclasses.dataclass
class Rows:
    x: Tensor


def too_early(count: Tensor) -> Tensor:
    return torch.tensor(0.1) if count < 10 else torch.tensor(0.01)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "params of numpy": (lambda: stepped(params={"w": np.ones((3, 2))}), fzero.TreeError, "write torch.from_numpy(x)"),
    "batch of numpy": (lambda: stepped(batch=np.ones((4, 3))), fzero.TreeError, "Give torch.from_numpy(x)"),
    "dataclass": (lambda: stepped(batch=Rows(X)), fzero.TreeError, "Give vars(x), a dict of its fields, or make the"),
    "lr": (lambda: stepped(lr=0.1), fzero.SpecError, "Spec has no field 'lr'. It is the optimizer's: Spec(optimizer="),
    "part": (lambda: stepped().params["w"].sum(), AttributeError, "state['params/w'] lies in parts over ranks and has"),
    "an optimizer's name": (lambda: fzero.adamw(0.1), AttributeError, "no attribute 'adamw'. It is fzero.optim.adamw"),
    "a misspelt name": (lambda: fzero.stepp, AttributeError, "no attribute 'stepp'. Did you mean 'step'?"),
    "no attribute": (lambda: stepped().params["w"].sums, AttributeError, "has no attribute 'sums'"),
    "metrics": (lambda: fzero.init(W, fzero.Spec(loss=square, optimizer=optim.sgd(0.1))).metrics["loss"], KeyError,
                "metrics are those of a step, and none was made: state = fzero.step(state, batch) first"),
    "branch": (lambda: stepped(optimizer=optim.sgd(too_early)), fzero.SpecError,
               "sgd: the schedule asks for the value of count, as in `if count < 10`"),
    "one leaf unused": (lambda: stepped(params={**W, "w2": torch.ones(2)}), fzero.CaptureError,
                        "'w2' gets no gradient from the loss square"),
    "two leaves unused": (lambda: stepped(params={**W, "w2": torch.ones(2), "w3": torch.ones(2)}), fzero.CaptureError,
                          "'w2', 'w3' get no gradient from the loss square"),
    "an optimizer of torch": (lambda: stepped(optimizer=torch.optim.AdamW(LAYER.parameters())), fzero.SpecError,
                              "amsgrad: False betas: (0.9, 0.999) ...): needed one of fzero.optim, as adamw(3e-4), or "
                              "your own GradientTransformation(init, update) of its formula (docs/optimizers.md)"),
    "no leaf used": (lambda: stepped(lambda p, b: LAYER(b).mean()), fzero.CaptureError,
                     "computes with its own: functional_call(module, params, (x,))"),
    "a loss of the parameters": (lambda: stepped(lambda p: p["w"].sum()), fzero.CaptureError,
                                 "has the arguments (p), and is called with (params, batch): too many positional"),
    "a loss of x and y": (lambda: stepped(lambda p, x, y: x.sum(), (X, X)), fzero.CaptureError,
                          "has the arguments (p, x, y), and is called with (params, batch): missing a required"),
    "a function of the parameters": (lambda: fzero.evaluate(stepped(), X, lambda p: p), fzero.CaptureError,
                                     "has the arguments (p), and is called with (params, batch): too many"),
    "a step of the state": (lambda: fzero.step(fzero.init(W, fzero.Spec(step=lambda s: s)), X), fzero.CaptureError,
                            "has the arguments (s), and is called with (state, batch): too many"),
    "an update of gradients": (lambda: stepped(optimizer=optim.GradientTransformation(lambda p: {}, lambda g: g)),
                               fzero.CaptureError, "is called with (grads, opt_state, params): too many"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_is_named(name: str) -> None:
    make, kind, said = CASES[name]
    with pytest.raises(kind) as caught:
        make()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


SHAPES: dict[str, tuple[Callable[..., Any], str]] = {
    "product": (
        lambda p, b: (b.T @ p["w"]).sum(),
        "aten.mm.default of f32[3, 4] and f32[3, 2]: a and b must have same",
    ),
    "sum": (lambda p, b: (b + p["w"]).sum(), "aten.add.Tensor of f32[4, 3] and f32[3, 2]: "),
    "cat": (lambda p, b: torch.cat([b, p["w"]], 1).sum(), "aten.cat.default of f32[4, 3] and f32[3, 2]: Sizes of"),
    "view": (lambda p, b: (b.view(5, -1) @ p["w"]).sum(), "aten.view.default of f32[4, 3]: shape '[5, -1]' is invalid"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_fit(name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """The user's line, both operands, and torch's reason; its logged traceback stays at debug level."""
    loss, said = SHAPES[name]
    with caplog.at_level(logging.INFO), pytest.raises((RuntimeError, IndexError)) as caught:
        stepped(loss)
    assert f"test_first_errors.py:{loss.__code__.co_firstlineno}: {said}" in str(caught.value)
    assert not [record for record in caplog.records if "failed while attempting" in record.getMessage()]
    assert "Traceback" not in capfd.readouterr().err


def test_torchs_traceback_is_there_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "torch._subclasses.fake_tensor"), pytest.raises(RuntimeError):
        stepped(SHAPES["product"][0])
    assert any("failed while attempting" in record.getMessage() for record in caplog.records)


def test_shapes_in_a_module() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(3, 4), torch.nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    params, buffers, apply = from_module(Two())
    line = Two.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        RuntimeError, match=rf"^test_first_errors.py:{line}: aten.addmm.default of .*f32\[4, 4\] and f32"
    ):
        stepped(lambda p, b: apply(p, buffers, b).mean(), params=params)


def test_a_loss_may_catch_the_error_of_an_op() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        try:
            return (b.T @ p["w"]).sum()
        except RuntimeError:
            return square(p, b)

    assert stepped(loss).metrics["loss"] == square(W, X)


def test_a_table_of_rates_trains_as_each_rate() -> None:
    rates, params = [0.1, 0.02, 0.5], {"w": torch.ones(3, 2)}
    state = fzero.init(params, fzero.Spec(loss=square, optimizer=optim.sgd(optim.table(rates))))
    w = params["w"].clone()
    for rate in [*rates, rates[-1]]:
        state = fzero.step(state, X)
        (grad,) = torch.autograd.grad(square({"w": w.requires_grad_()}, X), [w])
        w = (w - rate * grad).detach()
    torch.testing.assert_close(state.params["w"].full(), w)
    with pytest.raises(fzero.SpecError, match="table: values is empty"):
        optim.table([])
