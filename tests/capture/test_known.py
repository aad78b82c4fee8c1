"""Values that no input decides are known while a step is traced: what may be asked for, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fzero
import fzero.interop
from fzero.capture import known
from fzero.errors import CaptureError

MASK = torch.tensor([True, False, True])
WEIGHTS = torch.tensor([0.5, -1.0, 2.0])
X = torch.arange(12.0).view(4, 3) / 12
Loss = Callable[[Any, Tensor], Tensor]


def params() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 1, 6).view(3, 2)}


def written(p: Any, b: Tensor) -> Tensor:
    mask = torch.zeros(3, dtype=torch.bool)
    mask[:2] = WEIGHTS[:2] < 0
    mask.view(3, 1)[2] = True
    return (b[:, mask] @ p["w"][mask]).square().sum()


def literal(p: Any, b: Tensor) -> Tensor:
    mask = torch.tensor([False, False, True])
    mask[0] = True
    return (b[:, mask] @ p["w"][mask]).square().sum()


def sliced(p: Any, b: Tensor) -> Tensor:
    lengths = torch.tensor([1, 3])
    return sum((b[i, : int(n)].sum() * p["w"].sum() for i, n in enumerate(lengths)), torch.zeros(()))


def filled(p: Any, b: Tensor) -> Tensor:
    number, mask = torch.empty((), dtype=torch.int64).fill_(2), torch.empty(3, dtype=torch.bool)
    mask[:] = WEIGHTS < 0
    view = torch.empty(2)
    head = view[:1]  # a view of memory without values, which is known with it
    view.zero_()
    head.add_(1.0)
    return (b[:, mask] @ p["w"][mask]).square().sum() * int(number) * view.sum().item()


def filled_in_part(p: Any, b: Tensor) -> Tensor:
    made = torch.empty(3)
    made[:2] = 1.0
    return p["w"].sum() * made.sum().item()


KNOWN: dict[str, Loss] = {
    "memory that is filled": filled,
    "branch": lambda p, b: (b @ p["w"]).sum() * (2.0 if (WEIGHTS > 0).any() else 1.0),
    "item": lambda p, b: (b @ p["w"]).sum() * WEIGHTS.sum().item(),
    "boolean index": lambda p, b: (b[:, MASK] @ p["w"][MASK]).square().sum(),
    "masked_select": lambda p, b: (p["w"][:, 0].masked_select(MASK) * 3).square().sum() + b.sum(),
    "nonzero": lambda p, b: (p["w"][WEIGHTS.nonzero()[:, 0]] * b[0, 0]).sum(),
    "where": lambda p, b: (p["w"][torch.where(WEIGHTS > 0)] * b[0, 0]).sum(),
    "unique": lambda p, b: (p["w"] * torch.tensor([1, 1, 2]).unique().numel()).sum() + b.sum(),
    "repeat": lambda p, b: p["w"].repeat_interleave(torch.tensor([1, 2, 0]), 0).square().sum() + b.sum(),
    "made in the loss": lambda p, b: (b[:, torch.arange(3) != 1] @ p["w"][torch.arange(3) != 1]).sum(),
    "causal mask": lambda p, b: (p["w"].T @ torch.ones(3, 3).tril()[torch.eye(3).bool().any(0)]).sum() + b.sum(),
    "tolist": lambda p, b: sum((p["w"][i].sum() for i in torch.tensor([2, 0]).tolist()), b.sum()),
    "of a shape": lambda p, b: (b @ p["w"]).sum() * (2.0 if torch.ones_like(b, dtype=torch.uint8)[0].all() else 1.0),
    "written in the loss": written,
    "written to a literal": literal,
    "lengths": sliced,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.sampled(6)
def test_what_no_input_decides_may_be_asked_for(name: str) -> None:
    loss = KNOWN[name]
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    state = fzero.step(fzero.init(params(), spec), X)
    w = params()["w"].requires_grad_()
    value = loss({"w": w}, X)
    value.backward()
    assert torch.allclose(state.metrics["loss"], value.detach(), atol=1e-6)
    assert w.grad is not None
    assert torch.allclose(fzero.unshard(state.params)["w"], params()["w"] - 0.1 * w.grad, atol=1e-6)


def test_in_place_work_on_a_value_that_was_asked_for_is_done_once() -> None:
    """A selection is a literal of the program, and the known value beside it was the same memory: `x[mask] -= 1`, as
    ChebConv's of PyTorch Geometric, subtracted 2 in silence."""

    def loss(p: Any, b: Tensor) -> Tensor:
        scale = 2 * WEIGHTS
        scale[MASK] -= 1
        picked = WEIGHTS[torch.tensor([2, 0])]
        picked.mul_(3).add_(1)
        return (b @ (scale[:, None] * p["w"])).sum() + picked.sum() * p["w"].sum()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    state = fzero.step(fzero.init(params(), spec), X)
    assert torch.allclose(state.metrics["loss"], loss(params(), X), atol=1e-6)


