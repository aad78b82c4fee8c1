"""The loss of a region: what it may return, its aux, its microbatches."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from capturing import (
    Loss,
    after_one_step,
    agrees,
    batch,
    captured,
    defined,
    here,
    mean_square,
    params,
    refused,
    refused_step,
    said,
    sgd_step,
)
from torch import Tensor

import fzero
from fzero import CaptureError


def _vector(p: Any, b: Tensor) -> Any:
    return b @ p["w"]


def _one_element(p: Any, b: Tensor) -> Any:
    return (b @ p["w"]).sum(0, keepdim=True)


def _integer(p: Any, b: Tensor) -> Any:
    return mean_square(p, b).long()


def _complex(p: Any, b: Tensor) -> Any:
    return mean_square(p, b) * 1j


def _number(p: Any, b: Tensor) -> Any:
    return 1.0


def _nothing(p: Any, b: Tensor) -> Any:
    return None


def _dict(p: Any, b: Tensor) -> Any:
    return {"loss": mean_square(p, b)}


def _tuple(p: Any, b: Tensor) -> Any:
    return mean_square(p, b), b


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (_vector, "f32[4]"),
        (_one_element, "f32[1]"),
        (_integer, "i64[]"),
        (_complex, "c64[]"),
        (_number, "float 1.0"),
        (_nothing, "NoneType None"),
        (_dict, "dict"),
    ],
)
def test_a_loss_is_a_floating_scalar(loss: Loss, given: str) -> None:
    refused(loss, "a loss is a floating 0-d tensor", defined(loss), f"returned {given}", ".mean() or .sum()")


def test_a_loss_that_returns_a_tuple_is_told_about_aux() -> None:
    refused(_tuple, "returned a tuple", defined(_tuple), "has_aux=True")
    refused_step(sgd_step(_vector, has_aux=True), "with has_aux=True a loss returns (loss, aux)", defined(_vector))


def test_aux() -> None:
    def loss(p: Any, b: Tensor) -> Any:
        y = b @ p["w"]
        return (y**2).mean(), {"y": y, "none": None, "list": [y.sum()]}

    state = fzero.step(fzero.init({"p": params()}, fzero.Spec(step=sgd_step(loss, has_aux=True))), batch())
    value, aux = state.metrics["value"]
    assert value == mean_square(params(), batch())
    assert torch.equal(aux["y"], batch() @ params()["w"])
    assert aux["none"] is None
    assert aux["list"][0] == aux["y"].sum()


def test_aux_of_microbatches_is_averaged_and_integers_are_the_last_ones() -> None:
    def floating(p: Any, b: Tensor) -> Any:
        return mean_square(p, b), (b @ p["w"]).sum()

    def counting(p: Any, b: Tensor) -> Any:
        return mean_square(p, b), (b > 0).sum()

    spec = fzero.Spec(step=sgd_step(floating, has_aux=True), microbatches=2)
    state = fzero.step(fzero.init({"p": params()}, spec), batch())
    torch.testing.assert_close(state.metrics["value"][1], (batch() @ params()["w"]).sum() / 2)
    spec = fzero.Spec(step=sgd_step(counting, has_aux=True), microbatches=2)
    state = fzero.step(fzero.init({"p": params()}, spec), batch())
    assert int(state.metrics["value"][1]) == int((batch().chunk(2)[1] > 0).sum())


def test_aux_that_is_a_python_value_is_refused() -> None:
    def loss(p: Any, b: Tensor) -> Any:
        return mean_square(p, b), {"lr": 0.1}

    refused_step(sgd_step(loss, has_aux=True), "aux['lr']", defined(loss), "is the Python value 0.1")


def test_values_smuggled_out_of_a_loss_are_refused() -> None:
    kept: dict[str, Tensor] = {}

    def loss(p: Any, b: Tensor) -> Tensor:
        kept["accuracy"] = (b > 0).float().mean()
        return mean_square(p, b)

    def step(s: Any, b: Tensor) -> Any:
        value, _ = fzero.value_and_grad(loss)(s["p"], b)
        return s, {"value": value, "accuracy": kept["accuracy"]}

    def later(s: Any, b: Tensor) -> Any:
        return s, {"m": b.sum() + kept["accuracy"]}  # here

    refused_step(step, "was made inside a loss", "as aux (has_aux=True)")
    refused_step(later, "in another trace", here(later))


class Reversible(torch.autograd.Function):
    """A layer that runs a backward of its own in its backward, as those of RevTorch do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x.detach(), w
        with torch.no_grad():
            return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            (x * ctx.w).backward(grad)  # here
        return x.grad, None


