"""The work of a first step: it is linear in the number of ops, and a second length does not repeat what it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cases
import pytest
import torch
from torch import Tensor, fx, nn

import fzero
from fzero.ir import forms
from fzero.ir.recorder import Recorder


class Work:
    """What a lowering did: ops recorded, nodes of graphs made, calls of the shape rules of torch and fzero."""

    ops = nodes = rules = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Counts while it is on; kept forms are dropped before."""
    work = Work()
    dispatch, create, rule = Recorder.__torch_dispatch__, fx.Graph.create_node, forms.fake_rule

    def dispatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        work.ops += 1
        return dispatch(self, *args, **kwargs)

    def created(self: Any, *args: Any, **kwargs: Any) -> Any:
        work.nodes += 1
        return create(self, *args, **kwargs)

    def ruled(op: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work.rules += 1
            return rule(op)(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "__torch_dispatch__", dispatched)
        patch.setattr(fx.Graph, "create_node", created)
        patch.setattr(forms, "fake_rule", ruled)
        yield work


def lowered(loss: Any, params: Any, batch: Any) -> Work:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    forms._kept.clear()
    with counted() as work:
        fzero.lower(spec, params, batch)
    return work


def chain(size: int) -> Work:
    def loss(p: Any, x: Tensor) -> Tensor:
        for i in range(size):
            x = torch.tanh(x * p["w"]) if i % 2 else x + p["w"]
        return x.sum()

    return lowered(loss, {"w": torch.ones(3)}, torch.ones(2, 3))


def cells(size: int) -> Work:
    """Two LSTMCells in a Python loop, as in pytorch/examples' time_sequence_prediction."""
    params, buffers, apply = fzero.interop.from_module(Unrolled())
    return lowered(lambda p, x: apply(p, buffers, x).square().mean(), params, torch.ones(2, size))


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.LSTMCell(1, 5), nn.LSTMCell(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        zero = x.new_zeros(len(x), 5)
        (h, c), (g, d), outs = (zero, zero), (zero, zero), []
        for t in x.split(1, 1):
            h, c = self.first(t, (h, c))
            g, d = self.second(h, (g, d))
            outs.append(self.last(g))
        return torch.cat(outs, 1)


def hessian(size: int) -> Work:
    """The sum of a Hessian's squares, of a function of three numbers with so many ops."""

    def loss(p: Any, x: Tensor) -> Tensor:
        def value(w: Tensor) -> Tensor:
            for _ in range(size):
                w = torch.sin(w * x)
            return w.sum()

        return torch.func.hessian(value)(p["w"]).square().sum()

    return lowered(loss, {"w": torch.ones(3)}, torch.ones(3))


def maml(size: int) -> Work:
    """MAML: so many inner steps, each a gradient that is differentiated again."""

    def loss(p: Any, x: Tensor) -> Tensor:
        def inner(w: Tensor) -> Tensor:
            return torch.tanh(x @ w).square().mean()

        w = p["w"]
        for _ in range(size):
            w = w - 0.1 * torch.func.grad(inner)(w)
        return inner(w)

    return lowered(loss, {"w": torch.ones(3, 3)}, torch.ones(2, 3))


@pytest.mark.parametrize(("work_of", "size"), [(chain, 40), (cells, 6), (hessian, 5), (maml, 5)])
@pytest.mark.sampled(1)
def test_work_is_linear_in_the_number_of_ops(work_of: Callable[[int], Work], size: int) -> None:
    """The complaint: 11 s for a chain of 1,000 ops, 8.9 s for the Hessian of three numbers, 45 s for MAML, and a loop
    of 999 LSTMCells that did not end. What twice as many ops add is twice what as many ops add."""
    one, two, four = (work_of(k * size) for k in (1, 2, 4))
    assert one.ops < two.ops < four.ops
    for what in ("ops", "nodes", "rules"):
        few, many = (getattr(b, what) - getattr(a, what) for a, b in ((one, two), (two, four)))
        assert many <= 2.1 * few + 4, f"{what}: {few}, then {many}"


def test_a_second_length_asks_for_the_shapes_that_are_new_alone() -> None:
    """The complaint: a second batch length took 0.83 of the first's seconds. An optimizer's ops, and all that follow
    from parameters alone, are asked once. Its program is what it would be in a new process."""
    init, loss = cases.gpt(64, 64, 2)
    params = init(fzero.random.key(0))
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), clip_norm=1.0)
    works, programs = [], []
    for length, alone in ((16, True), (12, False), (12, True)):
        if alone:
            forms._kept.clear()
        with counted() as work:
            programs.append(fzero.lower(spec, params, cases.tokens(2, length, 64)))
        works.append(work)
    first, second, _ = works
    assert 0 < second.rules <= first.rules / 2, (first.rules, second.rules)
    _, shared, own = programs
    assert own.digest == shared.digest
    assert str(own.program) == str(shared.program)