def by_input(p: Any, b: Tensor) -> Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    view = mask[1:]
    view[0] = b[0, 0] > 0  # so of mask, of which it is a view
    return p["w"].sum() * (2.0 if mask.any() else 1.0)


def through_a_view(p: Any, b: Tensor) -> Tensor:
    copy = torch.zeros(3)
    copy[:2] = b[0, :2]
    return p["w"].sum() * copy.sum().item()


def filled_and_written(p: Any, b: Tensor) -> Tensor:
    made = torch.empty(3)
    made.fill_(1.0)[:2] = b[0, :2]
    return p["w"].sum() * made.sum().item()


UNKNOWN: dict[str, Loss] = {
    "memory that is filled in part": filled_in_part,
    "memory that is filled, and written by an input": filled_and_written,
    "memory that is filled by an input": lambda p, b: p["w"].sum() * torch.empty(3).copy_(b[0]).sum().item(),
    "written through a view": through_a_view,
    "written by an input": by_input,
    "of a shape, and written by an input": lambda p, b: p["w"].sum() * torch.zeros_like(b).add_(b).sum().item(),
    "from the batch": lambda p, b: p["w"].sum() * (WEIGHTS * b[0]).sum().item(),
    "memory without values": lambda p, b: p["w"].sum() * torch.empty(3).sum().item(),
    "drawn": lambda p, b: p["w"].sum() * torch.rand(3).sum().item(),
    "too large": lambda p, b: p["w"].sum() * torch.zeros(1 << 23).sum().item(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_an_input_decides_may_not(name: str) -> None:
    spec = fzero.Spec(loss=UNKNOWN[name], optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(CaptureError, match="which is known only when it runs"):
        fzero.lower(spec, params(), X, world_size=1, key=fzero.random.key(0))


def test_a_trace_computes_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "IN_ALL", 20_000)

    def loss(p: Any, b: Tensor, count: int) -> Tensor:
        for _ in range(count):
            mask = torch.ones(1000)
        return p["w"].sum() * mask.sum().item()

    for count, refused in ((2, False), (8, True)):
        spec = fzero.Spec(loss=lambda p, b, n=count: loss(p, b, n), optimizer=fzero.optim.sgd(0.1))
        with pytest.raises(CaptureError, match="which is known only when it runs") if refused else nullcontext():
            fzero.lower(spec, params(), X, world_size=1)


def test_a_closed_over_tensor_stays_as_it_is_while_the_step_is_traced() -> None:
    weights = WEIGHTS.clone()

    def loss(p: Any, b: Tensor) -> Tensor:
        copy = weights.clone()
        copy.mul_(0)
        return (b @ p["w"]).sum() * (2.0 if copy.any() else 1.0)

    state = fzero.step(fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))), X)
    assert torch.equal(weights, WEIGHTS)
    assert state.metrics["loss"] == (X @ params()["w"]).sum()


@pytest.mark.parametrize("flags", [torch.arange(10.0)[::5], torch.arange(10.0)[::5][:1], torch.tensor(1.5).expand(0)])
def test_a_closed_over_tensor_of_any_strides_may_be_asked_for(flags: Tensor) -> None:
    """It ended in torch's RuntimeError: 'self.stride(-1) must be 1'."""

    def loss(p: Any, b: Tensor) -> Tensor:
        return (b @ p["w"]).sum() * (2.0 if (flags < 7).all() else 1.0)

    state = fzero.step(fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))), X)
    assert state.metrics["loss"] == 2 * (X @ params()["w"]).sum()


def test_a_change_of_what_decided_the_program_is_an_error_and_of_another_tensor_is_none() -> None:
    flags, scale = torch.tensor([True, False]), torch.ones(2)

    def loss(p: Any, b: Tensor) -> Tensor:
        return (b @ p["w"] * scale).sum() * (2.0 if flags.any() else 1.0)

    state = fzero.step(fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))), X)
    scale.mul_(2.0)
    state = fzero.step(state, X)
    flags.fill_(False)
    with pytest.raises(
        CaptureError, match=r"tensor 'flags' is closed over, its value was read .* changed in place since"
    ):
        fzero.step(state, X)
    flags = torch.tensor([False, False])
    assert fzero.unshard(state.params)["w"].isfinite().all(), "the state is as it was"


