"""The cross entropy of a cluster: torch's own loss and gradient are the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fzero._torch_compat import FakeTensorMode
from fzero.codegen import cross_entropy
from fzero.ir import forms, fx_nodes

aten = torch.ops.aten
MATRICES = (aten._log_softmax.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default)


def traced(fn: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    gm = make_fx(fn)(*inputs)
    mode = FakeTensorMode()
    return forms.propagate(gm, [mode.from_tensor(x) for x in inputs])


def both(reduction: str, ignore: int = -100) -> Any:
    """The loss of 16-bit logits and its gradient, as a step has them."""
    number = {"mean": 1, "sum": 2}[reduction]

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        logs = aten._log_softmax(x.float(), 1, False)
        loss, count = aten.nll_loss_forward(logs, y, None, number, ignore)
        zeros = aten.nll_loss_backward(torch.ones_like(loss), logs, y, None, number, ignore, count)
        return loss, aten._log_softmax_backward_data(zeros, logs, 1, torch.float32)

    return fn


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [0, 3])
def test_loss_and_gradient(reduction: str, ignored: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (20 * torch.randn(32, 77, generator=generator)).bfloat16()
    y = torch.randint(0, 77, (32,), generator=generator)
    y[:ignored] = -100
    gm = cross_entropy.by_rows(traced(both(reduction), x, y))
    assert not any(node.target in MATRICES for node in gm.graph.nodes)
    exact = x.double().requires_grad_()
    wanted = F.cross_entropy(exact, y, reduction=reduction)
    wanted.backward()
    loss, grad = gm(x, y)
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-6)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_the_largest_logits_do_not_overflow() -> None:
    x = torch.tensor([[1e4, 0.0, -1e4]]).bfloat16()
    loss, grad = cross_entropy.by_rows(traced(both("mean"), x, torch.tensor([1])))(x, torch.tensor([1]))
    assert float(loss) == pytest.approx(float(x[0, 0]))
    assert grad.tolist() == [[1.0, -1.0, 0.0]]


def _read_outside(x: torch.Tensor, y: torch.Tensor) -> Any:
    logs = aten._log_softmax(x.float(), 1, False)
    return aten.nll_loss_forward(logs, y, None, 1, -100)[0], logs


def _weighed(x: torch.Tensor, y: torch.Tensor) -> Any:
    weight = torch.ones(x.shape[1])
    return aten.nll_loss_forward(aten._log_softmax(x.float(), 1, False), y, weight, 1, -100)[0]


def _by_row(x: torch.Tensor, y: torch.Tensor) -> Any:
    return aten.nll_loss_forward(aten._log_softmax(x.float(), 1, False), y, None, 0, -100)[0]


@pytest.mark.parametrize("fn", [_read_outside, _weighed, _by_row])
def test_others_stay_as_they_are(fn: Any) -> None:
    """Log-probabilities that something else reads, weights of classes, losses by row."""
    gm = traced(fn, torch.randn(8, 5), torch.arange(5).repeat(2)[:8])
    assert cross_entropy.by_rows(gm) is gm
    assert any(fx_nodes.op_name(node) == "_log_softmax" for node in gm.graph.nodes)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padded_logits_are_read_whole(reduction: str) -> None:
    """As a padded product and its pads leave them: no slice, no pad, zeros behind the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    wide = (20 * torch.randn(32, 80, generator=generator)).bfloat16()
    y = torch.randint(0, 77, (32,), generator=generator)
    y[3] = -100
    loss_of = both(reduction)

    def fn(wide: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grad = loss_of(aten.slice(wide, -1, 0, 77).view(4, 8, 77).float().view(32, 77), y)
        low = grad.view(4, 8, 77).to(torch.bfloat16).view(32, 77)
        return loss, aten.constant_pad_nd(low, [0, 3, 0, 0])

    gm = traced(fn, wide, y)
    assert any(node.target is aten.constant_pad_nd.default for node in gm.graph.nodes)
    written = cross_entropy.by_rows(gm)
    assert not {aten.slice.Tensor, aten.constant_pad_nd.default, *MATRICES} & {n.target for n in written.graph.nodes}
    exact = wide[:, :77].double().requires_grad_()
    wanted = F.cross_entropy(exact, y, reduction=reduction)
    wanted.backward()
    loss, grad = written(wide, y)
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-6)
    torch.testing.assert_close(grad[:, :77].double(), exact.grad, rtol=1e-2, atol=1e-7)
    assert grad.shape == wide.shape
    assert not grad[:, 77:].any()
