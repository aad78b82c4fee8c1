"""In-place work: allowed on what the step made, refused on what it was given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import after_one_step, agrees, batch, here, mean_square, params, refused, refused_step, said
from helpers import run
from torch import Tensor

import fzero
from fzero import CaptureError
from fzero.capture import functionalise, tracing


def _add(x: Tensor) -> None:
    x.add_(1)  # here


def _augmented(x: Tensor) -> None:
    x += 1  # here


def _item(x: Tensor) -> None:
    x[0] = 5  # here


def _view(x: Tensor) -> None:
    x.view(-1).mul_(2)  # here


def _data(x: Tensor) -> None:
    x.data.zero_()  # here


def _detached(x: Tensor) -> None:
    x.detach().relu_()  # here


def _out(x: Tensor) -> None:
    torch.add(torch.ones(3), 1, out=x)  # here


def _copy(x: Tensor) -> None:
    x.copy_(torch.zeros(3))  # here


def _foreach(x: Tensor) -> None:
    torch._foreach_add_([x], 1.0)  # here


IN_PLACE = [_add, _augmented, _item, _view, _data, _detached, _out, _copy, _foreach]


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda fn: fn.__name__.strip("_"))
@pytest.mark.sampled(4)
def test_in_place_on_a_closed_over_tensor_is_refused_before_it_runs(change: Callable[[Tensor], None]) -> None:
    counts = torch.tensor([1.0, 2.0, 3.0])

    def loss(p: Any, b: Tensor) -> Tensor:
        change(counts)
        return mean_square(p, b)

    def step(s: Any, b: Tensor) -> Any:
        change(counts)
        return s, {}

    parts = ("tensor 'counts' is closed over and changed in place by", here(change), "put it in the state")
    refused(loss, *parts)
    assert counts.tolist() == [1.0, 2.0, 3.0]
    refused_step(step, *parts)
    assert counts.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda fn: fn.__name__.strip("_"))
def test_in_place_on_the_state_or_the_batch_is_refused(change: Callable[[Tensor], None]) -> None:
    def on_state(s: Any, b: Any) -> Any:
        change(s["p"]["w"])
        return s, {}

    def on_batch(s: Any, b: Any) -> Any:
        change(b["x"])
        return s, {}

    def on_batch_in_loss(p: Any, b: Any) -> Tensor:
        change(b["x"])
        return (p["w"] * b["x"]).sum()

    given = {"x": torch.ones(3)}
    state = fzero.init({"p": params()}, fzero.Spec(step=on_state))
    advice = "a step is pure. Return a new value instead"
    said(CaptureError, lambda: fzero.step(state, given), "state['p/w'] is changed in place by", here(change), advice)
    assert state.tree["p"]["w"].full().tolist() == [1.0, 2.0, 3.0]
    state = fzero.init({"p": params()}, fzero.Spec(step=on_batch))
    said(CaptureError, lambda: fzero.step(state, given), "batch['x'] is changed in place by", here(change), advice)
    said(
        CaptureError,
        lambda: after_one_step(on_batch_in_loss, b=given),
        "batch['x'] is changed in",
        here(change),
        advice,
    )
    assert given["x"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "change", [_add, _augmented, _item, _view, _data, _detached], ids=lambda fn: fn.__name__.strip("_")
)
def test_in_place_on_a_parameter_in_the_loss_is_refused(change: Callable[[Tensor], None]) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        change(p["w"])
        return mean_square(p, b)

    refused(loss, "is changed in place", here(change), "a step is pure. Return a new value instead")


SQUARE = torch.arange(9.0).view(3, 3).cos()


def _beside_a_view(x: Tensor) -> Tensor:
    view = x.t()
    x.transpose_(0, 1)  # here
    return view * x


def _of_a_view_written_to(x: Tensor) -> Tensor:
    x = x.t()
    x.t_()  # here
    return x.mul_(SQUARE)


@pytest.mark.parametrize("change", [_beside_a_view, _of_a_view_written_to])
def test_a_shape_changed_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """Eager autograd follows it, a trace would give wrong gradients."""

    def loss(p: Any, b: Tensor) -> Tensor:
        return (change(torch.outer(p["w"], p["w"])) * SQUARE).sum()

    refused(loss, here(change), "changes the shape of a tensor in place that shares", "Write x = x.transpose(...)")


def _alone(x: Tensor) -> Tensor:
    return x.transpose_(0, 1)


def _written_to(x: Tensor) -> Tensor:
    x.t_()
    x[1].mul_(3.0)
    return x


def _of_a_view(x: Tensor) -> Tensor:
    x = x[1:]
    x.t_()
    return x * SQUARE[:, :2] * SQUARE.sum()


def _twice(x: Tensor) -> Tensor:
    x = x.unsqueeze(0)
    x.squeeze_()
    return x.unsqueeze_(1)


@pytest.mark.parametrize("change", [_alone, _written_to, _of_a_view, _twice])
def test_another_shape_changed_in_place_is_followed(change: Callable[[Tensor], Tensor]) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        x = change(torch.outer(p["w"], p["w"].sin()))
        return (x * x * torch.arange(x.numel()).view(x.shape).cos()).sum() * b.mean()

    w, b = torch.tensor([1.0, 2.0, 3.0]), torch.ones(2, 3)
    own = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss({"w": own}, b), own)

    def step(s: Any, b: Tensor) -> Any:
        _, gradients = fzero.value_and_grad(loss)(s, b)
        return s, {"gradient": gradients["w"]}

    state = fzero.step(fzero.init({"w": w}, fzero.Spec(step=step)), b)
    torch.testing.assert_close(state.metrics["gradient"], expected)


def _exchanged(p: Any, b: Tensor) -> Tensor:
    y = b * p["w"]
    y.data = y.data * 3  # here
    return (y**2).mean()


def _normed(p: Any, b: Tensor) -> Tensor:
    layer = torch.nn.Linear(3, 3).requires_grad_(False)
    layer.weight.data = torch.nn.functional.normalize(layer.weight.data)  # here
    return (layer(b) * p["w"]).mean()


def _walked(p: Any, b: Tensor) -> Tensor:
    x = b.clone().requires_grad_()
    for _ in range(2):
        (slope,) = torch.autograd.grad(((x * p["w"]) ** 2).sum(), [x])
        x.data = x.data - 0.1 * slope  # here
    return ((x.detach() * p["w"]) ** 2).mean()


def test_a_langevin_walk_runs_with_the_value_that_is_asked_for() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        x = b.clone().requires_grad_()
        for _ in range(2):
            (slope,) = torch.autograd.grad(((x * p["w"]) ** 2).sum(), [x])
            x = (x.data - 0.1 * slope).detach().requires_grad_()
        return ((x.detach() * p["w"]) ** 2).mean()

    refused(_walked, "`.data = ...`", here(_walked), "x = value.detach().requires_grad_() for its gradient")
    agrees(loss)


@pytest.mark.parametrize("loss", [_exchanged, _normed])
def test_a_value_that_is_exchanged_is_refused(loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Not even a dispatch mode sees `x.data = y`: the trace went on with the old value."""
    refused(loss, "`.data = ...`", here(loss), "puts another value into a tensor, which a trace cannot follow")