def test_distributions_are_not_checked_in_a_trace_alone(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    rounds = 3 if whole else 1
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches it off

    def loss(p: Any, b: Tensor) -> Tensor:
        return -torch.distributions.Categorical(logits=b @ p["w"]).log_prob(torch.tensor([0, 1, 0, 1])).mean()

    def traced() -> None:
        for _ in range(rounds):
            fzero.lower(fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)), params(), X, world_size=1)

    threads = [Thread(target=traced) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_a_library_that_asks_is_named_with_its_line() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 1)
    _, buffers, apply = functional = fzero.interop.from_module(encoder)
    loss = lambda p, b: apply(p, buffers, b["h"], mask=b["m"]).sum()  # noqa: E731
    batch = {"h": torch.ones(2, 3, 4), "m": nn.Transformer.generate_square_subsequent_mask(3)}
    with pytest.raises(CaptureError) as error:
        fzero.lower(fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)), functional.params, batch, world_size=1)
    line = loss.__code__.co_firstlineno
    assert str(error.value).startswith(f"test_known.py:{line}: ")
    assert "torch/nn/modules/transformer.py:" in str(error.value)
    assert "pass is_causal=True or False" in str(error.value)


def stepped(x: torch.Tensor, **options: Any) -> Any:
    """A state after a step of a loss that closes over a tensor."""
    given = {"loss": lambda p, b: (x * p["w"]).mean(), "optimizer": fzero.optim.sgd(0.0), **options}
    return fzero.step(fzero.init({"w": torch.ones(2, 3)}, fzero.Spec(**given)), None)


@pytest.mark.parametrize("x", [torch.ones(3, 2).t(), torch.ones(2, 1).expand(2, 3), torch.ones(2, 6)[:, ::2]])
def test_a_closed_over_tensor_that_is_not_contiguous_is_read_at_each_step(x: torch.Tensor) -> None:
    """A copy of it was read, with the values of the trace."""
    state = stepped(x)
    x[:, :1].mul_(5)
    assert float(fzero.step(state, None).metrics["loss"]) == float(x.mean()) > 1


@pytest.mark.parametrize("other", [lambda x: setattr(x, "data", 5 * x.data), lambda x: x.set_(5 * x)])
def test_a_closed_over_tensor_with_other_memory_is_another_program(other: Any) -> None:
    """The program read the old memory: that of a teacher whose average is `t.data = 0.9 * t.data + 0.1 * s.data`."""
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    state, again = stepped(x), stepped(y, on_change="retrace")
    other(x)
    other(y)
    with pytest.raises(fzero.CaptureError, match=r"x is closed over and was given other memory .*x.copy_"):
        fzero.step(state, None)
    assert float(fzero.step(again, None).metrics["loss"]) == 5


HOST: dict[str, Callable[[Tensor], float]] = {
    "numpy": lambda x: float(x.numpy().sum()),
    "a view's": lambda x: float(x[1:].numpy().sum()),
    "numpy, forced": lambda x: float(x.numpy(force=True).sum()),
    "asarray": lambda x: float(np.asarray(x).sum()),
    "of a result": lambda x: float((x * 2).cpu().numpy().sum()),
    "tolist": lambda x: sum(x.tolist()),
    "an item": lambda x: float(x[1]),
}


@pytest.mark.parametrize("how", HOST)
@pytest.mark.parametrize("change", [lambda x: x.add_(1.0), lambda x: x.data.add_(1.0), lambda x: x.numpy().fill(5.0)])
def test_memory_that_is_read_on_the_host_is_the_tensors(how: str, change: Callable[[Any], Any]) -> None:
    """Torch hands out a fake tensor's memory, which is nowhere."""
    weights = torch.tensor([2.0, 1.0])

    def loss(p: Any, b: Tensor) -> Tensor:
        return (b @ p["w"]).sum() * HOST[how](weights)

    state = fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)))
    for _ in range(2):
        state = fzero.step(state, X)
        assert float(state.metrics["loss"]) == pytest.approx(float((X @ params()["w"]).sum()) * HOST[how](weights))
    change(weights)
    with pytest.raises(CaptureError, match="changed in place"):
        fzero.step(state, X)


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("how", ["closed over", "static"])
def test_a_known_mask_of_another_size_is_an_error_as_in_torch(how: str, size: int) -> None:
    """The complaint: its true elements were taken as indices, which lay within x: a number where torch has none."""
    mask = torch.arange(size) < 2
    x, w = torch.ones(4, 3), torch.ones(3)
    spec = fzero.Spec(
        loss=lambda p, b: (b["x"][mask if how == "closed over" else b["mask"]] @ p["w"]).sum(),
        optimizer=fzero.optim.sgd(0.1),
    )
    batch = {"x": x} if how == "closed over" else {"x": x, "mask": fzero.static(mask)}
    with pytest.raises(IndexError, match=rf"test_known.py:\d+.*shape of the mask \[{size}\] at index 0 does not match"):
        fzero.lower(spec, {"w": w}, batch)
