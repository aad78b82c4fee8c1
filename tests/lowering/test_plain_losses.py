"""plain_losses: a loss and its gradient are the same once its means are written as sums that are divided once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.errors import SpecError
from fzero.ir import fx_nodes
from fzero.ir.recorder import record
from fzero.lowering.plain_losses import BACKWARD, FORWARD, MEAN, made_plain

aten = torch.ops.aten
TARGETS = torch.tensor([0, 2, -100, 1, 2])
PIXELS = torch.tensor([[[0, 2], [1, -100]]])


def with_gradient(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    def both(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        value = fn(x)
        return [value, *torch.autograd.grad(value, x)]

    return both


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        return record(fn, fakes)


def calls(gm: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target in targets]


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "mean": (lambda x: F.cross_entropy(x, TARGETS), torch.randn(5, 3)),
    "two means": (lambda x: F.cross_entropy(x, TARGETS) + 2 * F.nll_loss(x, TARGETS), torch.randn(5, 3)),
    "another ignored target": (lambda x: F.cross_entropy(x, TARGETS.clamp(0), ignore_index=2), torch.randn(5, 3)),
    "sum": (lambda x: F.cross_entropy(x, TARGETS, reduction="sum"), torch.randn(5, 3)),
    "each": (lambda x: (F.cross_entropy(x, TARGETS, reduction="none") ** 2).sum(), torch.randn(5, 3)),
    "of pixels": (lambda x: F.cross_entropy(x, PIXELS), torch.randn(1, 3, 2, 2)),
    "mean of all": (lambda x: (x * x).mean(), torch.randn(5, 3)),
    "doubles": (lambda x: F.cross_entropy(x, TARGETS), torch.randn(5, 3, dtype=torch.float64)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_what_they_were(name: str) -> None:
    fn, x = LOSSES[name]
    gm = graph_of(with_gradient(fn), x)
    wanted = gm(x)
    made_plain(gm)
    gm.graph.lint()
    gm.recompile()
    for found, value in zip(gm(x), wanted, strict=True):
        assert found.dtype == value.dtype
        torch.testing.assert_close(found, value)
    reductions = {node.args[3] for node in calls(gm, *FORWARD)} | {node.args[4] for node in calls(gm, *BACKWARD)}
    assert MEAN not in reductions
    assert not calls(gm, aten.mean.default, aten.ones_like.default)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], (Tensor, tuple)), "each node has its value"


def test_targets_are_counted_once() -> None:
    def two(x: Tensor, y: Tensor) -> list[Tensor]:
        return with_gradient(lambda x: F.cross_entropy(x, y) + 2 * F.nll_loss(x, y))(x)

    gm = graph_of(two, torch.randn(5, 3), TARGETS)
    made_plain(gm)
    assert len(calls(gm, aten.ne.Scalar)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_of_16_bits_is_summed_in_32(dtype: torch.dtype) -> None:
    """A sum of 5,000 terms of 4 would round, one of 10,000 of 38 not be a number of 16 bits at all."""
    targets = torch.zeros(5000, dtype=torch.int64)
    x = torch.tensor([[-4.0, 0.0]]).repeat(5000, 1).to(dtype)

    def both(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        value = F.nll_loss(x, targets)
        return [value, *torch.autograd.grad(value, x), (x + 40).mean()]

    gm = graph_of(both, x)
    made_plain(gm)
    gm.recompile()
    value, grad, mean = gm(x)
    assert (value.dtype, grad.dtype, mean.dtype) == (dtype,) * 3
    assert float(value) == 4.0
    assert float(mean) == 38.0
    torch.testing.assert_close(grad[:, 0].float(), torch.full((5000,), -1 / 5000), rtol=1e-2, atol=0)


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "ones_like": torch.ones_like, "zeros_like": torch.zeros_like, "full_like": lambda x: torch.full_like(x, 3.5),
    "new_zeros": lambda x: x.new_zeros(2), "new_ones": lambda x: x.new_ones(2, 3), "ones": lambda x: torch.ones(3),
    "zeros": lambda x: torch.zeros(2, dtype=torch.int64),
}  # fmt: skip


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_depends_on_no_value(name: str) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    gm = graph_of(lambda x: [FILLS[name](x)], x)
    made_plain(gm)
    gm.recompile()
    (node,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert node.target is aten.full.default
    assert not fx_nodes.placeholders(gm.graph)[0].users
    (found,) = gm(x)
    assert found.dtype == FILLS[name](x).dtype
    assert torch.equal(found, FILLS[name](x))


def test_a_mean_along_a_dim_stays() -> None:
    gm = graph_of(lambda x: [x.mean(1), x.to(torch.float16).mean(dtype=torch.float32)], torch.randn(2, 3))
    before = str(gm.graph)
    made_plain(gm)
    assert str(gm.graph) == before


def test_weights_of_classes_are_refused_with_their_line() -> None:
    gm = graph_of(lambda x: [F.cross_entropy(x, TARGETS, weight=torch.ones(3))], torch.randn(5, 3))
    (node,) = calls(gm, *FORWARD)
    node.meta["source"] = "train.py:7"
    with pytest.raises(SpecError, match=r"the mean of a cross_entropy \(train.py:7\) has weights of classes"):
        made_plain(gm)