def test_what_cannot_be_made_pure_is_refused_with_its_line() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        z = torch.complex(p["w"], p["w"]).conj()  # here: of its backward
        z.mul_(2j)
        return z.abs().sum()

    refused(
        loss,
        here(loss),
        "in-place work that cannot be made pure",
        "Write x = x.op(...) instead of x.op_(...)",
    )


def test_in_place_in_a_loss_on_a_tensor_of_the_step_is_refused() -> None:
    def step(s: Any, b: Tensor) -> Any:
        twice = b * 2

        def loss(p: Any, b: Tensor) -> Tensor:
            twice.add_(1)  # here
            return mean_square(p, b) * twice.sum()

        return s, {"value": fzero.value_and_grad(loss)(s["p"], b)[0]}

    refused_step(step, "is closed over and changed in place by", here(step))


def test_batchnorm_buffers_are_refused_by_name() -> None:
    norm = torch.nn.BatchNorm1d(3, affine=False)

    def loss(p: Any, b: Tensor) -> Tensor:
        return norm(b * p["w"]).sum()  # here

    refused(loss, "tensor 'norm.num_batches_tracked' is closed over and changed in place", here(loss), "in the state")
    assert (norm.num_batches_tracked.item(), norm.running_mean.tolist()) == (0, [0.0, 0.0, 0.0])