def test_a_backward_within_the_loss_that_reaches_a_parameter_is_refused() -> None:
    def penalty(p: Any, b: Tensor, inputs: bool = False) -> Tensor:
        x = b.clone().requires_grad_()
        (x * p["w"]).square().sum().backward(create_graph=True, inputs=[x] if inputs else None)
        return x.grad.square().sum()

    refused(
        penalty, "a backward() within the loss", "it adds to the .grad of 'w'", defined(penalty), "backward(inputs=[x])"
    )

    def reversible(p: Any, b: Tensor) -> Tensor:  # its gradient of w is lost, beside another that is there
        return Reversible.apply(b * p["w"], p["w"]).sum() + p["w"].sum()

    refused(reversible, here(Reversible.backward), "adds to the .grad of 'w'", "Reversible layers")
    agrees(functools.partial(penalty, inputs=True))


def test_a_parameter_without_a_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    given = {"w": torch.ones(3), "u": torch.full((2,), 5.0), "deep": [{"v": torch.ones(2)}]}
    refused(mean_square, "'deep/0/v', 'u' get no gradient", defined(mean_square), "allow_unused=True", p=given)
    cut = ("'w' gets no gradient", "Use it without torch.no_grad() and .detach() between")
    refused(lambda p, b: mean_square(p, b).detach(), *cut)
    refused(torch.no_grad()(mean_square), *cut)
    state = after_one_step(mean_square, given, allow_unused=True)
    assert "'deep/0/v', 'u' get no gradient from the loss: it is zero here" in caplog.text
    assert state.params["u"].full().tolist() == [5.0, 5.0]
    assert state.params["w"].full().tolist() != [1.0, 1.0, 1.0]
    refused_step(sgd_step(mean_square), "'u' gets no gradient", state={"p": {"w": torch.ones(3), "u": torch.ones(2)}})
    graph = captured(sgd_step(mean_square, allow_unused=True), {"p": {"u": torch.ones(2), "w": torch.ones(3)}})
    assert graph.regions[0].grad_of == (1,)


def test_parameters_must_be_floating() -> None:
    state = {"p": {"w": torch.ones(3), "n": torch.ones(2, dtype=torch.int64)}}
    refused_step(sgd_step(mean_square), "params['n'] is i64[2]", "gradients need floating", state=state)
    waves = {"p": {"w": torch.ones(3), "z": torch.ones(2, dtype=torch.complex64)}}
    refused_step(sgd_step(mean_square), "params['z'] is c64[2]", "torch.view_as_real(x)", state=waves)
    refused_step(lambda s, b: (s, {"v": fzero.grad(lambda p: b.sum())({})}), "its first argument has no leaves")


def test_arguments_of_value_and_grad_are_checked() -> None:
    said(CaptureError, lambda: fzero.value_and_grad(3), "value_and_grad of int 3: needed a function")
    said(CaptureError, lambda: fzero.value_and_grad(mean_square, microbatches=0), "microbatches=0", "positive int")
    said(CaptureError, lambda: fzero.grad(mean_square, batch_argnum=0)(params(), batch()), "batch_argnum=0")


def test_microbatches_need_a_batch_that_they_can_cut() -> None:
    def keyword(s: Any, b: Tensor) -> Any:
        return s, {"v": fzero.value_and_grad(lambda p, rows: mean_square(p, rows))(s["p"], rows=b)[0]}

    def closed_over(s: Any, b: Tensor) -> Any:
        return s, {"v": fzero.value_and_grad(lambda p: mean_square(p, b))(s["p"])[0]}

    advice = "pass the batch as an argument (not by closure), or set batch_argnum"
    refused_step(keyword, "microbatches=2 cuts the batch along dim 0", advice, microbatches=2)
    refused_step(closed_over, "microbatches=2 cuts the batch along dim 0", advice, microbatches=2)
    refused_step(sgd_step(mean_square), "batch is f32[4, 3]: dim 0 must be divisible by microbatches=3", microbatches=3)


