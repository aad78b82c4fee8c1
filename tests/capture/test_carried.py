"""Tensors that a step leaves in a Python object: one that the next step would read is an error, all others are free."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import CaptureError

pytestmark = pytest.mark.usefixtures("thawed")  # Python finds no function that is frozen


class Net(nn.Module):
    """What all below have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("inverse", torch.ones(4))
        self.held: Any = None
        self.size = 0
        self.aux: Any = torch.zeros(())


class Carries(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.held is not None:
            y = y + self.held
        self.held = y.detach().mean(0)
        return y


class CarriesATensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.held
        self.held = y.detach().mean(0)
        return y


class DrawsOnce(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.held is None:
            self.held = torch.randn(4, 4)
        return self.linear(x) @ self.held


class Caches(Net):
    """A rotary table, as it is written most often."""

    def forward(self, x: Tensor) -> Tensor:
        if self.held is None or self.size < x.shape[1]:
            self.size = x.shape[1]
            self.held = torch.outer(torch.arange(self.size), self.inverse).cos().to(x.dtype)
        return self.linear(x) @ self.held


class Logs(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.held = y.softmax(-1)
        self.aux = y.square().mean()
        return y * self.held + self.aux


class BeginsAnew(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.held = 0
        for row in self.linear(x):
            self.held = self.held + row.mean()
        return self.held * x


class Accumulates(Net):
    """Read by no line that decides a loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = self.aux + y.detach().mean()
        return y


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Logs()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x)


class Centred(Net):
    """The loss of a student and its teacher, as DINO has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, 4))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        loss = -((teacher - self.centre).softmax(-1).detach() * student.log_softmax(-1)).sum(-1).mean()
        self.update(teacher.detach())
        return loss

    def update(self, teacher: Tensor) -> None:
        self.centre = self.centre * 0.9 + teacher.mean(0, keepdim=True) * 0.1


Loss = Callable[[Any, Tensor], Tensor]


def by_apply(module: nn.Module) -> tuple[Any, Loss]:
    params, buffers, apply = fzero.interop.from_module(module)
    return params, lambda params, x: apply(params, buffers, x).square().mean()


def by_functional_call(module: nn.Module) -> tuple[Any, Loss]:
    params = {name: x.detach().clone() for name, x in module.named_parameters()}
    return params, lambda params, x: torch.func.functional_call(module, params, (x,)).square().mean()


def losses(params: Any, loss: Loss, microbatches: int = 1) -> list[float]:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=microbatches)
    state, found = fzero.init(params, spec, key=fzero.random.key(0)), []
    for number in range(1, 4):
        state = fzero.step(state, torch.ones(2, 4) * number)
        found.append(float(state.metrics["loss"]))
    return found


def eagerly(params: Any, loss: Loss) -> list[float]:
    leaves, found = {name: x.detach().clone().requires_grad_() for name, x in params.items()}, []
    for number in range(1, 4):
        value = loss(leaves, torch.ones(2, 4) * number)
        grads = torch.autograd.grad(value, [*leaves.values()])
        leaves = {n: (x - 0.1 * g).detach().requires_grad_() for (n, x), g in zip(leaves.items(), grads, strict=True)}
        found.append(value.item())
    return found


@pytest.mark.parametrize("how", [by_apply, by_functional_call])
@pytest.mark.parametrize("module", [Carries, CarriesATensor, DrawsOnce])
def test_what_a_step_leaves_for_the_next_is_refused(module: type[nn.Module], how: Any) -> None:
    """The complaint: the hidden state was the first one at each step, and the projection another at each."""
    with pytest.raises(CaptureError, match=r"self.held, which .*forward .* reads, is set by .*each step computes anew"):
        losses(*how(module()))


def test_a_buffer_of_a_closed_over_loss_is_no_state() -> None:
    """The complaint: the centre stayed zero at all steps."""
    centred = Centred()

    def loss(params: Any, x: Tensor) -> Tensor:
        return centred(x @ params["student"], x @ params["student"].detach() * 2)

    with pytest.raises(CaptureError, match=r"self.centre, which .*forward .* reads, is set by .*update"):
        losses({"student": torch.eye(4)}, loss)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("how", [by_apply, by_functional_call])
@pytest.mark.parametrize("module", [Caches, Logs, BeginsAnew, Accumulates, Twice])
def test_what_no_later_step_reads_is_free(module: type[nn.Module], how: Any, microbatches: int) -> None:
    torch.manual_seed(0)
    made = module()
    expected = eagerly(*how(copy.deepcopy(made)))
    found = losses(*how(made), microbatches)
    if microbatches == 1:
        assert found == pytest.approx(expected, rel=1e-5)


def test_statistics_in_the_state_and_a_cache_of_them() -> None:
    """A table of a buffer is no carried value, where the buffers are state."""
    params, buffers, apply = fzero.interop.from_module(Caches(), mutable=True)

    def step(state: Any, batch: Tensor) -> tuple[Any, dict[str, Tensor]]:
        def inner(params: Any, x: Tensor) -> Tensor:
            return apply(params, state["buffers"], x)[0].square().mean()

        value, grads = fzero.value_and_grad(inner)(state["params"], batch)
        moved = {name: x - 0.1 * grads[name] for name, x in state["params"].items()}
        return {**state, "params": moved}, {"loss": value}

    state = fzero.init({"params": params, "buffers": buffers}, fzero.Spec(step=step))
    assert float(fzero.step(state, torch.ones(2, 4)).metrics["loss"]) > 0


def test_a_read_in_the_line_that_calls_the_forward() -> None:
    """Python reads it after the call; a line's names are noted before it runs."""
    net = Logs()
    params = {name: x.detach().clone() for name, x in net.named_parameters()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, (x,)).mean() + net.aux

    expected = eagerly(params, loss)
    net.aux = torch.zeros(())
    assert losses(params, loss) == pytest.approx(expected, rel=1e-5)


def test_what_a_forward_leaves_on_its_copy_is_not_read_of_the_module() -> None:
    """The complaint: the balance loss of experts was the zero that the module began with."""
    net = Logs()
    params, buffers, apply = fzero.interop.from_module(net)

    def plain(params: Any, x: Tensor) -> Tensor:
        y = apply(params, buffers, x).mean()
        return y + sum(part.aux for part in net.modules() if isinstance(part, Logs))

    with pytest.raises(CaptureError, match=r"part.aux, which .* reads, is f32\[\] on the module itself: .*apply.call"):
        losses(params, plain)

    def of_the_copy(params: Any, x: Tensor) -> Tensor:
        return apply.call(params, buffers, lambda module: module(x).mean() + module.aux)

    assert losses(params, of_the_copy)[0] == pytest.approx(eagerly(params, of_the_copy)[0], rel=1e-5)


def test_what_the_trace_holds_itself_may_be_set() -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        scale = batch["scale"]
        batch["scale"] = batch["x"] * scale
        return (batch["scale"] @ params["w"]).square().mean()

    state = fzero.init({"w": torch.ones(4, 4)}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))
    assert float(fzero.step(state, {"x": torch.ones(2, 4), "scale": 2}).metrics["loss"]) == 64


class Spiking(Net):
    """Its potential is carried from time to time, and begins afresh with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.held = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        for row in self.linear(x):
            self.held = self.held * 0.5 + row
        return self.held


def test_a_potential_that_begins_afresh() -> None:
    params, buffers, apply = fzero.interop.from_module(Spiking())

    def loss(params: Any, x: Tensor) -> Tensor:
        def forward(module: Any) -> Tensor:
            module.reset()
            return module(x).square().mean()

        return apply.call(params, buffers, forward)

    assert losses(params, loss) == pytest.approx(eagerly(params, loss), rel=1e-5)
    with pytest.raises(CaptureError, match="If each step begins afresh, set it before it is read"):
        losses(*by_apply(Spiking()))


class Gated(Net):
    """A block that keeps something only where it is asked to."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.keeps:
            self.held = y.softmax(-1)
        if self.held is not None:
            y = y * self.held
        return y


def test_blocks_of_one_class_of_which_one_keeps_something() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Gated(True), Gated(False), Gated(True))
    expected = eagerly(*by_apply(copy.deepcopy(net)))
    assert losses(*by_apply(net)) == pytest.approx(expected, rel=1e-5)