def test_in_place_on_intermediates_gives_the_values_of_the_same_work_done_eagerly() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        y = b * p["w"]
        y.mul_(2).add_(b)
        y[0] = 3.0
        y[:, 1].sub_(1)
        F.relu_(y)
        z = torch.zeros(4)
        z.index_add_(0, torch.tensor([1, 3]), y.sum(0)[:2])
        torch._foreach_mul_([z], 2.0)
        return (y.sum(1) + z).pow_(2).mean()

    agrees(loss)


class _Turned(torch.autograd.Function):
    """A product of blocks as monarch layers write it: into a transposed buffer, whose turn back is one view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty(4, 2, 3).transpose(0, 1)
        return torch.bmm(x, w, out=out).transpose(0, 1).view(4, 6)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        out = torch.empty(3, 2, 3).transpose(0, 1)
        torch.bmm(x.mT, grads[0].view(4, 2, 3).transpose(0, 1), out=out)
        return None, out.transpose(0, 1).view(3, 6).view(3, 2, 3).transpose(0, 1)


def test_what_is_written_with_out_keeps_the_strides_of_its_tensor() -> None:
    """It was refused: "follows in-place work that cannot be made pure ... write x = x.op(...)"."""

    def loss(p: Any, b: Tensor) -> Tensor:
        blocks = torch.outer(p["w"], p["w"]).expand(2, 3, 3) * torch.tensor([1.0, 2.0]).view(2, 1, 1)
        return _Turned.apply(torch.stack([b, b + 1]), blocks).square().mean()

    agrees(loss)


def test_in_place_on_gradients_in_a_step_gives_the_right_values() -> None:
    def step(s: Any, b: Tensor) -> Any:
        _, grads = fzero.value_and_grad(mean_square)(s["p"], b)
        torch._foreach_mul_([grads["w"]], 0.5)
        grads["w"].clamp_(-1, 1)
        return {"p": {"w": s["p"]["w"] - grads["w"]}}, {}

    state = fzero.step(fzero.init({"p": params()}, fzero.Spec(step=step)), batch())
    _, grads = fzero.value_and_grad(mean_square)(params(), batch())
    torch.testing.assert_close(state.tree["p"]["w"].full(), params()["w"] - (0.5 * grads["w"]).clamp(-1, 1))


def test_containers_may_be_changed() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        p["w"] = p["w"] * 2
        return mean_square(p, b.pop("x"))

    given = {"x": batch()}
    state = after_one_step(loss, b=given)
    assert list(given) == ["x"], "the user's own batch is another container"
    assert state.metrics["loss"] == mean_square({"w": 2 * params()["w"]}, batch())


def test_scalars_on_a_value_of_ones_own_need_no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`F.rms_norm` adds its epsilon in place: the pure op stands there, and the program is that of the replay."""

    def loss(p: Any, b: Tensor) -> Tensor:
        x = F.rms_norm(b @ p["w"], (4,), p["w"][0])
        y = x + x
        y.mul_(2).add_(1)
        return (x.pow(2) + y).mean()

    def program() -> str:
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
        return fzero.lower(spec, {"w": torch.ones(4, 4)}, torch.ones(2, 4)).program.digest

    replayed = []
    real = functionalise._replayed
    monkeypatch.setattr(functionalise, "_replayed", lambda *given: (replayed.append(1), real(*given))[1])
    local = program()
    assert not replayed
    monkeypatch.setattr(tracing, "purified", lambda gm: None)
    assert program() == local
    assert replayed