def test_a_leaf_in_the_place_of_the_batch_is_not_cut() -> None:
    """Half of a table is no table; rows of a rank's own, kept in the state, are cut as the batch is."""

    def looked_up(p: Any, table: Tensor, b: Tensor) -> Tensor:
        return mean_square(p, b) + (table @ p["w"]).square().mean()

    def step(s: Any, b: Tensor, **given: Any) -> Any:
        return s, {"v": fzero.value_and_grad(looked_up, **given)(s["p"], s["table"], b)[0]}

    def doubled(s: Any, b: Tensor) -> Any:
        return s, {"v": fzero.value_and_grad(looked_up)(s["p"], 2 * s["table"], b)[0]}

    state = {"p": params(), "table": torch.ones(4, 3)}
    refused_step(
        step, "microbatches=2 split an argument of the loss at", "state['table'], f32[4, 3]", "batch_argnum=2",
        state=state, microbatches=2,
    )  # fmt: skip
    refused_step(doubled, "or what is made of it", "batch_argnum=2", state=state, microbatches=2)
    own = {**state, "table": fzero.per_rank(torch.ones(4, 3))}
    for made, given in ((functools.partial(step, batch_argnum=2), state), (step, own)):
        fzero.lower(fzero.Spec(step=made, microbatches=2), given, batch(), world_size=2)


def test_a_cut_leaf_that_no_longer_fits_is_named_with_batch_argnum() -> None:
    """The complaint: torch's words named the user's line alone, and the fault is another's: microbatches cut a leaf."""

    def looked_up(p: Any, table: Tensor, b: Tensor) -> Tensor:
        return ((b * p["w"]) @ table["t"]).square().mean()

    def step(s: Any, b: Any, **given: Any) -> Any:
        return s, {"v": fzero.value_and_grad(looked_up, **given)(s["p"], {"t": b["t"]}, b["x"])[0]}

    def lowered(step: Any, **given: Any) -> Any:
        spec, state = fzero.Spec(step=step, **given), {"p": {"w": torch.ones(6)}}
        return fzero.lower(spec, state, {"t": torch.ones(6, 6), "x": torch.ones(8, 6)}, world_size=1)

    said = "microbatches=2 cut batch['t'], f32[6, 6], along dim 0 into parts of 3, for it is in the place of the batch"
    with pytest.raises(RuntimeError, match=r"test_region.py:\d+: aten") as caught:
        lowered(step, microbatches=2)
    assert said in str(caught.value)
    assert "batch_argnum=2" in str(caught.value)
    lowered(functools.partial(step, batch_argnum=2), microbatches=2)
    with pytest.raises(RuntimeError, match="aten") as caught:
        lowered(lambda s, b: step(s, {**b, "t": torch.ones(5, 5)}))
    assert "batch_argnum" not in str(caught.value)


def test_errors_of_the_users_own_code_arrive_as_they_are() -> None:
    def own(p: Any, b: Tensor) -> Tensor:
        raise KeyError("mine")

    said(KeyError, lambda: after_one_step(own), "mine")
    with pytest.raises(RuntimeError, match=r"reduction dim|size|shape") as caught:
        after_one_step(lambda p, b: (b @ torch.ones(4, 4)).sum() * p["w"].sum())
    assert any(entry.path == Path(__file__) for entry in caught.traceback)


def test_a_deviation_of_a_narrow_parameter_has_a_gradient() -> None:
    """The complaint: its cast to fp32 stood before what it is computed of, a KeyError."""
    start = torch.tensor([1.0, 2.0, 4.0])
    state = after_one_step(lambda p, b: p["w"].std().float() * b.mean(), {"w": start.half()})
    assert state.params["w"].full().tolist() != start.tolist()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_teacher_that_requires_grad_is_a_constant_under_no_grad(microbatches: int) -> None:
    """The complaint: AdamW's kernel was said to be differentiated, of a teacher that was not frozen."""
    torch.manual_seed(0)
    teacher, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    losses = []
    for frozen in (False, True):
        teacher.requires_grad_(not frozen)

        def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = teacher(batch)
            return (batch @ params["w"] - target).square().mean()

        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(0.1), microbatches=microbatches)
        state = fzero.init({"w": torch.zeros(3, 2)}, spec)
        for _ in range(3):
            state = fzero.step(state, x)
        losses.append(float(state.metrics["loss"]))
    assert losses[0] == losses[1]