@pytest.mark.parametrize("name", ["logical_not_", "eq_", "conj_physical_", "relu_"])
def test_what_an_op_in_place_leaves_has_the_dtype_of_its_tensor(name: str) -> None:
    """Of floats `logical_not` and `eq` give truths, and `conj_physical` their very tensor."""
    given = [0.0] if name == "eq_" else []

    def loss(p: Any, b: Tensor) -> Any:
        x = b * 1
        y = getattr(x, name)(*given)
        return (p["w"] * y).sum(), {"y": y}

    def step(state: Any, batch: Any) -> Any:
        (_, aux), _ = fzero.value_and_grad(loss, has_aux=True)(state, batch)
        return state, aux

    b = torch.tensor([[0.0, -2.0, 3.0]])
    ran = run(fzero.Spec(step=step), {"w": torch.ones(1, 3)}, lambda rank, number: b, world=1, steps=1)
    found, expected = next(iter(ran.metrics[0][0].values())), getattr(b.clone(), name)(*given)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    pure = [n for gm in ran.lowered.program.segments.values() for n in gm.graph.nodes if n.op == "call_function"]
    assert not any(n.target is torch.ops.aten.conj_physical.default for n in pure), "it gives its very tensor"


def foreach_scaled(x: Tensor) -> None:
    torch._foreach_mul_([x[0], x[1]], 2.0)


def foreach_of_views(x: Tensor) -> None:
    torch._foreach_add_([x.view(-1)[2:5], x[3]], torch.tensor(1.5))


def foreach_of_lists(x: Tensor) -> None:
    torch._foreach_div_([x[1], x[2]], [x[0].exp(), x[3].exp()])


def foreach_of_one(x: Tensor) -> None:
    torch._foreach_exp_([x[2]])


def foreach_zeroed(x: Tensor) -> None:
    torch._foreach_zero_([x[1], x[3]])


def foreach_of_three(x: Tensor) -> None:
    torch._foreach_addcmul_([x[0], x[1]], [torch.arange(3.0), torch.ones(3)], [torch.ones(3), torch.arange(3.0)], 0.5)


@pytest.mark.parametrize(
    "change",
    [foreach_scaled, foreach_of_views, foreach_of_lists, foreach_of_one, foreach_zeroed, foreach_of_three],
    ids=lambda change: change.__name__,
)
@pytest.mark.sampled(3)
def test_several_tensors_changed_in_place_by_one_op_are_followed(change: Callable[[Tensor], None]) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        x = (b * p["w"]).clone()
        before = x[1] * 3
        change(x)
        return (x.square() + before).sum()

    agrees(loss)


SHARED: list[Callable[[Tensor], None]] = [
    lambda x: torch._foreach_add_([x, x], 1.0),
    lambda x: torch._foreach_mul_([x[0], x[:, 1]], [2.0, 3.0]),
    lambda x: torch._foreach_add_([x[1], x[0]], [x[2], x[1]], alpha=2.0),
]


@pytest.mark.parametrize("change", SHARED)
def test_of_a_list_that_shares_memory_the_next_tensor_reads_what_was_written(change: Callable[[Tensor], None]) -> None:
    """The complaint: torch's pure form computes all before it writes any, which gave other numbers than eager."""

    def loss(p: Any, b: Tensor) -> Tensor:
        x = b * p["w"]
        change(x)
        return (x * x.sin()).sum()

    agrees(loss)


@pytest.mark.parametrize("change", [lambda y: torch._foreach_add_([y], 1.0), lambda y: y.add_(1.0)])
def test_a_value_that_a_backward_reads_is_not_changed(change: Callable[[Tensor], Any]) -> None:
    """The complaint: writes to lists were not counted, and a gradient was that of the changed value."""

    def loss(p: Any, b: Tensor) -> Tensor:
        x, y = b * p["w"], b * p["w"] * 2
        z = x * y
        change(y)
        return (z * z).sum()

    with pytest.raises(RuntimeError, match=r"test_functionalise\.py:\d+.* has been modified by an inplace operation"):
        after_one_step(loss)
